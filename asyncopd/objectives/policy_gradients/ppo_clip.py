"""The clipped surrogate, with an optional second bound where the signal is negative.

Shape suffixes: T tokens.

Source: Schulman et al. (2017), PPO; Ye et al. (2020) for the dual clip.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncopd.errors import ConfigError
from asyncopd.objectives.policy_gradients.surrogate import (
    Signal,
    advantage,
    clipped_surrogate,
    ratio,
    require_clip,
    require_signal,
)
from asyncopd.objectives.tokens import Tokens


@dataclass(frozen=True, slots=True)
class PPOClip:
    """``-min(r*A, clip(r)*A)``; with ``dual``, at most ``-dual*A`` where A < 0 (None is off)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual: float | None = None
    signal: Signal = "recompute"
    name: ClassVar[str] = "ppo_clip"
    needs_step_pass: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_clip(self.name, self.clip_low, self.clip_high)
        require_signal(self.name, self.signal)
        if self.dual is not None and self.dual <= 1.0 + self.clip_high:
            raise ConfigError(f"dual is {self.dual}; it must exceed 1 + clip_high = {1.0 + self.clip_high}, such as 3")

    def losses(self, tokens: Tokens, value_T: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T], nats; ``clipped``: 1 where a bound took the gradient away."""
        advantage_T = advantage(self.signal, tokens)
        loss_T, clipped_T = clipped_surrogate(ratio(tokens), advantage_T, self.clip_low, self.clip_high)
        if self.dual is not None:
            ceiling_T = torch.where(advantage_T < 0, -self.dual * advantage_T, torch.inf)
            clipped_T = clipped_T | (loss_T > ceiling_T).detach()
            loss_T = loss_T.minimum(ceiling_T)
        return loss_T, {"clipped": clipped_T.to(loss_T.dtype)}
