"""The K most likely tokens, and one bucket for all the others.

Shape suffixes: T positions, K candidates, V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from teacher_cache.designs.design import Draw
from teacher_cache.designs.top_k import TopK
from teacher_cache.errors import DesignError
from teacher_cache.noise import Noise


@dataclass(frozen=True, slots=True)
class TopKTail:
    """Weight 1; the objective adds ``phi(log p_tail, log q_tail)`` of the mass that was not drawn.

    A lower bound of the divergence by the data-processing inequality: merging tokens can only lose information.
    """

    budget: int
    unbiased: ClassVar[bool] = False
    reuses_sampled_token: ClassVar[bool] = False
    distinct: ClassVar[bool] = True
    tail_bucket: ClassVar[bool] = True
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise DesignError(f"top_k_tail({self.budget}): the budget must be at least 1, for example top_k_tail(64)")

    @property
    def spec(self) -> str:
        return f"top_k_tail({self.budget})"

    def draw(self, log_g_TV: Tensor, noise: Noise, sampled_T: Tensor | None) -> Draw:
        """No uniforms; the bucket takes no slot."""
        if self.budget > log_g_TV.shape[1]:
            raise DesignError(f"{self.spec} with {log_g_TV.shape[1]} tokens in the vocabulary; use a smaller budget")
        return TopK(self.budget).draw(log_g_TV, noise, sampled_T)
