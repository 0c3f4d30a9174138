"""The second phase of two-phase designs: keeping some of the candidates in proportion to a size.

Shape suffixes: T positions, C first-phase candidates, K kept candidates.

Source: two-phase (double) sampling, Neyman (1938). Each phase is unbiased given the one before, so the product is,
whatever the sizes are.
"""

import torch
from torch import Tensor

from teacher_cache.designs.design import Draw
from teacher_cache.designs.systematic import Systematic
from teacher_cache.noise import Noise

FLOOR = 0.3
"""Nats of disagreement that every candidate is taken to have: it may agree now and not when it is trained on."""
CEILING = 30.0
"""Nats at which the disagreement is capped, so that no size is infinite."""


def keep(
    budget: int, log_size_TC: Tensor, *, ids_TC: Tensor, log_w_TC: Tensor, log_q_TC: Tensor, noise: Noise
) -> tuple[Draw, Tensor]:
    """``budget`` of the candidates, drawn with inclusion probability proportional to size, and their scores (nats).

    A position with a score that is not finite at any first-phase candidate gets NaN at all of the kept ones.
    """
    log_w_TC = log_w_TC.double()
    whole_T1 = (log_q_TC.isfinite() | (log_w_TC == -torch.inf)).all(-1, keepdim=True)
    kept = Systematic(budget).draw(log_size_TC, noise, None)
    log_w_TK = log_w_TC.gather(1, kept.ids_TC) + kept.log_w_TC
    draw = Draw(ids_TC=ids_TC.long().gather(1, kept.ids_TC), log_w_TC=log_w_TK)
    return draw, log_q_TC.gather(1, kept.ids_TC).where(whole_T1, torch.nan)
