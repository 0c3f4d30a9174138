"""Forward KL, ``KL(q, p)``: the student covers the teacher."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncopd.objectives.divergences.divergence import linear_part, where_emitted
from teacher_cache.record import Origin


@dataclass(frozen=True, slots=True)
class ForwardKL:
    """``q log(q/p)``, with ``f(t) = -log t``."""

    name: ClassVar[str] = "forward_kl"
    origin: ClassVar[Origin] = "teacher"
    slope_at_one: ClassVar[float] = -1.0
    slope_at_infinity: ClassVar[float] = 0.0

    def phi(self, log_p: Tensor, log_q: Tensor, linear: float) -> Tensor:
        """Elementwise, nats. Infinite, with finite gradient, where the teacher emits what the student cannot."""
        return log_q.exp() * where_emitted(log_q, log_q - log_p) - linear_part(log_p, log_q, linear)
