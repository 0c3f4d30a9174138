"""Policy gradient that drops tokens whose ratio is out of bounds.

Shape suffixes: T tokens.

Source: Ling team (2025), IcePop.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncopd.errors import ConfigError
from asyncopd.objectives.policy_gradients.surrogate import Signal, advantage, ratio, require_signal
from asyncopd.objectives.tokens import Tokens


@dataclass(frozen=True, slots=True)
class IcePop:
    """``-r*A`` where ``ratio_low <= r <= ratio_high``, else 0."""

    ratio_low: float = 0.5
    ratio_high: float = 5.0
    signal: Signal = "recompute"
    name: ClassVar[str] = "icepop"
    needs_step_pass: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_signal(self.name, self.signal)
        if not 0.0 <= self.ratio_low < 1.0 < self.ratio_high:
            raise ConfigError(
                f"icepop keeps ratios from {self.ratio_low} to {self.ratio_high}; a fresh token has ratio 1, "
                "so 0 <= ratio_low < 1 < ratio_high, for example 0.5 and 5"
            )

    def losses(self, tokens: Tokens, value_T: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T], nats; ``clipped``: 1 where the token was dropped."""
        ratio_T = ratio(tokens)
        kept_T = ((ratio_T >= self.ratio_low) & (ratio_T <= self.ratio_high)).detach()
        loss_T = (-ratio_T * advantage(self.signal, tokens)).where(kept_T, 0.0)
        return loss_T, {"clipped": (~kept_T).to(loss_T.dtype)}
