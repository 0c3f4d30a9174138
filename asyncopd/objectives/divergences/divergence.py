"""The seam of divergences: a pointwise function whose sum over the vocabulary is the divergence.

Shape suffixes: none; everything here is elementwise.
"""

from typing import Protocol

from torch import Tensor

from teacher_cache.record import Origin


class Divergence(Protocol):
    """An f-divergence ``sum q*f(p/q)`` of the student p from the teacher q (OBJECTIVES, section 1)."""

    @property
    def name(self) -> str:
        """Its key in the registry."""

    @property
    def origin(self) -> Origin:
        """Whose candidates suit it."""

    @property
    def slope_at_one(self) -> float:
        """``f'(1)``: as linear term it makes every term nonnegative, with zero gradient at p = q (Bregman form)."""

    @property
    def slope_at_infinity(self) -> float:
        """``f'(inf)``: as linear term it bounds ``phi/q``, and so the weighted terms of teacher-drawn candidates."""

    def phi(self, log_p: Tensor, log_q: Tensor, linear: float) -> Tensor:
        """``q*f(p/q) - linear*(p - q)`` in nats, elementwise; the linear part sums to zero over the vocabulary.

        A token that neither can emit (-inf in both) gives 0, with zero gradient.
        """


def where_emitted(log_mass: Tensor, value: Tensor) -> Tensor:
    """``value`` where the mass is not zero, else 0: ``0*log 0 = 0``, and no NaN reaches the gradient."""
    return value.where(log_mass > -float("inf"), 0.0)


def linear_part(log_p: Tensor, log_q: Tensor, linear: float) -> Tensor:
    """``linear*(p - q)``."""
    return linear * (log_p.exp() - log_q.exp())
