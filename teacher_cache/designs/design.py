"""The seam of support designs: how candidate tokens are drawn and weighted.

Shape suffixes: T positions, C candidates a position, V vocabulary.

A design is unbiased when ``E[sum_i w_i 1{a_i = a}] = 1`` for every token ``a`` that the proposal can give
(OBJECTIVES, section 1): any sum over the vocabulary is then the expected value of the weighted sum over candidates.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from teacher_cache.noise import Noise


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draw:
    """Candidates of T positions.

    ids_TC      int64 token ids; duplicates keep their multiplicity
    log_w_TC    float64 log weights; -inf is an empty slot (weight zero), whose id means nothing
    """

    ids_TC: Tensor
    log_w_TC: Tensor


class SupportDesign(Protocol):
    """Draws the candidates of each position, independently over positions."""

    @property
    def spec(self) -> str:
        """Canonical spelling, for example ``systematic(16)``."""

    @property
    def budget(self) -> int:
        """Candidates cached a position; 0 means the whole vocabulary."""

    @property
    def unbiased(self) -> bool:
        """Whether ``E[sum_i w_i 1{a_i = a}] = 1`` for every token."""

    @property
    def reuses_sampled_token(self) -> bool:
        """Whether a student-drawn set contains the rollout's own token, and so needs it drawn from the proposal."""

    @property
    def distinct(self) -> bool:
        """Whether no token can be drawn twice at one position."""

    @property
    def tail_bucket(self) -> bool:
        """Whether the objective adds one bucket for all that was not drawn."""

    @property
    def thins(self) -> bool:
        """Whether a student-drawn set has a second phase at the scorer (``ThinningDesign``)."""

    def draw(self, log_g_TV: Tensor, noise: Noise, sampled_T: Tensor | None) -> Draw:
        """Candidates from the proposal.

        log_g_TV    proposal logprobs (nats) at the objective's temperature, float32 or float64; -inf for padded rows
        noise       uniforms in (0, 1), on any device
        sampled_T   the rollout's own tokens (int64) where the student proposes; None where the teacher does,
                    or where the own token must not be reused
        """


@runtime_checkable
class ThinningDesign(SupportDesign, Protocol):
    """A design whose second phase runs where the teacher's scores are known."""

    @property
    def first_budget(self) -> int:
        """Candidates a position that the student ships to the scorer."""

    def log_sizes(self, log_w_TC: Tensor, log_g_TC: Tensor, log_q_TC: Tensor) -> Tensor:
        """Log of the size that each first-phase candidate is kept in proportion to [T, C]; -inf for empty slots."""

    def thin(
        self, *, ids_TC: Tensor, log_w_TC: Tensor, log_g_TC: Tensor, log_q_TC: Tensor, noise: Noise
    ) -> tuple[Draw, Tensor]:
        """The candidates to cache, and the teacher's logprobs (nats, the dtype of ``log_q_TC``) at them.

        A position with a score that is not finite at a candidate of nonzero weight gets NaN at every candidate:
        to leave only that candidate out would bias it.
        """
