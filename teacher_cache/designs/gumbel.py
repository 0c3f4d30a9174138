"""Gumbel top-K with the conditional inclusion probability as weight.

Shape suffixes: T positions, K candidates, V vocabulary.

Source: Kool, van Hoof, Welling (2019), stochastic beams; equal to priority sampling (Duffield, Lund, Thorup, 2007).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from teacher_cache.designs.design import Draw
from teacher_cache.errors import DesignError
from teacher_cache.noise import Noise


@dataclass(frozen=True, slots=True)
class Gumbel:
    """The K largest of ``log g + Gumbel noise``; ``w = 1/(1 - exp(-exp(log g - kappa)))``, kappa the (K+1)-th."""

    budget: int
    unbiased: ClassVar[bool] = True
    reuses_sampled_token: ClassVar[bool] = False
    distinct: ClassVar[bool] = True
    tail_bucket: ClassVar[bool] = False
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.budget < 2:
            raise DesignError(
                f"gumbel({self.budget}) has weights of infinite variance; use gumbel(2) or more, or systematic(1)"
            )

    @property
    def spec(self) -> str:
        return f"gumbel({self.budget})"

    def draw(self, log_g_TV: Tensor, noise: Noise, sampled_T: Tensor | None) -> Draw:
        """V uniforms a position. With no more than K tokens of nonzero mass, all of them with weight 1."""
        size = log_g_TV.shape[1]
        keys_TV = log_g_TV.double() - (-noise(size).to(log_g_TV.device).log()).log()
        keys_TK, ids_TK = pad(keys_TV, (0, max(0, self.budget + 1 - size)), value=-torch.inf).topk(self.budget + 1)
        alive_TK = keys_TK[:, :-1] > -torch.inf
        ids_TK = ids_TK[:, :-1].where(alive_TK, 0)
        excess_TK = (log_g_TV.gather(1, ids_TK).double() - keys_TK[:, -1:]).exp()
        log_w_TK = -(-torch.expm1(-excess_TK)).log()
        return Draw(ids_TC=ids_TK, log_w_TC=log_w_TK.where(alive_TK, -torch.inf))
