"""Whole runs with tiny models and real processes."""

import json
import math
from pathlib import Path

import pytest
import torch

from asyncopd.errors import ConfigError, DataError
from asyncopd.interface import RunResult
from asyncopd.pipeline import run
from asyncopd.queue.ledger import Ledger
from asyncopd.tracking.metrics import read_metrics
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import final_weights, tiny_config


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
