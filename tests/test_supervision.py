"""Workers that die or hang: who notices, who starts them again, and what the run's results say of it."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from asyncopd import pipeline
from asyncopd.errors import ConfigError, WorkerDiedError
from asyncopd.interface import Callbacks
from asyncopd.pipeline import run
from asyncopd.queue.ledger import Ledger
from asyncopd.supervisor import SupervisionConfig
from asyncopd.tracking.metrics import read_metrics
from asyncopd.tracking.trace import read_trace
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import ThreadedWorkers, final_weights, tiny_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return save_checkpoint(make_tiny_llama(0), folder / "teacher"), save_checkpoint(
        make_tiny_llama(1, layers=2), folder / "student"
    )


def worker(name: str) -> psutil.Process:
    """The process of a worker of this process's run."""
    (found,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.cmdline()[2:5] == ["asyncopd.worker", *name.split("-")]
    ]
    return found


def at_version(deeds: dict[int, Callable[[], None]]) -> Callbacks:
    """What to do once after each of some steps."""
    return Callbacks(on_step=lambda version, _: deeds.pop(version)() if version in deeds else None)


def test_workers_that_die_or_hang_are_replaced_and_a_sync_run_ends_with_the_same_weights(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threads").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "Supervisor", ThreadedWorkers)
        undisturbed = run(tiny_config(tmp_path / "threads", *models)).path
    config = tiny_config(tmp_path, *models, supervision=SupervisionConfig(restarts=1, backoff_s=0.1))
    config = replace(config, queue=replace(config.queue, lease_s=3.0))
    struck: list[int] = []

    def strike(deed: Callable[[], None]) -> None:
        struck.append(time.time_ns())
        deed()

    result = run(
        config,
        callbacks=at_version(
            {1: lambda: strike(worker("rollout-0").kill), 3: lambda: strike(worker("scorer-0").suspend)}
        ),
    )
    first, second = final_weights(undisturbed), final_weights(result.path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert result.summary is not None
    assert result.summary.restarts == 2
    steps = [row.values["restarts"] for row in read_metrics(result.path) if "loss" in row.values]
    assert (steps[0], steps[-1]) == (0, 2)
    seen = [instant for instant in read_trace(result.path).instants if instant.name.startswith("restart")]
    assert [instant.name for instant in seen] == ["restart rollout-0", "restart scorer-0"]
    noticed_s = [(instant.time_ns - at) / 1e9 for instant, at in zip(seen, struck, strict=True)]
    assert noticed_s[0] < 2, "a death is noticed within two seconds"
    assert 2 < noticed_s[1] < 3 + 2, "a hang within its lease"
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []


def test_without_restarts_a_dead_worker_fails_the_run_within_two_seconds_and_names_the_stage(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    died: list[float] = []

    def kill() -> None:
        worker("rollout-0").kill()
        died.append(time.monotonic())

    config = tiny_config(tmp_path, *models, steps=100000, supervision=SupervisionConfig(restarts=0))
    with pytest.raises(WorkerDiedError, match="stage 'rollout-0' died: exit status -9"):
        run(config, callbacks=at_version({2: kill}))
    # Two seconds to notice, and what the other worker needs to stop.
    assert time.monotonic() - died[0] < 2 + 20
    assert [p for p in psutil.Process().children(recursive=True) if "asyncopd.worker" in p.cmdline()] == []


def test_a_worker_whose_first_start_raises_fails_the_run_at_once(models: tuple[Path, Path], tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(models[0], teacher)
    (teacher / "model.safetensors").unlink()
    config = tiny_config(tmp_path, teacher, models[1])
    config = replace(config, data=replace(config.data, held_out_from_end=0))
    with pytest.raises(WorkerDiedError, match="(?s)'scorer-0' died: exit status 1 before it was ready.*model.safetens"):
        run(config)


def test_a_worker_that_cannot_be_started_again_fails_the_run_after_its_restarts_with_the_end_of_its_log(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    def spoil() -> None:
        (models[0] / "config.json").rename(models[0] / "config.json.gone")
        os.kill(worker("scorer-0").pid, signal.SIGKILL)

    config = tiny_config(tmp_path, *models, steps=100000, supervision=SupervisionConfig(restarts=1, backoff_s=0.1))
    try:
        with pytest.raises(WorkerDiedError, match="(?s)'scorer-0' died: exit status 1, after 1 restarts.*config.json"):
            run(config, callbacks=at_version({1: spoil}))
    finally:
        (models[0] / "config.json.gone").rename(models[0] / "config.json")


@pytest.mark.parametrize(
    ("name", "value"), [("restarts", -1), ("backoff_s", -0.5), ("start_s", 0.0), ("stall_s", -1.0)]
)
def test_impossible_supervision_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"supervision.{name} is {value}"):
        SupervisionConfig(**{name: value})  # type: ignore[arg-type]


def test_a_worker_that_has_worked_for_long_may_die_again(models: tuple[Path, Path], tmp_path: Path) -> None:
    def later() -> None:
        # The supervisor looks five times a second.
        time.sleep(1)
        worker("rollout-0").kill()

    supervision = SupervisionConfig(restarts=1, backoff_s=0.1, forgive_s=0.05)
    result = run(
        tiny_config(tmp_path, *models, supervision=supervision),
        callbacks=at_version({1: lambda: worker("rollout-0").kill(), 4: later}),
    )
    assert result.summary is not None
    assert result.summary.restarts == 2
