"""Policy gradient with the signal of now: the reverse KL on one sample.

Shape suffixes: T tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncopd.objectives.policy_gradients.surrogate import advantage, ratio
from asyncopd.objectives.tokens import Tokens


@dataclass(frozen=True, slots=True)
class PGRecompute:
    """``-r*(log q - log p)``; its expected gradient is that of the reverse KL, whatever b was."""

    name: ClassVar[str] = "pg_recompute"
    needs_step_pass: ClassVar[bool] = False

    def losses(self, tokens: Tokens, value_T: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T], nats; no metrics of its own."""
        return -ratio(tokens) * advantage("recompute", tokens), {}
