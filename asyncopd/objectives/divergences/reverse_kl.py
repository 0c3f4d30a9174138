"""Reverse KL, ``KL(p, q)``: the student stays where the teacher has mass."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncopd.objectives.divergences.divergence import linear_part, where_emitted
from teacher_cache.record import Origin


@dataclass(frozen=True, slots=True)
class ReverseKL:
    """``p log(p/q)``, with ``f(t) = t log t``. No linear term bounds it on teacher-drawn candidates."""

    name: ClassVar[str] = "reverse_kl"
    origin: ClassVar[Origin] = "student"
    slope_at_one: ClassVar[float] = 1.0
    slope_at_infinity: ClassVar[float] = float("inf")

    def phi(self, log_p: Tensor, log_q: Tensor, linear: float) -> Tensor:
        """Elementwise, nats. Infinite where the student emits what the teacher cannot."""
        return log_p.exp() * where_emitted(log_p, log_p - log_q) - linear_part(log_p, log_q, linear)
