"""The oldest of those that are ready: never waits for a straggler, and so favours short answers."""

from collections.abc import Sequence

from asyncopd.queue.selection.policy import QueueRow


class OldestReady:
    """The first ready samples in admission order."""

    overtakes = True

    def reach(self, count: int, window_batches: int) -> int | None:
        return None

    def choose(self, rows: Sequence[QueueRow], count: int) -> list[int] | None:
        ready = [row.ordinal for row in rows if row.ready]
        return ready[:count] if len(ready) >= count else None
