"""The whole vocabulary.

Shape suffixes: T positions, V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from teacher_cache.designs.design import Draw
from teacher_cache.noise import Noise


@dataclass(frozen=True, slots=True)
class Full:
    """Weight 1 for every token that the proposal can give; exact, and as large as the vocabulary."""

    budget: ClassVar[int] = 0
    unbiased: ClassVar[bool] = True
    reuses_sampled_token: ClassVar[bool] = False
    distinct: ClassVar[bool] = True
    tail_bucket: ClassVar[bool] = False
    thins: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        return "full"

    def draw(self, log_g_TV: Tensor, noise: Noise, sampled_T: Tensor | None) -> Draw:
        """No uniforms; the ids are one row seen T times (stride 0)."""
        ids_TV = torch.arange(log_g_TV.shape[1], device=log_g_TV.device).expand(log_g_TV.shape)
        log_w_TV = torch.zeros_like(log_g_TV, dtype=torch.float64).where(log_g_TV > -torch.inf, -torch.inf)
        return Draw(ids_TC=ids_TV, log_w_TC=log_w_TV)
