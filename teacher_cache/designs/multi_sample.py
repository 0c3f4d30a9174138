"""Independent draws with replacement: the published estimator.

Shape suffixes: T positions, N draws, V vocabulary.

Source: importance sampling, as in the AsyncOPD paper's 64-sample reverse KL.
"""

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from teacher_cache.designs.design import Draw
from teacher_cache.designs.inverse_cdf import block_sums, in_blocks, locate
from teacher_cache.errors import DesignError
from teacher_cache.noise import Noise


@dataclass(frozen=True, slots=True)
class MultiSample:
    """N tokens drawn from ``g`` with replacement, ``w = 1/(N*g)``; the rollout's own token is the first of them."""

    budget: int
    unbiased: ClassVar[bool] = True
    reuses_sampled_token: ClassVar[bool] = True
    distinct: ClassVar[bool] = False
    tail_bucket: ClassVar[bool] = False
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise DesignError(
                f"multi_sample({self.budget}): the number of draws must be at least 1, for example multi_sample(64)"
            )

    @property
    def spec(self) -> str:
        return f"multi_sample({self.budget})"

    def draw(self, log_g_TV: Tensor, noise: Noise, sampled_T: Tensor | None) -> Draw:
        """N uniforms a position, or N - 1 where the rollout's own token is given."""
        mass_TGB = in_blocks(log_g_TV.exp())
        sums_TG = block_sums(mass_TGB)
        total_T1 = sums_TG.sum(-1, keepdim=True)
        own_TN = log_g_TV.new_empty((log_g_TV.shape[0], 0), dtype=torch.int64)
        if sampled_T is not None:
            own_TN = sampled_T.long()[:, None]
        drawn = self.budget - own_TN.shape[1]
        if drawn:
            own_TN = torch.cat([own_TN, locate(mass_TGB, sums_TG, noise(drawn).to(log_g_TV.device) * total_T1)], dim=1)
        log_w_TN = total_T1.log() - mass_TGB.flatten(1).gather(1, own_TN).double().log() - log(self.budget)
        return Draw(ids_TC=own_TN, log_w_TC=log_w_TN)
