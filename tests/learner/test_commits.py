"""A step is written and committed while the learner is at the next one, and nothing is lost or reordered by it."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncopd import pipeline
from asyncopd.errors import CheckpointError, LedgerError
from asyncopd.evaluation import EvaluationConfig
from asyncopd.interface import Callbacks
from asyncopd.learner.checkpoint import CheckpointConfig
from asyncopd.learner.commits import Commits
from asyncopd.learner.step import Learner
from asyncopd.pipeline import run
from asyncopd.publish import Weights, WeightStore
from asyncopd.publish.probe import Probe
from asyncopd.queue.ledger import Ledger
from asyncopd.tracking.trace import Tracer
from asyncopd.types import ScoredRollout
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.queue.driver import Driver
from tests.tiny_run import ThreadedWorkers, tiny_config

WAIT_S = 60.0


class GatedStore(WeightStore):
    """Writes nothing until it is let."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.gate = threading.Event()

    def publish(self, version: int, weights: Weights, probe: Probe | None = None) -> Path:
        assert self.gate.wait(WAIT_S)
        return super().publish(version, weights, probe)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    made = Driver(tmp_path, max_staleness=2)
    made.prepare()
    return made


def test_the_weights_that_are_written_are_those_of_the_step_and_the_version_follows_them(driver: Driver) -> None:
    store = GatedStore(driver.folder)
    weights = {"a": torch.ones(3)}
    batch = driver.ledger.lease_batch()
    assert batch is not None
    with Tracer(driver.folder, "learner") as tracer:
        commits = Commits(driver.path, store, [], tracer, behind=True)
        commits.start(batch, 1, weights)
        weights["a"].fill_(7)
        assert commits.pending == batch
        assert driver.ledger.policy_version == 0
        store.gate.set()
        commits.settle()
    assert commits.pending is None
    assert driver.ledger.policy_version == driver.ledger.published_version == 1
    assert load_file(store.directory(1) / "model.safetensors")["a"].tolist() == [1, 1, 1]


def test_the_batch_that_follows_is_known_before_the_commit_and_is_what_the_ledger_hands_out_after_it(
    driver: Driver,
) -> None:
    store = GatedStore(driver.folder)
    with Tracer(driver.folder, "learner") as tracer:
        commits = Commits(driver.path, store, [], tracer, behind=True)
        first = driver.ledger.lease_batch()
        assert first is not None
        commits.start(first, 1, {})
        second = driver.ledger.following_batch(first)
        assert second is not None
        assert not {s.uid for s in first.samples} & {s.uid for s in second.samples}
        assert driver.ledger.counts().leased == len(first.samples)
        store.gate.set()
        commits.start(second, 2, {})
        commits.settle()
    assert driver.ledger.policy_version == 2
    assert driver.ledger.trained_batch(2) == second
    assert driver.ledger.verify() == []


def test_a_batch_that_the_ledger_would_not_hand_out_is_not_committed(driver: Driver) -> None:
    first = driver.ledger.lease_batch()
    assert first is not None
    second = driver.ledger.following_batch(first)
    assert second is not None
    with Tracer(driver.folder, "learner") as tracer:
        commits = Commits(driver.path, WeightStore(driver.folder), [], tracer, behind=True)
        commits.start(second, 1, {})
        with pytest.raises(LedgerError, match="not the 4 leased ones"):
            commits.settle()
    assert driver.ledger.policy_version == 0


@pytest.mark.parametrize("changes", [{"selection": "freshest"}, {"lag": 2, "group_size": 4}], ids=str)
def test_where_a_commit_may_change_what_is_next_no_batch_is_taken_ahead(tmp_path: Path, changes: dict) -> None:
    driver = Driver(tmp_path, max_staleness=2, **changes)
    for _ in range(3):
        driver.prepare()
    batch = driver.ledger.lease_batch()
    assert batch is not None
    assert driver.ledger.counts().scored >= 4
    assert driver.ledger.following_batch(batch) is None


