"""The freshest of those that are ready: least staleness a batch, most samples dropped for age."""

from collections.abc import Sequence

from asyncopd.queue.selection.policy import QueueRow


class Freshest:
    """The ready samples with the newest oldest token; among equals the one admitted last."""

    overtakes = True

    def reach(self, count: int, window_batches: int) -> int | None:
        return None

    def choose(self, rows: Sequence[QueueRow], count: int) -> list[int] | None:
        ready = [row for row in rows if row.ready]
        if len(ready) < count:
            return None
        ready.sort(key=lambda row: (row.oldest_version or 0, row.ordinal), reverse=True)
        return sorted(row.ordinal for row in ready[:count])
