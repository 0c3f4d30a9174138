"""Skewed reverse KL: the student against a mixture that contains it, so that the ratio is bounded.

Source: Lee (2001), alpha-skew divergence; Ko et al. (2024), DistiLLM.
"""

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from asyncopd.errors import ConfigError
from asyncopd.objectives.divergences.divergence import linear_part, where_emitted
from teacher_cache.record import Origin


@dataclass(frozen=True, slots=True)
class SkewReverseKL:
    """``p log(p/m)`` with ``m = alpha*p + (1-alpha)*q`` and ``0 < alpha < 1``; ``alpha -> 0`` is the reverse KL."""

    alpha: float = 0.1
    name: ClassVar[str] = "skew_reverse_kl"
    origin: ClassVar[Origin] = "student"

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 1.0:
            raise ConfigError(
                f"alpha is {self.alpha}; skew_reverse_kl needs 0 < alpha < 1: use reverse_kl for alpha = 0"
            )

    @property
    def slope_at_one(self) -> float:
        return 1.0 - self.alpha

    @property
    def slope_at_infinity(self) -> float:
        return -log(self.alpha)

    def phi(self, log_p: Tensor, log_q: Tensor, linear: float) -> Tensor:
        """Elementwise, nats; finite everywhere."""
        emitted = (log_p > -torch.inf) | (log_q > -torch.inf)
        log_p, log_q = log_p.where(emitted, 0.0), log_q.where(emitted, 0.0)
        log_m = torch.logaddexp(log_p + log(self.alpha), log_q + log(1.0 - self.alpha))
        value = log_p.exp() * where_emitted(log_p, log_p - log_m) - linear_part(log_p, log_q, linear)
        return value.where(emitted, 0.0)
