"""Policy gradient that takes stale tokens for fresh ones.

Shape suffixes: T tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncopd.objectives.policy_gradients.surrogate import advantage
from asyncopd.objectives.tokens import Tokens


@dataclass(frozen=True, slots=True)
class PGUncorrected:
    """``-(log q - log p)*log p``; right when the token is fresh, and its value is no divergence."""

    name: ClassVar[str] = "pg_uncorrected"
    needs_step_pass: ClassVar[bool] = False

    def losses(self, tokens: Tokens, value_T: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T], nats; no metrics of its own."""
        return -advantage("recompute", tokens) * tokens.log_p_T, {}
