"""Many candidates from the student, few of them kept by the scorer, who knows where teacher and student differ.

Shape suffixes: T positions, C = M first-phase candidates, K kept candidates, V vocabulary.

The size suits an estimate that is not centred; ``two_phase_centred`` suits one that is.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from teacher_cache.designs.design import Draw
from teacher_cache.designs.systematic import Systematic
from teacher_cache.designs.thinning import CEILING, FLOOR, keep
from teacher_cache.errors import DesignError
from teacher_cache.noise import Noise


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
        apart_TC = (log_g_TC - log_q_TC).abs().nan_to_num(nan=CEILING).clamp(max=CEILING)
        return (log_w_TC + log_g_TC + (apart_TC + FLOOR).log()).where(log_w_TC > -torch.inf, -torch.inf)

    def thin(
        self, *, ids_TC: Tensor, log_w_TC: Tensor, log_g_TC: Tensor, log_q_TC: Tensor, noise: Noise
    ) -> tuple[Draw, Tensor]:
        """The second phase: K of the M, and the teacher's logprobs at them; all NaN where a score is not finite."""
        log_size_TC = self.log_sizes(log_w_TC.double(), log_g_TC.double(), log_q_TC.double())
        return keep(self.budget, log_size_TC, ids_TC=ids_TC, log_w_TC=log_w_TC, log_q_TC=log_q_TC, noise=noise)
