"""Baselines of the sampled reverse KL: subtracting ``B*(p - q)`` changes its variance and nothing else.

Shape suffixes: T tokens, C candidates a token, N sequences.

``B`` is detached. ``mean`` and ``leave_one_out`` leave the estimate unbiased, because B does not depend on the
candidate that it multiplies; ``hajek`` does depend on it, with a bias below noise from 8 candidates on.
"""

from typing import Literal

import torch
from torch import Tensor

from asyncopd.objectives.divergences.divergence import where_emitted

Centring = Literal["none", "hajek", "mean", "leave_one_out"]


@torch.no_grad()
def hajek(log_p_TC: Tensor, log_q_TC: Tensor, w_TC: Tensor) -> Tensor:
    """``sum w p log(p/q) / sum w p`` over the candidates [T, 1], nats; 0 where they have no student mass."""
    mass_TC = w_TC * log_p_TC.exp()
    apart_TC = where_emitted(mass_TC.log(), log_p_TC - log_q_TC)
    total_T1 = mass_TC.sum(-1, keepdim=True)
    return ((mass_TC * apart_TC).sum(-1, keepdim=True) / total_T1).where(total_T1 > 0, 0.0)


@torch.no_grad()
def leave_one_out(log_p_TC: Tensor, log_q_TC: Tensor, w_TC: Tensor) -> Tensor:
    """Mean over the *other* draws of ``(p/g) log(p/q)`` [T, C], nats, for draws with replacement.

    Their weight is ``1/(draws*g)``; empty slots are no draws.
    """
    mass_TC = w_TC * log_p_TC.exp()
    share_TC = mass_TC * where_emitted(mass_TC.log(), log_p_TC - log_q_TC)
    draws_T1 = (w_TC > 0).sum(-1, keepdim=True).to(w_TC.dtype)
    return (share_TC.sum(-1, keepdim=True) - share_TC) * (draws_T1 / (draws_T1 - 1).clamp(min=1))


@torch.no_grad()
def mean_of_other_sequences(value_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Token mean of ``value_T`` over all sequences but the token's own [T]; 0 where there is no other."""
    _, index_T, length_N = sequence_T.unique(return_inverse=True, return_counts=True)
    total_N = torch.zeros_like(length_N, dtype=value_T.dtype).index_add_(0, index_T, value_T)
    others_N = length_N.sum() - length_N
    mean_N = (total_N.sum() - total_N) / others_N.clamp(min=1)
    return mean_N.where(others_N > 0, 0.0)[index_T]
