"""Generalised Jensen-Shannon divergence.

Source: Agarwal et al. (2024), generalised knowledge distillation, whose beta weighs the teacher as here.
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
class JSD:
    """``beta*q log(q/m) + (1-beta)*p log(p/m)`` with ``m = beta*q + (1-beta)*p`` and ``0 < beta < 1``.

    ``scaled`` divides by ``beta*(1-beta)``: then ``beta -> 0`` is the forward KL and ``beta -> 1`` the reverse KL, both
    in Bregman form. Unscaled, the divergence itself goes to zero at both ends.
    """

    beta: float = 0.5
    scaled: bool = False
    name: ClassVar[str] = "jsd"
    origin: ClassVar[Origin] = "teacher"
    slope_at_one: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.beta < 1.0:
            remedy = {0.0: "use forward_kl for the limit at 0", 1.0: "use reverse_kl for the limit at 1"}
            raise ConfigError(
                f"beta is {self.beta}; jsd needs 0 < beta < 1: "
                + remedy.get(self.beta, "at the ends the limits are forward_kl (0) and reverse_kl (1)")
            )

    @property
    def slope_at_infinity(self) -> float:
        return -(1.0 - self.beta) * log(1.0 - self.beta) * self._factor

    @property
    def _factor(self) -> float:
        return 1.0 / (self.beta * (1.0 - self.beta)) if self.scaled else 1.0

    def phi(self, log_p: Tensor, log_q: Tensor, linear: float) -> Tensor:
        """Elementwise, nats; finite everywhere."""
        emitted = (log_p > -torch.inf) | (log_q > -torch.inf)
        log_p, log_q = log_p.where(emitted, 0.0), log_q.where(emitted, 0.0)
        log_m = torch.logaddexp(log_q + log(self.beta), log_p + log(1.0 - self.beta))
        teacher = self.beta * log_q.exp() * where_emitted(log_q, log_q - log_m)
        student = (1.0 - self.beta) * log_p.exp() * where_emitted(log_p, log_p - log_m)
        value = self._factor * (teacher + student) - linear_part(log_p, log_q, linear)
        return value.where(emitted, 0.0)
