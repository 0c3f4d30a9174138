"""What the pool does to an engine when new weights arrive."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncopd.publish import FileSource, WeightStore
from asyncopd.publish.probe import Probe
from asyncopd.rollout.pool import RolloutConfig, RolloutWorker


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

    def logprobs(self, ids: tuple[int, ...]) -> torch.Tensor:
        self.told.append("probe")
        return torch.full((len(ids) - 1,), -1.0)


# A probe advances the answers in flight where the engine can only ask for next tokens, as vLLM.
@pytest.mark.parametrize("on_abort", ["continue", "regenerate"])
def test_aborted_answers_leave_the_old_state_before_a_probe_advances_them(tmp_path: Path, on_abort: str) -> None:
    store, engine = WeightStore(tmp_path), Recorder()
    store.publish(4, {"w": torch.zeros(2)}, Probe((1, 2, 3), (-1.0, -1.0)))
    tracer = SimpleNamespace(span=lambda *_, **__: nullcontext())
    stage = SimpleNamespace(beat=lambda: None, loading=nullcontext, tracer=tracer)
    worker = RolloutWorker(
        stage=stage, engine=engine, weights=FileSource(store, engine), prompts={}, pinned=False,
        config=RolloutConfig(weights="abort", on_abort=on_abort, dtype="fp32"),
    )  # fmt: skip
    worker._load(4)
    assert engine.told == ["load 4", on_abort, "probe"]
