"""The K most likely tokens, and nothing for the rest.

Shape suffixes: T positions, K candidates, V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from teacher_cache.designs.design import Draw
from teacher_cache.designs.inverse_cdf import in_blocks, largest
from teacher_cache.errors import DesignError
from teacher_cache.noise import Noise


@dataclass(frozen=True, slots=True)
class TopK:
    """Weight 1. Biased: the tail is dropped, the same way at every position, so the error does not average out."""

    budget: int
    unbiased: ClassVar[bool] = False
    reuses_sampled_token: ClassVar[bool] = False
    distinct: ClassVar[bool] = True
    tail_bucket: ClassVar[bool] = False
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise DesignError(f"top_k({self.budget}): the budget must be at least 1, for example top_k(64)")

    @property
    def spec(self) -> str:
        return f"top_k({self.budget})"

    def draw(self, log_g_TV: Tensor, noise: Noise, sampled_T: Tensor | None) -> Draw:
        """No uniforms."""
        if self.budget > log_g_TV.shape[1]:
            raise DesignError(f"{self.spec} with {log_g_TV.shape[1]} tokens in the vocabulary; use a smaller budget")
        mass_TK, ids_TK = largest(in_blocks(log_g_TV.exp()), self.budget)
        log_w_TK = torch.zeros_like(mass_TK, dtype=torch.float64).where(mass_TK > 0, -torch.inf)
        return Draw(ids_TC=ids_TK, log_w_TC=log_w_TK)
