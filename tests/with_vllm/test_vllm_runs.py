"""Whole runs with vLLM as the rollout engine: real processes, tiny models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError, WeightsMismatchError
from asyncopd.interface import Callbacks
from asyncopd.learner.adapters import LoraConfig
from asyncopd.pipeline import run
from asyncopd.publish.config import PublishConfig
from asyncopd.queue.ledger import Ledger
from asyncopd.rollout.vllm_config import VllmEngineConfig, check_placement
from asyncopd.tracking.metrics import read_metrics
from tests.tiny_run import ThreadedWorkers, tiny_config
from tests.with_vllm.conftest import KV_CACHE_GB
from tests.with_vllm.models import save

pytestmark = pytest.mark.vllm


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A tiny run with vLLM; the student's head is tied to its embedding."""
    teacher, student = save("untied-llama", 1, tmp_path), save("tied-llama", 0, tmp_path)

    def make(adapters: str = "auto", **rollout: object) -> RunConfig:
        tiny = tiny_config(tmp_path, teacher, student, mode="async")
        options = VllmEngineConfig(kv_cache_gb=KV_CACHE_GB, adapters=adapters)
        return replace(tiny, rollout=replace(tiny.rollout, engine="vllm", vllm=options, **rollout))

    return make


def kill_rollout_worker() -> None:
    (found,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.cmdline()[2:5] == ["asyncopd.worker", "rollout", "0"]
    ]
    found.kill()


@pytest.mark.parametrize(
    ("weights", "kills", "rank"), [("keep", 1, 0), ("abort", 0, 0), ("keep", 1, 4)], ids=["keep", "abort", "adapters"]
)
def test_an_asynchronous_run_keeps_its_staleness_bound_though_its_engine_is_killed(
    config: Callable[..., RunConfig], weights: str, kills: int, rank: int
) -> None:
    asked = config("apply", weights=weights)
    asked = replace(asked, learner=replace(asked.learner, lora=LoraConfig(rank=rank)))
    callbacks = Callbacks(on_step=lambda version, _: kill_rollout_worker() if version == 2 and kills else None)
    result = run(asked, callbacks=callbacks)
    assert result.policy_version == asked.steps
    assert [row.values["restarts"] for row in read_metrics(result.path) if "loss" in row.values][-1] == kills
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        counts = ledger.counts()
        assert (counts.trained, counts.dropped) == (asked.steps * asked.queue.batch_size, 0)
        assert max(step.max for step in ledger.staleness().steps) <= asked.max_staleness
    names = {path.name for path in result.path.glob("weights/v*/*.safetensors")}
    assert names == {"adapter_model.safetensors" if rank else "model.safetensors"}


def test_adapters_that_do_not_arrive_stop_the_run(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncopd.rollout.vllm_engine import VllmEngine

    monkeypatch.setattr("asyncopd.pipeline.Supervisor", ThreadedWorkers)
    monkeypatch.setattr(VllmEngine, "_load_adapters", lambda engine, directory: None)
    asked = config("apply")
    with pytest.raises(WeightsMismatchError, match="nats on average"):
        run(replace(asked, learner=replace(asked.learner, lr=0.1, lora=LoraConfig(rank=4))))


@pytest.mark.parametrize("backend", ["file", "gloo"])
def test_a_tied_head_that_is_not_updated_stops_the_run(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    from asyncopd.rollout.vllm_worker import WorkerExtension

    monkeypatch.setattr("asyncopd.pipeline.Supervisor", ThreadedWorkers)
    monkeypatch.setattr(WorkerExtension, "_repack_heads", lambda worker: None)
    with pytest.raises(WeightsMismatchError, match="nats on average"):
        run(replace(config(), publish=PublishConfig(backend=backend)))


def test_placement_that_cannot_be_is_refused_with_what_to_change() -> None:
    def refusal(workers: int = 1, devices: str = "", gpus: bool = False, **options: object) -> str:
        with pytest.raises(ConfigError) as refused:
            check_placement(VllmEngineConfig(**options), workers, devices, gpus, {0, 1})
        return str(refused.value)

    assert "use more rollout.workers" in refusal(tensor_parallel=2)
    assert "rollout.devices is empty" in refusal(tensor_parallel=2, gpus=True)
    assert "as many GPUs in each group" in refusal(devices="4", tensor_parallel=2, gpus=True)
    assert "one for each of rollout.workers" in refusal(workers=2, cores="0")
    assert "names [7]" in refusal(cores="7")
    assert "a core comes twice" in refusal(workers=2, cores="0-1;1")
    check_placement(VllmEngineConfig(cores="0;1"), 2, "", False, {0, 1})
