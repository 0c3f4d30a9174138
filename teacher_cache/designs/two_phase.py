"""Many candidates from the student, few of them kept by the scorer, who knows where teacher and student differ.

Shape suffixes: T positions, C = M first-phase candidates, K kept candidates, V vocabulary.

Source: two-phase (double) sampling, Neyman (1938); each phase is unbiased given the one before, so the product is.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from teacher_cache.designs.design import Draw
from teacher_cache.designs.systematic import Systematic
from teacher_cache.errors import DesignError
from teacher_cache.noise import Noise

_FLOOR = 0.3
"""Nats added to the disagreement, so that a candidate on which both agree keeps a chance (it may not agree later)."""
_CEILING = 30.0
"""Nats at which the disagreement is capped, so that no size is infinite."""


@dataclass(frozen=True, slots=True)
class TwoPhase:
    """``systematic(M)`` from the student; K of them kept with size ``w*g*(abs(log g - log q) + 0.3)``."""

    first_budget: int
    budget: int
    unbiased: ClassVar[bool] = True
    reuses_sampled_token: ClassVar[bool] = False
    distinct: ClassVar[bool] = True
    tail_bucket: ClassVar[bool] = False
    thins: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.budget <= self.first_budget:
            raise DesignError(
                f"two_phase({self.first_budget}, {self.budget}): the first number is drawn, the second kept, "
                "so 1 <= kept <= drawn, for example two_phase(128, 16)"
            )

    @property
    def spec(self) -> str:
        return f"two_phase({self.first_budget},{self.budget})"

    def draw(self, log_g_TV: Tensor, noise: Noise, sampled_T: Tensor | None) -> Draw:
        """The first phase: M candidates."""
        return Systematic(self.first_budget).draw(log_g_TV, noise, sampled_T)

    def log_sizes(self, log_w_TC: Tensor, log_g_TC: Tensor, log_q_TC: Tensor) -> Tensor:
        """Log of the size that each first-phase candidate is kept in proportion to [T, C]; -inf for empty slots."""
        apart_TC = (log_g_TC - log_q_TC).abs().nan_to_num(nan=_CEILING).clamp(max=_CEILING)
        return (log_w_TC + log_g_TC + (apart_TC + _FLOOR).log()).where(log_w_TC > -torch.inf, -torch.inf)

    def thin(
        self, *, ids_TC: Tensor, log_w_TC: Tensor, log_g_TC: Tensor, log_q_TC: Tensor, noise: Noise
    ) -> tuple[Draw, Tensor]:
        """The second phase: K of the M, and the teacher's logprobs at them; all NaN where a score is not finite."""
        log_w_TC = log_w_TC.double()
        whole_T1 = (log_q_TC.isfinite() | (log_w_TC == -torch.inf)).all(-1, keepdim=True)
        sizes_TC = self.log_sizes(log_w_TC, log_g_TC.double(), log_q_TC.double())
        kept = Systematic(self.budget).draw(sizes_TC, noise, None)
        draw = Draw(
            ids_TC=ids_TC.long().gather(1, kept.ids_TC), log_w_TC=log_w_TC.gather(1, kept.ids_TC) + kept.log_w_TC
        )
        return draw, log_q_TC.gather(1, kept.ids_TC).where(whole_T1, torch.nan)
