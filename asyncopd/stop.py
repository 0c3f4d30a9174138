"""Ctrl-C: the first asks for a clean stop with a checkpoint, the second ends everything at once."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _nothing() -> None:
    """There is nothing to wake, and nobody to end."""


class StopRequest:
    """Installed around a run in its main thread; elsewhere (some notebooks) it only carries ``request``."""

    def __init__(self, wake: Callable[[], None] = _nothing, at_once: Callable[[], None] = _nothing) -> None:
        """``wake`` interrupts a wait; ``at_once`` ends the worker processes before this one exits."""
        self._wake = wake
        self._at_once = at_once
        self._asked = threading.Event()
        self._previous: dict[int, object] = {}

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked.is_set()

    def request(self) -> None:
        """Ask for a clean stop: the step in progress ends, a checkpoint is written, the run returns."""
        self._asked.set()
        self._wake()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A scheduler signals the whole process group, and a launcher passes SIGTERM on: two of them are one request.
        if self.asked and number == signal.SIGINT:
            self._at_once()
            # Nothing may run on: the ledger and the last whole checkpoint are what a resume needs.
            os._exit(128 + number)
        if not self.asked:
            LOG.warning("stopping after this step, with a checkpoint; Ctrl-C once more quits at once")
        self.request()
