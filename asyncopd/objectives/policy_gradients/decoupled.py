"""The clipped surrogate around the student at the start of the step, with a capped correction for the behaviour policy.

Shape suffixes: T tokens.

Source: Hilton, Cobbe, Schulman (2022), batch size invariance for policy optimization; Fu et al. (2025), AReaL.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncopd.errors import ConfigError
from asyncopd.objectives.policy_gradients.surrogate import (
    Signal,
    advantage,
    clipped_surrogate,
    require_clip,
    require_signal,
    require_step_value,
)
from asyncopd.objectives.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Decoupled:
    """Clip ``p/p_prox``, times ``p_prox/b`` where that is at most ``cap``, else 0."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float = 5.0
    signal: Signal = "recompute"
    name: ClassVar[str] = "decoupled"
    needs_step_pass: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_clip(self.name, self.clip_low, self.clip_high)
        require_signal(self.name, self.signal)
        if self.cap <= 0.0:
            raise ConfigError(f"cap is {self.cap}; the largest p_prox/b that is kept must be positive, for example 5")

    def step_value(self, tokens: Tokens) -> Tensor:
        """``log p_prox``: the student's logprob (nats) of the sampled token at the start of the step."""
        return tokens.log_p_T.detach()

    def over_step(self, value_T: Tensor, sequence_T: Tensor) -> Tensor:
        """The same."""
        return value_T

    def losses(self, tokens: Tokens, value_T: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T], nats; ``clipped``: 1 where a bound or the cap took the gradient away."""
        log_prox_T = require_step_value(self.name, value_T)
        ratio_T = (tokens.log_p_T - log_prox_T).exp()
        behaviour_T = (log_prox_T - tokens.log_b_T).exp()
        loss_T, clipped_T = clipped_surrogate(ratio_T, advantage(self.signal, tokens), self.clip_low, self.clip_high)
        kept_T = behaviour_T <= self.cap
        return (loss_T * behaviour_T).where(kept_T, 0.0), {"clipped": (clipped_T | ~kept_T).to(loss_T.dtype)}
