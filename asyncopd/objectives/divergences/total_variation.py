"""Total variation distance."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncopd.objectives.divergences.divergence import linear_part
from teacher_cache.record import Origin


@dataclass(frozen=True, slots=True)
class TotalVariation:
    """``0.5*abs(p - q)``; with the linear term at infinity, ``max(q - p, 0)``. Zero subgradient at p = q."""

    name: ClassVar[str] = "total_variation"
    origin: ClassVar[Origin] = "student"
    slope_at_one: ClassVar[float] = 0.0
    slope_at_infinity: ClassVar[float] = 0.5

    def phi(self, log_p: Tensor, log_q: Tensor, linear: float) -> Tensor:
        """Elementwise, in probability (0 to 1), not nats."""
        if linear == self.slope_at_infinity:
            return (log_q.exp() - log_p.exp()).relu()
        return 0.5 * (log_p.exp() - log_q.exp()).abs() - linear_part(log_p, log_q, linear)
