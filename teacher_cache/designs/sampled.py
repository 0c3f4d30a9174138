"""The rollout's own token as the only candidate.

Shape suffixes: T positions, C = 1 candidate, V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from teacher_cache.designs.design import Draw
from teacher_cache.designs.multi_sample import MultiSample
from teacher_cache.noise import Noise


@dataclass(frozen=True, slots=True)
class Sampled:
    """``w = 1/b(y)``; where the teacher proposes, one token drawn from it."""

    budget: ClassVar[int] = 1
    unbiased: ClassVar[bool] = True
    reuses_sampled_token: ClassVar[bool] = True
    distinct: ClassVar[bool] = True
    tail_bucket: ClassVar[bool] = False
    thins: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        return "sampled"

    def draw(self, log_g_TV: Tensor, noise: Noise, sampled_T: Tensor | None) -> Draw:
        """No uniforms where the rollout's own token is given, else one."""
        return MultiSample(1).draw(log_g_TV, noise, sampled_T)
