"""The most likely tokens for certain, and draws with replacement from the rest.

Shape suffixes: T positions, K head tokens, N tail draws, V vocabulary, G blocks, B tokens in a block.
"""

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from teacher_cache.designs.design import Draw
from teacher_cache.designs.inverse_cdf import block_sums, in_blocks, largest, locate
from teacher_cache.errors import DesignError
from teacher_cache.noise import Noise


@dataclass(frozen=True, slots=True)
class HeadTail:
    """Weight 1 for the K most likely, ``1/(N*g_tail)`` for the N draws, ``g_tail`` is ``g`` normalised over the rest.

    ``head_tail(K, 1)`` takes the rollout's own token as its draw where the student proposes: weight 0 in the head, else
    ``1/b(y)``. It needs only the top K and sampled logprobs that any engine gives, and is poor.
    """

    head: int
    draws: int
    unbiased: ClassVar[bool] = True
    distinct: ClassVar[bool] = False
    tail_bucket: ClassVar[bool] = False
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.head < 1 or self.draws < 1:
            raise DesignError(
                f"head_tail({self.head}, {self.draws}): both numbers must be at least 1, for example head_tail(8, 8)"
            )

    @property
    def spec(self) -> str:
        return f"head_tail({self.head},{self.draws})"

    @property
    def budget(self) -> int:
        return self.head + self.draws

    @property
    def reuses_sampled_token(self) -> bool:
        return self.draws == 1

    def draw(self, log_g_TV: Tensor, noise: Noise, sampled_T: Tensor | None) -> Draw:
        """N uniforms a position; none where the rollout's own token is the draw."""
        if self.head > log_g_TV.shape[1]:
            raise DesignError(f"{self.spec} with {log_g_TV.shape[1]} tokens in the vocabulary; use a smaller head")
        mass_TGB = in_blocks(log_g_TV.exp())
        head_TK, ids_TK = largest(mass_TGB, self.head)
        log_head_w_TK = torch.zeros_like(head_TK, dtype=torch.float64).where(head_TK > 0, -torch.inf)
        if self.draws == 1 and sampled_T is not None:
            tail_ids_TN = sampled_T.long()[:, None]
            in_head_T1 = (ids_TK == tail_ids_TN).any(-1, keepdim=True)
            log_w_TN = (-log_g_TV.gather(1, tail_ids_TN).double()).where(~in_head_T1, -torch.inf)
        else:
            mass_TV = mass_TGB.flatten(1).scatter_(1, ids_TK, 0.0)
            sums_TG = block_sums(mass_TGB)
            total_T1 = sums_TG.sum(-1, keepdim=True)
            found_TN = locate(mass_TGB, sums_TG, noise(self.draws).to(log_g_TV.device) * total_T1)
            tail_ids_TN = found_TN.where(total_T1 > 0, 0)
            log_w_TN = total_T1.log() - mass_TV.gather(1, tail_ids_TN).double().log() - log(self.draws)
            log_w_TN = log_w_TN.where(total_T1 > 0, -torch.inf)
        return Draw(
            ids_TC=torch.cat([ids_TK, tail_ids_TN], dim=1), log_w_TC=torch.cat([log_head_w_TK, log_w_TN], dim=1)
        )
