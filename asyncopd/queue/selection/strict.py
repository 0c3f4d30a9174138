"""Strict admission order: the learner waits for a straggler while the window behind it fills."""

from collections.abc import Sequence

from asyncopd.queue.selection.policy import QueueRow


class Strict:
    """The oldest live samples, all of them. No sample is dropped for age, and long answers are not held back."""

    overtakes = False

    def reach(self, count: int, window_batches: int) -> int | None:
        return count

    def choose(self, rows: Sequence[QueueRow], count: int) -> list[int] | None:
        if len(rows) < count or not all(row.ready for row in rows):
            return None
        return [row.ordinal for row in rows]
