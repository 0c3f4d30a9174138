"""Whole runs with tiny models and real processes."""

import json
import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncopd import pipeline
from asyncopd.errors import ConfigError, DataError
from asyncopd.evaluation import EvaluationConfig
from asyncopd.interface import Callbacks, Inputs, RunResult
from asyncopd.learner.checkpoint import CheckpointConfig
from asyncopd.objectives import SURROGATES, ObjectiveConfig
from asyncopd.pipeline import run
from asyncopd.prompts import DataConfig
from asyncopd.queue.ledger import Ledger
from asyncopd.tracking.metrics import read_metrics
from tests.conftest import make_tiny_llama, make_tiny_tokenizer, save_checkpoint
from tests.tiny_run import ThreadedWorkers, final_weights, tiny_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Teacher and student: two unrelated tiny models."""
    folder = tmp_path_factory.mktemp("pair")
    return save_checkpoint(make_tiny_llama(0), folder / "teacher"), save_checkpoint(
        make_tiny_llama(1, layers=2), folder / "student"
    )


def _losses(result: RunResult) -> list[float]:
    return [row.values["loss"] for row in read_metrics(result.path) if "loss" in row.values]


@pytest.fixture(scope="module")
def sync_run(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(tiny_config(tmp_path_factory.mktemp("sync"), *models))


def test_two_sync_runs_with_one_seed_give_the_same_losses_and_weights(
    sync_run: RunResult, models: tuple[Path, Path], tmp_path: Path
) -> None:
    again = run(tiny_config(tmp_path, *models))
    assert _losses(again) == _losses(sync_run)
    assert len(_losses(again)) == 6
    first, second = final_weights(sync_run.path), final_weights(again.path)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_sync_trains_every_step_on_exactly_its_own_version(sync_run: RunResult) -> None:
    rows = [row for row in read_metrics(sync_run.path) if "loss" in row.values]
    assert [row.values["staleness/max"] for row in rows] == [0.0] * 6
    with Ledger.open(sync_run.path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        assert ledger.counts().trained == 48


def test_a_run_leaves_everything_that_it_promises(sync_run: RunResult) -> None:
    summary = json.loads((sync_run.path / "summary.json").read_text())
    for direction in ("reverse_kl", "forward_kl"):
        for when in ("before", "after"):
            assert set(summary["held_out"][direction][when]) == {"mean", "ci95"}
    assert summary["steps"] == 6
    assert summary["mode"] == "sync"
    assert summary["samples"] == {"admitted": 48, "trained": 48, "dropped": {}}
    assert summary["staleness"] == {"mean": 0.0, "max": 0.0}
    for stage in ("rollout", "teacher", "learner"):
        assert summary["tokens_per_s"][stage] > 0
        assert 0 < summary["busy"][stage] <= 1
    assert summary["wall_s"] > 0
    assert 0 <= summary["overlap"] <= 1
    assert summary["logprob_gap_on_policy"] < 1e-5
    trace = json.loads((sync_run.path / "trace.json").read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"learner", "rollout-0", "scorer-0"}
    for name in ("report.html", "metrics.jsonl", "config.yaml", "final/README.md", "final/tokenizer.json"):
        assert (sync_run.path / name).stat().st_size > 0


def test_lagged_mode_generates_batch_i_from_exactly_version_i_minus_k(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    result = run(tiny_config(tmp_path, *models, mode="lagged:2"))
    rows = [row for row in read_metrics(result.path) if "loss" in row.values]
    assert [row.values["staleness/max"] for row in rows] == [0, 1, 2, 2, 2, 2]
    assert [row.values["staleness/mean"] for row in rows] == [0, 1, 2, 2, 2, 2]


def test_async_trains_every_sample_once_and_keeps_its_staleness_bound(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    result = run(tiny_config(tmp_path, *models, mode="async", steps=12))
    rows = [row for row in read_metrics(result.path) if "loss" in row.values]
    assert max(row.values["staleness/max"] for row in rows) <= 2
    assert all(math.isfinite(row.values["loss"]) for row in rows)
    assert all(row.values["length_bias"] == 0 for row in rows)
    assert result.summary is not None
    assert result.summary.samples is not None
    assert (result.summary.samples.trained, dict(result.summary.samples.dropped)) == (96, {})
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []


def test_on_policy_training_brings_the_student_to_the_teacher(models: tuple[Path, Path], tmp_path: Path) -> None:
    result = run(tiny_config(tmp_path, *models, mode="async", steps=60))
    assert result.before is not None
    assert result.after is not None
    assert result.after.reverse_kl.mean < 0.7 * result.before.reverse_kl.mean


def test_a_taken_name_is_refused_and_an_automatic_one_is_never_taken(
    sync_run: RunResult, models: tuple[Path, Path]
) -> None:
    config = tiny_config(sync_run.path.parent.parent, *models)
    with pytest.raises(ConfigError, match="'tiny' exists .* --resume"):
        run(config)


def test_different_tokenizers_stop_a_run_before_a_model_loads_and_leave_no_folder(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    teacher, student = models
    other = save_checkpoint(make_tiny_llama(0), tmp_path / "other")
    edited = (other / "tokenizer.json").read_text().replace("<|endoftext|>", "<|the end|>")
    (other / "tokenizer.json").write_text(edited)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = other / name
        if path.exists():
            path.write_text(path.read_text().replace("<|endoftext|>", "<|the end|>"))
    (other / "model.safetensors").unlink()
    config = tiny_config(tmp_path, other, student)
    with pytest.raises(DataError, match="different tokenizers: 1 ids differ"):
        run(config)
    assert not (config.runs_dir / config.name).exists()


def test_objects_in_memory_callbacks_and_an_own_evaluation_take_part_in_a_run(tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {"step": [], "evaluation": [], "checkpoint": []}
    rows = [{"messages": [{"role": "user", "content": f"Say {number}."}]} for number in range(20)]
    config = tiny_config(
        tmp_path, Path("unused"), Path("unused"), mode="async", data=DataConfig(held_out_from_end=4),
        evaluation=EvaluationConfig(prompts=4, every=3),
    )  # fmt: skip
    result = run(
        config,
        inputs=Inputs(
            student=make_tiny_llama(1, layers=2),
            teacher=make_tiny_llama(0),
            tokenizer=make_tiny_tokenizer(),
            train=Dataset.from_list(rows),
        ),
        callbacks=Callbacks(
            on_step=lambda version, _: seen["step"].append(version),
            on_evaluation=lambda version, _: seen["evaluation"].append(version),
            on_checkpoint=lambda version, _: seen["checkpoint"].append(version),
            evaluate=lambda student, version: {"own/norm": float(student.get_input_embeddings().weight.norm())},
        ),
    )
    assert seen == {"step": [1, 2, 3, 4, 5, 6], "evaluation": [0, 3, 6], "checkpoint": [2, 4, 6]}
    own = [row.values["own/norm"] for row in read_metrics(result.path) if "own/norm" in row.values]
    assert len(own) == 3
    assert result.final is not None
    assert AutoModelForCausalLM.from_pretrained(result.final).config.num_hidden_layers == 2
    assert AutoTokenizer.from_pretrained(result.final).chat_template == make_tiny_tokenizer().chat_template


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_weights_are_deleted_as_the_run_goes_on_and_not_only_at_checkpoints(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    config = tiny_config(tmp_path, *models, mode=mode, steps=8, evaluation=EvaluationConfig(prompts=0))
    config = replace(config, checkpoint=CheckpointConfig(every=0))
    there: list[int] = []
    folder = config.runs_dir / config.name / "weights"
    run(config, callbacks=Callbacks(on_step=lambda *_: there.append(len(list(folder.glob("v*"))))))
    # The one that is being written, and those that a worker may be about to open.
    assert max(there) <= 4


def test_held_out_answers_that_must_be_longer_than_they_may_be_are_refused_before_a_model_loads(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, *models, evaluation=EvaluationConfig(max_new_tokens=4))
    sampling = replace(config.rollout.sampling, min_new_tokens=8)
    config = replace(config, rollout=replace(config.rollout, sampling=sampling))
    with pytest.raises(ConfigError, match=r"evaluation\.max_new_tokens is 4; expected at least the 8"):
        run(config)


@pytest.mark.parametrize(
    ("name", "design"),
    [
        ("forward_kl", "systematic(8)"),
        ("forward_kl", "full"),
        ("reverse_kl", "full"),
        ("reverse_kl", "sampled"),
        ("reverse_kl", "multi_sample(8)"),
        ("reverse_kl", "top_k(8)"),
        ("reverse_kl", "two_phase(16, 8)"),
        ("jsd", "systematic(8)"),
        ("mixed", "systematic(8)"),
        ("pg_cached", "systematic(8)"),
        ("second_moment", "systematic(8)"),
    ],
)
def test_every_kind_of_objective_goes_through_a_whole_run(
    name: str, design: str, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    objective = ObjectiveConfig(name=name) if name in SURROGATES else ObjectiveConfig(name=name, design=design)
    result = run(tiny_config(tmp_path, *models, objective=objective, steps=3, evaluation=EvaluationConfig(prompts=0)))
    losses = _losses(result)
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)


def test_scripted_engine_and_scorer_drive_a_run_without_rollout_or_teacher_models(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    config = tiny_config(tmp_path, *models, mode="async")
    config = replace(
        config,
        rollout=replace(config.rollout, engine="scripted"),
        teacher=replace(config.teacher, scorer="scripted", model=Path("none")),
    )
    result = run(config)
    assert result.summary is not None
    assert result.summary.samples is not None
    assert result.summary.samples.trained == 48


@pytest.mark.parametrize(("weights", "spanning"), [("keep", True), ("drain", False)])
def test_an_answer_spans_versions_where_weights_are_kept_and_never_where_they_are_drained(
    weights: str, spanning: bool, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    config = tiny_config(tmp_path, *models, mode="async", steps=20, evaluation=EvaluationConfig(prompts=0))
    sampling = replace(config.rollout.sampling, min_new_tokens=60, max_new_tokens=60)
    result = run(replace(config, rollout=replace(config.rollout, weights=weights, sampling=sampling)))
    with closing(sqlite3.connect(result.path / "ledger.sqlite")) as ledger:
        spans = ledger.execute("SELECT newest_version - oldest_version FROM samples WHERE state = 6").fetchall()
    assert len(spans) == 160
    assert (max(spans) > (0,)) == spanning
