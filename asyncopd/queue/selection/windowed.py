"""Bounded overtaking: a straggler is passed by at most ``window_batches - 1`` batches."""

from collections.abc import Sequence

from asyncopd.queue.selection.policy import QueueRow


class Windowed:
    """The first ready samples among the oldest ``window_batches`` batches of live ones; 1 batch is strict order."""

    overtakes = True

    def reach(self, count: int, window_batches: int) -> int | None:
        return count * window_batches

    def choose(self, rows: Sequence[QueueRow], count: int) -> list[int] | None:
        ready = [row.ordinal for row in rows if row.ready]
        return ready[:count] if len(ready) >= count else None
