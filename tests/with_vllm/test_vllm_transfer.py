"""Weights from the learner's memory into real vLLM engines: the same as through files, and safe when an end dies."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from asyncopd.config import RunConfig
from asyncopd.errors import CheckpointError
from asyncopd.pipeline import run
from asyncopd.publish import WeightStore, transfer_publisher
from asyncopd.publish.config import PublishConfig
from asyncopd.publish.transfer_group import TransferGroup
from asyncopd.publish.transfer_publisher import TransferPublisher
from asyncopd.publish.transfer_source import TransferSource
from asyncopd.queue.ledger import Ledger
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.vllm_config import VllmEngineConfig
from asyncopd.tracking.metrics import read_metrics
from tests.chaos_processes import wait_until
from tests.tiny_run import ThreadedWorkers, final_weights, tiny_config
from tests.with_vllm.conftest import KV_CACHE_GB, Pair
from tests.with_vllm.models import KINDS, save
from tests.with_vllm.test_vllm_engine import advance, assert_same, drain, generate, requests
from tests.with_vllm.test_vllm_runs import kill_rollout_worker

pytestmark = pytest.mark.vllm

Pairs = Callable[..., Pair]


class Line:
    """A publisher that writes no file but the first, and the source of one engine."""

    def __init__(self, folder: Path, engine: object) -> None:
        config = PublishConfig(backend="gloo", deadline_s=20.0)
        self.store = WeightStore(folder, torch.float32)
        self.publisher = TransferPublisher(
            self.store, folder, config, ranks=1, device=torch.device("cpu"), needs_file=lambda version: False
        )
        self.source = TransferSource(folder, self.store, engine, newest=None, deadline_s=20.0, beat=lambda: None)

    def close(self) -> None:
        self.publisher.close()

    def publish(self, directory: Path, version: int) -> None:
        self.publisher.publish(version, load_file(directory / "model.safetensors"))


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Callable[..., Line]]:
    opened: list[Line] = []

    def connect(engine: object) -> Line:
        opened.append(Line(tmp_path, engine))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


@pytest.mark.parametrize("kind", KINDS)
def test_versions_from_memory_are_the_versions_of_the_files(
    pair: Pairs, line: Callable[..., Line], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    engines = pair(kind, design="systematic(6)", transfers=True)
    ours, theirs = engines.vllm, engines.transformers()
    # A layer comes in several buffers.
    monkeypatch.setattr(transfer_publisher, "CHUNK_BYTES", 20_000)
    transfers = line(ours)
    text = list(range(10, 40))
    for version, directory in enumerate((engines.a, engines.b, engines.a), start=1):
        ours.load_weights(directory, version)
        by_file, done_by_file = ours.logprobs(text), generate(ours, requests(6))
        # What is there must go first, or nothing would show that it was replaced.
        ours.load_weights(engines.b if directory == engines.a else engines.a, version)
        transfers.publish(directory, version)
        assert transfers.source.move_to(version) is None
        theirs.load_weights(directory, version)
        assert ours.policy_version == version
        assert torch.equal(ours.logprobs(text), by_file)
        torch.testing.assert_close(by_file, theirs.logprobs(text), atol=1e-4, rtol=0)
        assert_same(generate(ours, requests(6)), done_by_file)
    assert transfers.store.versions() == [1]


def test_an_answer_in_flight_across_a_transfer_goes_on_under_the_new_weights(
    pair: Pairs, line: Callable[..., Line]
) -> None:
    engines = pair("tied-llama", sampling=SamplingConfig(max_new_tokens=20, min_new_tokens=20), transfers=True)
    ours, theirs = engines.vllm, engines.transformers()
    transfers = line(ours)
    for version, directory in ((3, engines.a), (8, engines.b)):
        transfers.publish(directory, version)
        transfers.source.move_to(version)
        theirs.load_weights(directory, version)
        prefix = "s" if version == 3 else "late"
        for engine in (ours, theirs):
            engine.submit(requests(4, prefix))
            if version == 3:
                advance(engine, 7)
    done = drain(ours)
    assert_same(done, drain(theirs))
    assert done["s1"].versions_T.tolist() == [3] * 7 + [8] * 13
    assert done["late1"].versions_T.tolist() == [8] * 20


def test_weights_that_do_not_fit_are_refused_before_anything_is_changed(pair: Pairs, line: Callable[..., Line]) -> None:
    engines = pair("untied-llama", design="systematic(6)", transfers=True)
    transfers, ours = line(engines.vllm), engines.vllm
    ours.load_weights(engines.a, 4)
    before = generate(ours, requests(2))
    transfers.publisher.publish(5, {"model.norm.weight": torch.zeros(64)})
    with pytest.raises(CheckpointError, match="policy version 5 does not fit the model: missing lm_head.weight"):
        transfers.source.move_to(5)
    assert ours.policy_version == 4
    assert_same(generate(ours, requests(2)), before)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """An asynchronous run whose workers get no files but the first, in buffers of one tensor each."""
    teacher, student = save("untied-llama", 1, tmp_path), save("tied-llama", 0, tmp_path)
    tiny = tiny_config(tmp_path, teacher, student, mode="async")
    rollout = replace(tiny.rollout, engine="vllm", vllm=VllmEngineConfig(kv_cache_gb=KV_CACHE_GB))
    return replace(tiny, rollout=rollout, publish=PublishConfig(backend="gloo", file_every=0))


def test_a_synchronous_run_learns_the_same_whichever_way_its_weights_travel(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncopd.pipeline.Supervisor", ThreadedWorkers)
    ways = {way: replace(config.publish, backend=way, file_every=every) for way, every in (("gloo", 0), ("file", 1))}
    ends = {
        way: final_weights(run(replace(config, mode="sync", steps=3, name=way, publish=publish)).path)
        for way, publish in ways.items()
    }
    assert all(torch.equal(tensor, ends["file"][name]) for name, tensor in ends["gloo"].items())


def at_transfer(number: int, act: Callable[[], None]) -> None:
    """Cut buffers small, and have this process ``act`` in the middle of its transfer of that number."""
    send, start, buffers = TransferGroup.send, TransferGroup._start, []

    def counted(self: TransferGroup, *arguments: object, **named: object) -> None:
        counted.transfers += 1
        buffers.clear()
        send(self, *arguments, **named)

    def acting(self: TransferGroup, buffer: torch.Tensor) -> object:
        buffers.append(1)
        if (counted.transfers, len(buffers)) == (number, 5):
            act()
        return start(self, buffer)

    counted.transfers = 0
    transfer_publisher.CHUNK_BYTES = 1
    TransferGroup.send, TransferGroup._start = counted, acting


def trained(config: RunConfig) -> tuple[int, int]:
    with Ledger.open(config.runs_dir / config.name / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        assert max(step.max for step in ledger.staleness().steps) <= config.max_staleness
        counts = ledger.counts()
    return counts.trained, counts.dropped


def test_an_engine_killed_in_the_middle_of_a_transfer_is_started_again_and_nothing_is_lost(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("send", "_start"):
        monkeypatch.setattr(TransferGroup, name, vars(TransferGroup)[name])
    monkeypatch.setattr(transfer_publisher, "CHUNK_BYTES", transfer_publisher.CHUNK_BYTES)
    at_transfer(2, kill_rollout_worker)
    result = run(config)
    assert [row.values["restarts"] for row in read_metrics(result.path) if "loss" in row.values][-1] == 1
    assert trained(config) == (config.steps * config.queue.batch_size, 0)
    # The engine that was started again got its first weights from memory too.
    assert WeightStore(result.path).versions() == [config.steps]


def run_until_killed(config: RunConfig) -> None:
    at_transfer(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    run(config)


def test_a_learner_killed_in_the_middle_of_a_transfer_leaves_no_engine_behind_and_resumes(config: RunConfig) -> None:
    learner = multiprocessing.get_context("spawn").Process(target=run_until_killed, args=(config,))
    learner.start()
    learner.join(200)
    assert learner.exitcode == -signal.SIGKILL
    assert wait_until(lambda: not workers_of(config), 20)
    result = run(config, resume=True)
    assert result.policy_version == config.steps
    assert trained(config) == (config.steps * config.queue.batch_size, 0)


def workers_of(config: RunConfig) -> list[psutil.Process]:
    run_dir = str(config.runs_dir / config.name)
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if run_dir in (process.info["cmdline"] or []) and process.is_running()
    ]
