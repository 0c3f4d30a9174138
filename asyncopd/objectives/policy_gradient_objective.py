"""Policy-gradient surrogates as objectives.

Shape suffixes: T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from asyncopd.objectives.config import ObjectiveConfig
from asyncopd.objectives.objective import StepContext, sampled_metrics
from asyncopd.objectives.policy_gradients import Surrogate
from asyncopd.objectives.tokens import Tokens
from teacher_cache.designs import SupportDesign
from teacher_cache.record import Origin


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradientObjective:
    """A surrogate on the rollout's own tokens; it reads no candidates."""

    config: ObjectiveConfig
    surrogate: Surrogate

    @property
    def origins(self) -> frozenset[Origin]:
        return frozenset()

    @property
    def draws(self) -> Mapping[Origin, SupportDesign]:
        return {}

    @property
    def needs_step_pass(self) -> bool:
        return self.surrogate.needs_step_pass

    @property
    def token_local(self) -> bool:
        return not self.needs_step_pass

    def step_context(self, tokens: Tokens) -> StepContext:
        """What the surrogate's ``step_value`` says."""
        return StepContext(value_T=self.surrogate.step_value(tokens))

    def token_losses(self, tokens: Tokens, context: StepContext | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T] and metrics [T]; see ``Objective``."""
        loss_T, metrics = self.surrogate.losses(tokens, None if context is None else context.value_T)
        return loss_T, sampled_metrics(tokens) | metrics
