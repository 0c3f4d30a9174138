"""Policy-gradient surrogates as objectives.

Shape suffixes: T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from asyncopd.errors import ConfigError
from asyncopd.objectives.config import ObjectiveConfig
from asyncopd.objectives.objective import StepContext, sampled_metrics
from asyncopd.objectives.policy_gradients import StepSurrogate, Surrogate
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

    def step_value(self, tokens: Tokens) -> Tensor:
        """What the surrogate's ``step_value`` says."""
        return self._step_surrogate().step_value(tokens)

    def over_step(self, value_T: Tensor, sequence_T: Tensor) -> StepContext:
        """What the surrogate's ``over_step`` says."""
        return StepContext(value_T=self._step_surrogate().over_step(value_T, sequence_T))

    def step_context(self, tokens: Tokens) -> StepContext:
        """See ``Objective``."""
        return self.over_step(self.step_value(tokens), tokens.sequence_T)

    def _step_surrogate(self) -> StepSurrogate:
        if not isinstance(self.surrogate, StepSurrogate):
            raise ConfigError(f"{self.surrogate.name} needs no step pass; call token_losses without a context")
        return self.surrogate

    def token_losses(self, tokens: Tokens, context: StepContext | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T] and metrics [T]; see ``Objective``."""
        loss_T, metrics = self.surrogate.losses(tokens, None if context is None else context.value_T)
        return loss_T, sampled_metrics(tokens) | metrics
