"""The two ends of a weight transfer: the learner, rank 0, and the processes of one vLLM engine, the ranks after it.

Both ends know the tensors' names, dtypes and shapes, so only bytes travel, in buffers that are cut alike:

    | tensor | padding | tensor | ...  up to chunk_bytes |   one broadcast a buffer, gloo or NCCL

Every wait has a deadline: a collective whose other end died may otherwise never return.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from asyncopd.errors import TransferError
from asyncopd.publish.stream import LazyWeight, Weights, materialised

HOST = "127.0.0.1"
_ALIGNMENT = 16
_LOOK_S = 0.0005
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that travels."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, weight: Tensor | LazyWeight, dtype: torch.dtype) -> "TensorSpec":
        """Of a weight that is published as ``dtype``."""
        return cls(name, str(dtype).removeprefix("torch."), tuple(weight.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    @property
    def padded(self) -> int:
        """Bytes that it takes in a buffer."""
        return -(-self.size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where and how the ends meet.

    backend     gloo or nccl
    port        of the learner's store, on this machine
    size        processes in all: the learner and those of the engine
    deadline_s  seconds for the meeting, and again for each version
    chunk_bytes size of a buffer, unless one tensor alone is larger
    """

    backend: str
    port: int
    size: int
    deadline_s: float
    chunk_bytes: int


def chunks(specs: Sequence[TensorSpec], most: int) -> list[list[TensorSpec]]:
    """The tensors of each buffer of at most ``most`` bytes, or of one tensor, in order."""
    cut: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not cut or spec.padded > room:
            cut.append([])
            room = most
        cut[-1].append(spec)
        room -= spec.padded
    return cut


def packed(chunk: Sequence[TensorSpec], weights: Weights) -> Tensor:
    """The buffer of a chunk, in host memory; the other ranks of the learner take part."""
    buffer = _empty(chunk, torch.device("cpu"))
    for name, tensor in unpacked(chunk, buffer):
        tensor.copy_(materialised(weights[name]))
    return buffer


def unpacked(chunk: Sequence[TensorSpec], buffer: Tensor) -> list[tuple[str, Tensor]]:
    """Views of the tensors in a buffer."""
    return [
        (spec.name, buffer[place : place + spec.size].view(spec.torch_dtype).reshape(spec.shape))
        for spec, place in zip(chunk, _places(chunk), strict=True)
    ]


def _places(chunk: Sequence[TensorSpec]) -> list[int]:
    return list(accumulate((spec.padded for spec in chunk), initial=0))[:-1]


def _empty(chunk: Sequence[TensorSpec], device: torch.device) -> Tensor:
    return torch.empty(sum(spec.padded for spec in chunk), dtype=torch.uint8, device=device)


def open_store(deadline_s: float) -> TCPStore:
    """The learner's store, on a port of the system's choice."""
    return TCPStore(HOST, 0, None, True, timedelta(seconds=deadline_s), wait_for_workers=False)


class TransferGroup:
    """One end of the transfers between the learner and one engine; opening it waits for the others.

    TransferError where they do not come, and from ``send`` and ``receive`` where a transfer breaks off. The group is
    of no use after that.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device, store: TCPStore | None = None) -> None:
        """``device`` is where the engine's weights are, or the learner's GPU; ``store`` the one that rank 0 opened."""
        limit = timedelta(seconds=rendezvous.deadline_s)
        self._deadline_s, self._chunk_bytes = rendezvous.deadline_s, rendezvous.chunk_bytes
        self._device = device if rendezvous.backend == "nccl" else torch.device("cpu")
        try:
            self._store = store or TCPStore(HOST, rendezvous.port, None, False, limit)
            self._group = GROUPS[rendezvous.backend](self._store, rank, rendezvous.size, limit)
        except RuntimeError as error:
            raise TransferError(
                f"rank {rank} of {rendezvous.size} found no way to the others over {rendezvous.backend} within "
                f"{rendezvous.deadline_s:.0f} s: {error}"
            ) from error

    def send(self, buffers: Sequence[Tensor], alive: Callable[[], bool]) -> None:
        """From rank 0: the buffers of a version; given up once the other end is not ``alive``."""
        until = time.monotonic() + self._deadline_s
        for buffer in buffers:
            self._finish(self._start(buffer.to(self._device)), until, alive)

    def receive(self, specs: Sequence[TensorSpec], take: Callable[[list[tuple[str, Tensor]]], object]) -> None:
        """On the other ranks: ``take`` gets the tensors by the buffer."""
        until = time.monotonic() + self._deadline_s
        cut = chunks(specs, self._chunk_bytes)
        # Each has a buffer of its own: whoever takes the tensors may keep them until a layer is complete.
        under_way = self._start(_empty(cut[0], self._device))
        for chunk, following in zip_longest(cut, cut[1:]):
            buffer = self._finish(under_way, until, lambda: True)
            if following is not None:
                # Comes in while these are taken.
                under_way = self._start(_empty(following, self._device))
            take(unpacked(chunk, buffer))

    def abort(self) -> None:
        """Leave, and give up what is under way: a kernel of NCCL would wait for a dead peer for ever."""
        # Gloo hangs up when the group is gone, and not before.
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _start(self, buffer: Tensor) -> tuple[Tensor, Any]:
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            return buffer, self._group.broadcast([buffer], options)
        except RuntimeError as error:
            raise TransferError(f"a transfer of weights broke off: {error}") from error

    def _finish(self, under_way: tuple[Tensor, Any], until: float, alive: Callable[[], bool]) -> Tensor:
        buffer, work = under_way
        try:
            while not work.is_completed():
                if not alive():
                    # It may only have been the first to see the end of the last buffer.
                    until = min(until, time.monotonic() + _GRACE_S)
                if time.monotonic() > until:
                    raise TransferError(
                        f"a transfer of weights was given up: the other end died, or publish.deadline_s "
                        f"({self._deadline_s:.0f} s) was too short"
                    )
                time.sleep(_LOOK_S)
            work.wait()
            return buffer
        except RuntimeError as error:
            raise TransferError(f"a transfer of weights broke off: {error}") from error


def _gloo(store: TCPStore, rank: int, size: int, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    options: Any = vars(ProcessGroupGloo)["_Options"]()
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = limit
    options._threads = 1
    return ProcessGroupGloo(PrefixStore("weights", store), rank, size, options)


def _nccl(store: TCPStore, rank: int, size: int, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    # Its own watchdog would end the whole process; the waits here end the transfer, and long before.
    options._timeout = 100 * limit
    return ProcessGroupNCCL(PrefixStore("weights", store), rank, size, options)


GROUPS = {"gloo": _gloo, "nccl": _nccl}
