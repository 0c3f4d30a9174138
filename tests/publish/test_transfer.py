"""Weights from the learner's memory to engines, without vLLM: an engine here is what takes part in a transfer."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError, TransferError
from asyncopd.publish import WeightStore
from asyncopd.publish.config import PublishConfig
from asyncopd.publish.probe import Probe
from asyncopd.publish.transfer_group import HOST, TransferGroup
from asyncopd.publish.transfer_publisher import Offer, TransferPublisher, read_address, write_address
from asyncopd.publish.transfer_source import TransferSource
from asyncopd.publishing import check_publishing
from asyncopd.rollout.vllm_config import VllmEngineConfig
from asyncopd.scoring import TeacherConfig

DEADLINE_S = 5.0
CPU = torch.device("cpu")


class Engine:
    """Keeps what it gets, and notes the files that it was sent to."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.versions: list[int] = []
        self.files: list[int] = []
        self.group: TransferGroup | None = None

    def load_weights(self, directory: Path, version: int) -> None:
        self.files.append(version)

    def receive_weights(self, offer: Offer) -> None:
        self.group = self.group or TransferGroup(offer.rendezvous, 1, CPU)
        self.group.receive(offer.specs, self.weights.update)
        self.versions.append(offer.version)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Callable[..., object]]:
    """Makes a publisher that writes the versions ``files``, and sources."""
    with ExitStack() as stack:

        def make(
            what: str, *, files: tuple[int, ...] = (), deadline_s: float = DEADLINE_S, **settings: object
        ) -> object:
            store = WeightStore(tmp_path, torch.bfloat16)
            if what == "source":
                common = {"newest": None, "deadline_s": deadline_s, "beat": lambda: None}
                return TransferSource(tmp_path, store, **{"engine": Engine(), **common, **settings})
            publisher = TransferPublisher(
                store, tmp_path, PublishConfig(backend="gloo", deadline_s=deadline_s), ranks=1, device=CPU,
                needs_file=lambda version: version in files,
            )  # fmt: skip
            return stack.enter_context(closing(publisher))

        yield make


def weights(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "steps": torch.tensor(version),
        "odd": torch.randn(7, generator=generator),
        "large": torch.randn(40, 50, generator=generator),
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
    }


def assert_has(engine: Engine, version: int) -> None:
    for name, tensor in weights(version).items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert engine.weights[name].dtype == expected.dtype
        assert torch.equal(engine.weights[name], expected), name


