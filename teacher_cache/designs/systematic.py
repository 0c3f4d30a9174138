"""Systematic sampling with inclusion probabilities proportional to the proposal, as far as 1 allows.

Shape suffixes: T positions, K candidates, V vocabulary, N = min(K, V) most likely tokens, G blocks of B tokens.

Source: Madow (1949), systematic sampling with unequal probabilities; Horvitz and Thompson (1952) for the weights.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from teacher_cache.designs.design import Draw
from teacher_cache.designs.inverse_cdf import block_sums, in_blocks, largest, locate
from teacher_cache.errors import DesignError
from teacher_cache.noise import Noise


@dataclass(frozen=True, slots=True)
class Systematic:
    """``pi = min(1, c*g)`` with ``sum pi = K``; one uniform offset along the vocabulary; ``w = 1/pi``.

    Distinct tokens, ``sum w*g = 1`` exactly, drawn independently of the rollout's own token.
    """

    budget: int
    unbiased: ClassVar[bool] = True
    reuses_sampled_token: ClassVar[bool] = False
    distinct: ClassVar[bool] = True
    tail_bucket: ClassVar[bool] = False
    thins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise DesignError(f"systematic({self.budget}): the budget must be at least 1, for example systematic(16)")

    @property
    def spec(self) -> str:
        return f"systematic({self.budget})"

    def draw(self, log_g_TV: Tensor, noise: Noise, sampled_T: Tensor | None) -> Draw:
        """One uniform a position. Only ratios of ``g`` matter: it need not be normalised to the last bit."""
        size, budget, device = log_g_TV.shape[1], self.budget, log_g_TV.device
        mass_TGB = in_blocks(log_g_TV.exp())
        head_TN, head_ids_TN = largest(mass_TGB, min(budget, size))
        mass_TV = mass_TGB.flatten(1)

        # Saturated tokens (pi = 1) leave the line and take the first slots: a stretch of length one holds one
        # target whatever the offset is, and taking it by hand keeps rounding from drawing it twice or never.
        mass_TV.scatter_(1, head_ids_TN, 0.0)
        sums_TG = block_sums(mass_TGB)
        saturated_T1 = _saturated(head_TN.double(), sums_TG.sum(-1, keepdim=True), budget)
        rank_N = torch.arange(head_TN.shape[1], device=device)
        back_TN = head_TN.where(rank_N >= saturated_T1, 0.0)
        mass_TV.scatter_add_(1, head_ids_TN, back_TN)
        sums_TG.scatter_add_(1, head_ids_TN // mass_TGB.shape[2], back_TN.double())

        slot_TK = torch.arange(budget, device=device) - saturated_T1
        step_T1 = sums_TG.sum(-1, keepdim=True) / (budget - saturated_T1).clamp(min=1)
        line_ids_TK = locate(mass_TGB, sums_TG, (noise(1).to(device) + slot_TK).clamp(min=0.0) * step_T1)
        log_w_TK = step_T1.log() - mass_TV.gather(1, line_ids_TK).double().log()

        certain_ids_TK = pad(head_ids_TN, (0, budget - head_ids_TN.shape[1]))
        certain_TK, empty_TK = slot_TK < 0, (slot_TK >= 0) & (step_T1 == 0)
        log_w_TK = log_w_TK.where(~certain_TK, 0.0).where(~empty_TK, -torch.inf)
        return Draw(ids_TC=certain_ids_TK.where(certain_TK | empty_TK, line_ids_TK), log_w_TC=log_w_TK)


def _saturated(head_TN: Tensor, rest_T1: Tensor, budget: int) -> Tensor:
    """How many of the most likely tokens have ``pi = 1``, int64 [T, 1].

    The smallest ``s`` with ``(K - s) * g_(s) <= mass of the tokens from s on``. Suffix sums, because 1 minus the mass
    of the head cancels where the head has nearly all of it.
    """
    rank_N = torch.arange(head_TN.shape[1], device=head_TN.device)
    from_here_TN = head_TN.flip(-1).cumsum(-1).flip(-1) + rest_T1
    fits_TN = (budget - rank_N) * head_TN <= from_here_TN
    if head_TN.shape[1] < budget:
        fits_TN &= head_TN == 0
    return (~fits_TN).cumprod(-1).sum(-1, keepdim=True)
