"""How long the phases of a step take, on a CPU and on a GPU that works behind the program's back."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseClock:
    """Sums the seconds of each phase of one step on the device that does the work.

    On a GPU the phases are marked by events in its stream, so measuring makes nobody wait before ``seconds`` is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block belongs to the phase ``name``."""
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._marks.append((name, start, end))
        else:
            began = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - began)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far, in the order in which they began; waits until the device has done them."""
        for name, start, end in self._marks:
            end.synchronize()
            self._add(name, start.elapsed_time(end) / 1e3)
        self._marks.clear()
        return dict(self._seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
