"""What every worker process has: its run folder, the ledger, a doorbell, a tracer, and a way to be told to stop."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from asyncopd.queue.doorbell import Doorbell, ring
from asyncopd.queue.ledger import Ledger
from asyncopd.tracking.trace import Tracer

SLOW_POLL_S = 0.5
"""Seconds after which a waiting stage looks again although nobody rang."""


@dataclass(kw_only=True, slots=True)
class Stage:
    """One worker process of the run.

    name        process name: ``rollout-0``, ``scorer-0``
    seed        the run's seed
    lease_s     seconds after which work that shows no progress goes to another worker
    load_s      seconds that loading weights may take
    wakes       doorbells to ring when this stage has handed something on
    beat        tells the supervisor that there was progress: a decode step, some answers scored, a look for work
    """

    name: str
    run_dir: Path
    ledger: Ledger
    tracer: Tracer
    doorbell: Doorbell
    seed: int
    lease_s: float
    load_s: float
    wakes: tuple[str, ...]
    beat: Callable[[], None]
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def log(self) -> logging.Logger:
        """This stage's logger."""
        return logging.getLogger(f"asyncopd.{self.name}")

    @property
    def told_to_stop(self) -> bool:
        """Whether this process was told to stop."""
        return self._stop.is_set()

    @property
    def stopping(self) -> bool:
        """Whether the run is over or this process was told to stop."""
        return self.told_to_stop or self.ledger.finished

    def stop(self) -> None:
        """Ask the stage to end after what it is doing; safe from another thread."""
        self._stop.set()
        ring(self.run_dir, self.name)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Beats while weights are loaded in the block, for at most ``load_s``; a longer load is a hang."""
        loaded = threading.Event()

        def beat_on() -> None:
            until = time.monotonic() + self.load_s
            while time.monotonic() < until and not loaded.wait(self.lease_s / 4):
                self.beat()

        thread = threading.Thread(target=beat_on, name="loading", daemon=True)
        thread.start()
        try:
            yield
        finally:
            loaded.set()
            thread.join()

    def rest(self) -> None:
        """Wait until somebody rings, or for the slow poll."""
        self.beat()
        self.doorbell.wait(SLOW_POLL_S)

    def hand_on(self) -> None:
        """Wake the stages that what was just put into the queue is for."""
        for name in self.wakes:
            ring(self.run_dir, name)