def test_a_straggler_is_waited_for_and_a_dropped_sample_is_replaced_in_the_batch_that_follows(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_staleness=2)
    driver.roll()
    lease = driver.ledger.lease_scoring("scorer", 8, 60.0)
    assert lease is not None
    for sample in lease.samples[:7]:
        driver.put_record(lease.token, sample)
    first = driver.ledger.lease_batch()
    assert first is not None
    assert driver.ledger.following_batch(first) is None
    driver.ledger.drop(lease.token, lease.samples[7].uid, "unscorable", "NaN")
    driver.score()
    second = driver.ledger.following_batch(first)
    assert second is not None
    assert [sample.ordinal for sample in second.samples] == [4, 5, 6, 8]
    driver.ledger.commit_step(first, 1, published=True)
    assert driver.ledger.lease_batch() == second


def _models(folder: Path) -> tuple[Path, Path]:
    return save_checkpoint(make_tiny_llama(0), folder / "teacher"), save_checkpoint(
        make_tiny_llama(1, layers=2), folder / "student"
    )


def test_the_learner_trains_the_next_batch_while_the_last_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each version is written only once the step after it has begun; a learner that waited would never get there."""
    steps = 6
    begun = [threading.Event() for _ in range(steps)]
    step, publish = Learner.step, WeightStore.publish

    def noted(self: Learner, samples: Sequence[ScoredRollout], version: int) -> dict[str, float]:
        begun[version].set()
        return step(self, samples, version)

    def late(self: WeightStore, version: int, weights: Weights, probe: Probe | None = None) -> Path:
        if 0 < version < steps:
            assert begun[version].wait(WAIT_S)
        return publish(self, version, weights, probe)

    monkeypatch.setattr(Learner, "step", noted)
    monkeypatch.setattr(WeightStore, "publish", late)
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    config = tiny_config(
        tmp_path,
        *_models(tmp_path),
        mode="async",
        steps=steps,
        evaluation=EvaluationConfig(prompts=0),
        checkpoint=CheckpointConfig(every=0),
    )
    result = run(config)
    assert result.policy_version == steps
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        assert max(step.max for step in ledger.staleness().steps) <= 2


def test_weights_that_cannot_be_written_fail_the_run_and_commit_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = WeightStore.publish

    def fails(self: WeightStore, version: int, weights: Weights, probe: Probe | None = None) -> Path:
        if version == 2:
            raise CheckpointError("no room for version 2")
        return publish(self, version, weights, probe)

    monkeypatch.setattr(WeightStore, "publish", fails)
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    config = tiny_config(tmp_path, *_models(tmp_path), mode="async", evaluation=EvaluationConfig(prompts=0))
    with pytest.raises(CheckpointError, match="no room for version 2"):
        run(config)
    with Ledger.open(tmp_path / "runs" / "tiny" / "ledger.sqlite") as ledger:
        assert ledger.policy_version == 1


def test_a_run_that_fails_has_written_everything_before_its_folder_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, written = threading.Event(), threading.Event()
    publish = WeightStore.publish

    def late(self: WeightStore, version: int, weights: Weights, probe: Probe | None = None) -> Path:
        if version == 1:
            assert failed.wait(WAIT_S)
            # The time that the failing run needs to come to its end.
            time.sleep(0.5)
        path = publish(self, version, weights, probe)
        if version == 1:
            written.set()
        return path

    def fail(version: int, values: Mapping[str, float]) -> None:
        failed.set()
        raise ArithmeticError("of the caller")

    monkeypatch.setattr(WeightStore, "publish", late)
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    config = tiny_config(tmp_path, *_models(tmp_path), mode="async", evaluation=EvaluationConfig(prompts=0))
    with pytest.raises(ArithmeticError):
        run(config, callbacks=Callbacks(on_step=fail))
    assert written.is_set()
