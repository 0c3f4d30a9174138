"""As many prompts as possible: a cap on samples per prompt that rises until the batch is full."""

from collections.abc import Sequence

from asyncopd.queue.selection.policy import QueueRow


class PromptCoverage:
    """One ready sample of every prompt first, oldest prompts first; then a second of each, and so on."""

    overtakes = True

    def reach(self, count: int, window_batches: int) -> int | None:
        return None

    def choose(self, rows: Sequence[QueueRow], count: int) -> list[int] | None:
        return take_by_passes([row for row in rows if row.ready], count)


def take_by_passes(ready: Sequence[QueueRow], count: int) -> list[int] | None:
    """Ordinals of ``count`` samples: the first of each prompt in the order given, then the second of each, ..."""
    if len(ready) < count:
        return None
    taken_of: dict[int, int] = {}
    ranked: list[tuple[int, int, int]] = []
    for place, row in enumerate(ready):
        nth = taken_of.get(row.prompt, 0)
        taken_of[row.prompt] = nth + 1
        ranked.append((nth, place, row.ordinal))
    ranked.sort()
    return sorted(ordinal for _, _, ordinal in ranked[:count])
