"""The seam of selection policies: which scored samples the next batch trains."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueRow:
    """What a policy may know of a live sample; never its payload.

    ready           scored, so it can be trained now
    prompt          the same for all samples of one prompt in one epoch
    oldest_version  policy version of its oldest token; None until it is generated
    disagreement    how far student and teacher differ on it (nats a token, as the scorer reports); None if unknown
    scored_at       seconds since the epoch; None until it is scored
    """

    ordinal: int
    ready: bool
    prompt: int
    oldest_version: int | None
    tokens: int | None
    disagreement: float | None
    scored_at: float | None


class SelectionPolicy(Protocol):
    """Picks a batch out of the live samples.

    A policy that overtakes lets a sample be trained before one admitted earlier; the ledger then drops what has grown
    older than ``max_staleness``. One that does not overtake needs no drops to keep that bound.
    """

    @property
    def overtakes(self) -> bool:
        """Whether a sample may be trained before one admitted earlier."""

    def reach(self, count: int, window_batches: int) -> int | None:
        """How many of the oldest live samples ``choose`` must see for a batch of ``count``; None for all of them."""

    def choose(self, rows: Sequence[QueueRow], count: int) -> list[int] | None:
        """Ordinals of ``count`` ready samples, or None while there is no such batch.

        rows    live samples in ordinal order, the oldest ``reach`` of them
        """
