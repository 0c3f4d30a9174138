"""The seam of objectives: what the learner evaluates.

Shape suffixes: T tokens (of several sequences, concatenated), C candidates a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from asyncopd.objectives.config import ObjectiveConfig
from asyncopd.objectives.tokens import Tokens
from teacher_cache.designs import SupportDesign
from teacher_cache.record import Origin


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepContext:
    """What an objective must know of the whole optimizer step before it can give a token's loss.

    value_T     one detached number a token; the objective's ``over_step`` says which
    """

    value_T: Tensor

    def slice(self, index: Tensor | slice) -> "StepContext":
        """The context of some of the tokens: those of one micro-batch, or of one chunk."""
        return StepContext(value_T=self.value_T[index])


class Objective(Protocol):
    """A pure function of tensors: loss and metrics of each token."""

    @property
    def config(self) -> ObjectiveConfig:
        """What it was built from."""

    @property
    def origins(self) -> frozenset[Origin]:
        """Candidate sets that it reads; none for the policy-gradient family."""

    @property
    def draws(self) -> Mapping[Origin, SupportDesign]:
        """The design that draws each of them."""

    @property
    def needs_step_pass(self) -> bool:
        """Whether ``token_losses`` needs a context: what must be known of the whole optimizer step first."""

    @property
    def token_local(self) -> bool:
        """Whether a token's loss depends on that token alone: the opposite of ``needs_step_pass``."""

    def step_value(self, tokens: Tokens) -> Tensor:
        """One detached number a token [T], from that token alone. ConfigError where no context is needed."""

    def over_step(self, value_T: Tensor, sequence_T: Tensor) -> StepContext:
        """The context, from those numbers of all tokens of the optimizer step, of all ranks, and their sequences."""

    def step_context(self, tokens: Tokens) -> StepContext:
        """The context where all tokens of the optimizer step are at hand: ``over_step`` of ``step_value``."""

    def token_losses(self, tokens: Tokens, context: StepContext | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token in nats, unreduced [T], and detached metrics [T] (named in ``diagnostics.METRICS``).

        Differentiable with respect to ``log_p_T`` and the ``log_p_TC`` of each set.
        """


def sampled_metrics(tokens: Tokens) -> dict[str, Tensor]:
    """Metrics [T] of the sampled tokens, which every objective can give."""
    log_p_T = tokens.log_p_T.detach()
    return {"k1": log_p_T - tokens.log_q_T, "log_ratio": log_p_T - tokens.log_b_T}
