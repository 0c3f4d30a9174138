"""Policy gradient with the length-normalised ratio of the whole sequence.

Shape suffixes: T tokens of the optimizer step, N sequences.

Source: Zheng et al. (2025), GSPO, in its token form.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncopd.objectives.policy_gradients.surrogate import (
    Signal,
    advantage,
    require_signal,
    require_step_value,
)
from asyncopd.objectives.tokens import Tokens


@dataclass(frozen=True, slots=True)
class SequenceRatio:
    """``-s*A`` with ``s = sg(s_i)*p/sg(p)``, ``s_i`` the geometric mean of the ratios of sequence i; unclipped."""

    signal: Signal = "recompute"
    name: ClassVar[str] = "sequence_ratio"
    needs_step_pass: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_signal(self.name, self.signal)

    def step_value(self, tokens: Tokens) -> Tensor:
        """``log r``, nats."""
        return (tokens.log_p_T - tokens.log_b_T).detach()

    def over_step(self, value_T: Tensor, sequence_T: Tensor) -> Tensor:
        """``log s_i`` (nats) of the sequence that each token belongs to."""
        _, index_T, length_N = sequence_T.unique(return_inverse=True, return_counts=True)
        total_N = torch.zeros_like(length_N, dtype=value_T.dtype).index_add_(0, index_T, value_T)
        return (total_N / length_N)[index_T]

    def losses(self, tokens: Tokens, value_T: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T], nats; ``sequence_ratio``: ``s_i``."""
        ratio_T = require_step_value(self.name, value_T).exp().to(tokens.log_p_T.dtype)
        s_T = ratio_T * (tokens.log_p_T - tokens.log_p_T.detach()).exp()
        return -s_T * advantage(self.signal, tokens), {"sequence_ratio": ratio_T}