@pytest.mark.parametrize("chunk_bytes", [1, 100, 2**20])
def test_an_engine_gets_every_tensor_as_it_was_published_in_buffers_of_any_size(
    ends: Callable[..., object], monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr("asyncopd.publish.transfer_publisher.CHUNK_BYTES", chunk_bytes)
    publisher, engines = ends("publisher"), [Engine(), Engine()]
    sources = [ends("source", engine=engine) for engine in engines]
    probe = Probe((1, 2), (-0.5,))
    for version in (3, 4):
        live = weights(version)
        publisher.publish(version, live, probe)
        # What is trained on meanwhile must not be what arrives.
        live["large"].zero_()
        for source, engine in zip(sources, engines, strict=True):
            assert source.move_to(version) == probe
            assert_has(engine, version)
    assert [engine.versions for engine in engines] == [[3, 4]] * 2
    assert publisher.versions() == [3]


def test_a_version_that_the_learner_holds_no_more_comes_from_its_file(ends: Callable[..., object]) -> None:
    publisher, engine = ends("publisher", files=(1, 2)), Engine()
    publisher.publish(1, weights(1))
    publisher.publish(2, weights(2), Probe((1, 2), (-0.5,)))
    publisher.publish(3, weights(3))
    source = ends("source", engine=engine)
    assert source.move_to(2) == Probe((1, 2), (-0.5,))
    assert source.move_to(3) is None
    assert (engine.files, engine.versions) == ([2], [3])


def test_a_version_that_is_neither_held_nor_in_a_file_is_waited_for_or_given_up(ends: Callable[..., object]) -> None:
    publisher, engine = ends("publisher"), Engine()
    publisher.publish(1, weights(1))
    published, beats = [2], []

    def beat() -> None:
        beats.append(1)
        if len(beats) == 3:
            # In the order of a step: held first, committed after.
            publisher.publish(3, weights(3))
            published.append(3)

    ends("source", engine=engine, newest=lambda: published[-1], beat=beat).move_to(2)
    assert_has(engine, 3)
    with pytest.raises(TransferError, match=r"version 2 is neither .* \(0 s\)"):
        ends("source", deadline_s=0.2).move_to(2)


def test_an_engine_that_never_comes_to_the_meeting_holds_up_neither_the_learner_nor_others(
    ends: Callable[..., object], tmp_path: Path
) -> None:
    publisher, engine = ends("publisher", deadline_s=1.0), Engine()
    publisher.publish(1, weights(1))
    port, key = read_address(tmp_path)
    absent = Client((HOST, port), authkey=key)
    absent.send(1)
    assert absent.recv().version == 1
    publisher.publish(2, weights(2))
    ends("source", engine=engine).move_to(2)
    assert_has(engine, 2)
    # The learner gives the absent one up, so that it is started again.
    assert absent.poll(10)
    with pytest.raises((EOFError, ConnectionError)):
        absent.recv()


@pytest.mark.parametrize("end", ["dies", "stops"])
def test_a_receiver_is_not_left_waiting_by_a_learner_that_is_gone(
    ends: Callable[..., object], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("asyncopd.publish.transfer_publisher.CHUNK_BYTES", 1)
    sent = []

    def half(self: TransferGroup, buffer: Tensor) -> object:
        if threading.current_thread().name == "transfer":
            sent.append(buffer)
            if len(sent) == 3:
                if end == "stops":
                    time.sleep(4)
                raise TransferError("killed")
        return start(self, buffer)

    start = TransferGroup._start
    monkeypatch.setattr(TransferGroup, "_start", half)
    publisher, engine = ends("publisher", deadline_s=2.0), Engine()
    publisher.publish(1, weights(1))
    # One that hangs up is seen to, without waiting for the deadline.
    with pytest.raises(TransferError, match="by peer" if end == "dies" else "given up|Timed out"):
        ends("source", engine=engine).move_to(1)
    assert engine.versions == []
    # Started again, it gets the weights.
    again = Engine()
    ends("source", engine=again).move_to(1)
    assert_has(again, 1)


def test_weights_are_not_handed_to_who_does_not_know_the_key(ends: Callable[..., object], tmp_path: Path) -> None:
    publisher, engine = ends("publisher"), Engine()
    publisher.publish(1, weights(1))
    source = ends("source", engine=engine)
    assert (tmp_path / "transfers.json").stat().st_mode & 0o77 == 0
    port, _ = read_address(tmp_path)
    write_address(tmp_path, port, b"a guess")
    with pytest.raises(TransferError, match="does not answer"):
        ends("source")
    source.move_to(1)
    assert_has(engine, 1)


def test_a_closed_publisher_turns_everybody_away_and_leaves_no_thread(ends: Callable[..., object]) -> None:
    publisher = ends("publisher")
    publisher.publish(1, weights(1))
    publisher.close()
    assert "transfers" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(TransferError, match="does not answer"):
        ends("source")


def test_ways_that_are_closed_are_refused_with_what_to_change() -> None:
    def refusal(gpus: bool = False, rollout: dict[str, object] | None = None, **changes: object) -> str:
        config = RunConfig()
        asked = replace(config.rollout, **{"engine": "vllm", **(rollout or {})})
        with pytest.raises(ConfigError) as refused:
            check_publishing(replace(config, rollout=asked, **changes), gpus)
        return str(refused.value)

    gloo, nccl, rare = (
        PublishConfig(backend="gloo"),
        PublishConfig(backend="nccl"),
        PublishConfig(backend="gloo", file_every=0),
    )
    assert "set publish.backend to file, or rollout.engine to vllm" in refusal(
        publish=gloo, rollout={"engine": "transformers"}
    )
    assert "rollout.engine vllm_server" in refusal(publish=nccl, rollout={"engine": "vllm_server"}, gpus=True)
    assert "rollout.teacher_fraction '0.5'" in refusal(publish=gloo, rollout={"teacher_fraction": "0.5"})
    assert "no GPU here; set it to gloo or file" in refusal(publish=nccl)
    assert "engine and learner share a GPU" in refusal(publish=nccl, gpus=True)
    assert "last 2 versions" in refusal(publish=rare, mode="lagged:2")
    assert "reads the file of the newest version" in refusal(publish=rare, teacher=TeacherConfig(proposal="pass"))
    with pytest.raises(ConfigError, match="expected 1, or backend gloo or nccl"):
        PublishConfig(file_every=2)
    open_way = replace(RunConfig().rollout, engine="vllm", devices="1", vllm=VllmEngineConfig())
    check_publishing(replace(RunConfig(), rollout=open_way, publish=nccl), True)
