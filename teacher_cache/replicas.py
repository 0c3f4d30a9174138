"""Which replica of a service to ask next: the least loaded of those that answer."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(slots=True, eq=False)
class Replica:
    """One service.

    load          tokens under way
    down_until    monotonic time before which it is not asked
    failures      in a row
    """

    url: str
    load: int = 0
    down_until: float = 0.0
    failures: int = 0
    last_problem: str = ""

    def failed(self, problem: str) -> None:
        """Leave it alone for a while, longer each time."""
        if not self.failures:
            LOG.warning("%s: %s; it is asked again until the deadline", self.url, problem)
        self.down_until = time.monotonic() + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self.failures)
        self.failures = min(self.failures + 1, 16)
        self.last_problem = problem

    def asked_to_wait(self, seconds: float) -> None:
        """It is full, which is no failure."""
        self.down_until = time.monotonic() + seconds
        self.last_problem = "its queue is full"

    def answered(self) -> None:
        """It works."""
        self.failures = 0
        self.down_until = 0.0


@dataclass(slots=True, eq=False)
class Replicas:
    """All replicas of one teacher."""

    all: Sequence[Replica] = field(default_factory=list)

    def pick(self) -> Replica | None:
        """The least loaded that may be asked now, or None."""
        now = time.monotonic()
        up = [replica for replica in self.all if replica.down_until <= now]
        return min(up, key=lambda replica: (replica.load, replica.failures)) if up else None

    def next_try_s(self) -> float:
        """Seconds until one may be asked."""
        return max(0.0, min(replica.down_until for replica in self.all) - time.monotonic())

    def problems(self) -> str:
        """What each said last, for an error message."""
        return "; ".join(f"{replica.url}: {replica.last_problem or 'no problem'}" for replica in self.all)
