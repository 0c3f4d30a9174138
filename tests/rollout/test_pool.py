"""What the pool does to an engine when new weights arrive."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncopd.publish import FileSource, WeightStore
from asyncopd.publish.probe import Probe
from asyncopd.rollout.pool import RolloutConfig, RolloutWorker
from asyncopd.types import RolloutRequest


class Recorder:
    """An engine with an answer in flight that notes what it is told."""

    in_flight = 1
    policy_version = 0

    def __init__(self) -> None:
        self.told: list[str] = []

    def load_weights(self, directory: Path, version: int) -> None:
        self.told.append(f"load {version}")

    def restart(self, keep_tokens: bool) -> None:
        self.told.append("continue" if keep_tokens else "regenerate")

    def submit(self, requests: list[RolloutRequest]) -> None:
        self.told.append("submit")

    def abandon(self, uids: list[str]) -> None:
        self.told.append(" ".join(["abandon", *uids]))

    def logprobs(self, ids: tuple[int, ...]) -> torch.Tensor:
        self.told.append("probe")
        return torch.full((len(ids) - 1,), -1.0)


class Loading:
    """A stage's ``loading``, and whether it is on."""

    on = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.on = True
        yield
        self.on = False


def make_worker(folder: Path, engine: Recorder, loading: Loading, kept: bool, **config: object) -> RolloutWorker:
    """Version 4 is published with a probe; ``kept``: whether leases are still the worker's."""
    store = WeightStore(folder)
    store.publish(4, {"w": torch.zeros(2)}, Probe((1, 2, 3), (-1.0, -1.0)))
    tracer = SimpleNamespace(span=lambda *_, **__: nullcontext())
    ledger = SimpleNamespace(heartbeat=lambda token, seconds: kept)
    parts = {"loading": loading, "tracer": tracer, "ledger": ledger, "log": logging.getLogger(__name__)}
    stage = SimpleNamespace(beat=lambda: None, lease_s=60.0, **parts)
    return RolloutWorker(
        stage=stage, engine=engine, weights=FileSource(store, engine), prompts={}, pinned=False,
        config=RolloutConfig(dtype="fp32", **config),
    )  # fmt: skip


# A probe advances the answers in flight where the engine can only ask for next tokens, as vLLM.
@pytest.mark.parametrize("on_abort", ["continue", "regenerate"])
def test_aborted_answers_leave_the_old_state_before_a_probe_advances_them(tmp_path: Path, on_abort: str) -> None:
    engine = Recorder()
    make_worker(tmp_path, engine, Loading(), kept=True, weights="abort", on_abort=on_abort)._load(4)
    assert engine.told == ["load 4", on_abort, "probe"]


def test_answers_whose_lease_ended_while_weights_were_loaded_are_let_go_before_more_is_leased(tmp_path: Path) -> None:
    engine = Recorder()
    worker = make_worker(tmp_path, engine, Loading(), kept=False)
    worker._tokens = {"a": 7, "b": 7}
    worker._load(4)
    assert engine.told == ["load 4", "probe", "abandon a b"]
    assert worker._tokens == {}


def test_a_probe_that_takes_long_is_no_hang(tmp_path: Path) -> None:
    loading, engine, beating = Loading(), Recorder(), []
    ask = engine.logprobs
    engine.logprobs = lambda ids: (beating.append(loading.on), ask(ids))[1]  # type: ignore[method-assign]
    make_worker(tmp_path, engine, loading, kept=True)._load(4)
    assert beating == [True]


@pytest.mark.parametrize("kept", [True, False])
def test_a_lease_that_ended_while_weights_were_loaded_for_it_is_not_begun(tmp_path: Path, kept: bool) -> None:
    engine = Recorder()
    worker = make_worker(tmp_path, engine, Loading(), kept=kept)
    worker._submit(SimpleNamespace(token=7, samples=()))
    assert engine.told == (["submit"] if kept else [])
