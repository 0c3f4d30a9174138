"""Policy gradient with the signal of the moment at which the token was drawn.

Shape suffixes: T tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncopd.objectives.policy_gradients.surrogate import advantage, ratio
from asyncopd.objectives.tokens import Tokens


@dataclass(frozen=True, slots=True)
class PGCached:
    """``-r*(log q - log b)``; its expected gradient is that of ``KL(p, q) - KL(p, b)``."""

    name: ClassVar[str] = "pg_cached"
    needs_step_pass: ClassVar[bool] = False

    def losses(self, tokens: Tokens, value_T: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T], nats; no metrics of its own."""
        return -ratio(tokens) * advantage("cached", tokens), {}
