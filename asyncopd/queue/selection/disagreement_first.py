"""Coverage of prompts, and within a prompt the samples on which student and teacher differ most."""

from collections.abc import Sequence

from asyncopd.queue.selection.policy import QueueRow
from asyncopd.queue.selection.prompt_coverage import take_by_passes


class DisagreementFirst:
    """Prompts as in prompt coverage; each pass takes a prompt's ready sample with the largest disagreement.

    A sample of unknown disagreement comes after those that are known.
    """

    overtakes = True

    def reach(self, count: int, window_batches: int) -> int | None:
        return None

    def choose(self, rows: Sequence[QueueRow], count: int) -> list[int] | None:
        first_of: dict[int, int] = {}
        for row in rows:
            first_of.setdefault(row.prompt, row.ordinal)
        ready = [row for row in rows if row.ready]
        ready.sort(key=lambda row: (first_of[row.prompt], -_known(row.disagreement), row.ordinal))
        return take_by_passes(ready, count)


def _known(disagreement: float | None) -> float:
    return float("-inf") if disagreement is None else disagreement
