"""A recorded run, trained again from its payloads."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncopd import cli, pipeline
from asyncopd.errors import ConfigError
from asyncopd.objectives import ObjectiveConfig
from asyncopd.pipeline import run
from asyncopd.replay import replay, require_recorded
from asyncopd.tracking.metrics import read_metrics
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import ThreadedWorkers, final_weights, tiny_config


def record(folder: Path, mode: str) -> Path:
    """A run that kept its payloads; its teacher is gone."""
    teacher = save_checkpoint(make_tiny_llama(0), folder / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), folder / "student")
    config = tiny_config(folder, teacher, student, mode=mode)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "Supervisor", ThreadedWorkers)
        path = run(replace(config, queue=replace(config.queue, record=True))).path
    shutil.rmtree(teacher)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded sync run."""
    return record(tmp_path_factory.mktemp("recorded"), "sync")


def losses(path: Path) -> list[float]:
    return [row.values["loss"] for row in read_metrics(path) if "loss" in row.values]


def test_a_replay_with_the_runs_own_objective_repeats_its_losses_and_weights_bit_for_bit(recorded: Path) -> None:
    again = replay(recorded, ObjectiveConfig(name="reverse_kl", design="systematic(8)"))
    assert losses(again.path) == losses(recorded)
    assert len(losses(again.path)) == 6
    first, second = final_weights(recorded), final_weights(again.path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert again.path.parent == recorded.parent
    assert again.summary is not None
    assert again.summary.steps == 6


def test_a_replay_of_an_async_run_repeats_its_losses_and_staleness(tmp_path: Path) -> None:
    recorded = record(tmp_path, "async")
    again = replay(recorded, ObjectiveConfig(name="reverse_kl", design="systematic(8)"))
    assert losses(again.path) == losses(recorded)
    ages = [
        [row.values["staleness/mean"] for row in read_metrics(path) if "loss" in row.values]
        for path in (again.path, recorded)
    ]
    assert ages[0] == ages[1]


def test_asyncopd_replay_trains_the_same_answers_with_another_objective(recorded: Path) -> None:
    assert (
        cli.main(
            ["replay", str(recorded), "--name", "other", "--objective.name", "jsd", "--objective.origin", "student"]
        )
        == 0
    )
    other = recorded.parent / "other"
    tokens = [
        [row.values["tokens"] for row in read_metrics(path) if "loss" in row.values] for path in (other, recorded)
    ]
    assert tokens[0] == tokens[1]
    assert losses(other) != losses(recorded)
    for name in ("summary.json", "report.html", "final/model.safetensors", "final/README.md"):
        assert (other / name).stat().st_size > 0


def test_a_policy_gradient_replays_from_any_recording(recorded: Path) -> None:
    assert len(losses(replay(recorded, ObjectiveConfig(name="pg_cached"), name="pg").path)) == 6


@pytest.mark.parametrize(
    ("objective", "remedy"),
    [
        (ObjectiveConfig(name="forward_kl", design="systematic(8)"), "reads teacher-drawn .* recorded student-drawn"),
        (ObjectiveConfig(name="reverse_kl", design="systematic(4)"), r'--objective.design "systematic\(8\)"'),
        (
            ObjectiveConfig(name="reverse_kl", design="systematic(8)", temperature=2.0),
            "--objective.temperature 1.0",
        ),
    ],
)
def test_an_objective_that_needs_what_was_not_recorded_is_refused_before_anything_is_written(
    recorded: Path, objective: ObjectiveConfig, remedy: str
) -> None:
    before = sorted(recorded.parent.iterdir())
    with pytest.raises(ConfigError, match=remedy):
        replay(recorded, objective)
    assert sorted(recorded.parent.iterdir()) == before


def test_an_objective_that_reads_the_sampler_is_refused_where_the_teacher_wrote_answers(tmp_path: Path) -> None:
    drawn = ObjectiveConfig(name="forward_kl", design="systematic(8)")
    config = tiny_config(tmp_path, tmp_path, tmp_path, objective=drawn)
    mixed = replace(config, rollout=replace(config.rollout, teacher_fraction="0.5->0 over 4"))
    require_recorded(config, ObjectiveConfig(name="pg_cached"))
    require_recorded(mixed, drawn)
    with pytest.raises(ConfigError, match="teacher_fraction is set and pg_cached"):
        require_recorded(mixed, ObjectiveConfig(name="pg_cached"))


def test_a_run_that_was_not_recorded_cannot_be_replayed(recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded, tmp_path / "bare")
    config = (tmp_path / "bare" / "config.yaml").read_text()
    (tmp_path / "bare" / "config.yaml").write_text(config.replace("record: true", "record: false"))
    with pytest.raises(ConfigError, match="--queue.record can"):
        replay(tmp_path / "bare", ObjectiveConfig())
    with pytest.raises(ConfigError, match="holds no ledger"):
        replay(tmp_path, ObjectiveConfig())
