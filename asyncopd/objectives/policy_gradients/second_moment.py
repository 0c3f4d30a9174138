"""Policy gradient with a trust region on the second moment of the log ratio, by masking tokens.

Shape suffixes: T tokens of the optimizer step.

Source: Zheng et al. (2025), M2PO; the masking variant (another port solves for clip bounds instead).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncopd.errors import ConfigError
from asyncopd.objectives.policy_gradients.surrogate import (
    Signal,
    advantage,
    ratio,
    require_signal,
    require_step_value,
)
from asyncopd.objectives.tokens import Tokens


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """``-r*A`` on the kept tokens. Tokens are masked, largest ``(log r)^2`` first, until its mean is within ``budget``.

    The mean is over the tokens of the whole optimizer step that are still kept.
    """

    budget: float = 0.04
    signal: Signal = "recompute"
    name: ClassVar[str] = "second_moment"
    needs_step_pass: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_signal(self.name, self.signal)
        if self.budget <= 0.0:
            raise ConfigError(
                f"budget is {self.budget}; the mean of (log r)^2 in nats^2 must be positive, such as 0.04"
            )

    def step_value(self, tokens: Tokens) -> Tensor:
        """``(log r)^2``, nats^2."""
        return (tokens.log_p_T - tokens.log_b_T).detach().double().square()

    def over_step(self, value_T: Tensor, sequence_T: Tensor) -> Tensor:
        """1 for a kept token, 0 for a masked one."""
        ordered_T, order_T = value_T.sort()
        mean_T = ordered_T.cumsum(0) / torch.arange(1, len(ordered_T) + 1, device=ordered_T.device)
        # The running mean of an ascending sequence ascends, so the kept tokens are a prefix.
        return torch.zeros_like(value_T).scatter_(0, order_T, (mean_T <= self.budget).double())

    def losses(self, tokens: Tokens, value_T: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T], nats; ``clipped``: 1 where the token was masked."""
        kept_T = require_step_value(self.name, value_T) > 0
        loss_T = (-ratio(tokens) * advantage(self.signal, tokens)).where(kept_T, 0.0)
        return loss_T, {"clipped": (~kept_T).to(loss_T.dtype)}
