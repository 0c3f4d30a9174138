"""Divergences as objectives: one part for each candidate set.

Shape suffixes: T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncopd.errors import ConfigError
from asyncopd.objectives.centring import mean_of_other_sequences
from asyncopd.objectives.config import ObjectiveConfig
from asyncopd.objectives.objective import StepContext, sampled_metrics
from asyncopd.objectives.sparse import SparseDivergence
from asyncopd.objectives.tokens import Tokens
from teacher_cache.designs import SupportDesign
from teacher_cache.record import Origin


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceObjective:
    """Weighted sum of sparse divergences.

    parts       share and estimator of each
    """

    config: ObjectiveConfig
    parts: tuple[tuple[float, SparseDivergence], ...]

    @property
    def origins(self) -> frozenset[Origin]:
        return frozenset(part.origin for _, part in self.parts)

    @property
    def draws(self) -> Mapping[Origin, SupportDesign]:
        return {part.origin: part.design for _, part in self.parts}

    @property
    def needs_step_pass(self) -> bool:
        return any(part.centring == "mean" for _, part in self.parts)

    @property
    def token_local(self) -> bool:
        return not self.needs_step_pass

    def step_value(self, tokens: Tokens) -> Tensor:
        """For ``mean`` centring: the estimated reverse KL (nats)."""
        for _, part in self.parts:
            if part.centring == "mean":
                return part.estimate(tokens.of_origin(part.origin))
        raise ConfigError(f"{self.config.name} needs no step pass; call token_losses without a context")

    def over_step(self, value_T: Tensor, sequence_T: Tensor) -> StepContext:
        """Its token mean over the other sequences."""
        return StepContext(value_T=mean_of_other_sequences(value_T, sequence_T))

    def step_context(self, tokens: Tokens) -> StepContext:
        """See ``Objective``."""
        return self.over_step(self.step_value(tokens), tokens.sequence_T)

    def token_losses(self, tokens: Tokens, context: StepContext | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T] and metrics [T]; see ``Objective``."""
        if self.needs_step_pass and context is None:
            raise ConfigError(f"{self.config.name} with mean centring needs the whole step; call step_context first")
        baseline_T = None if context is None else context.value_T
        scale = self.config.temperature**2 if self.config.temperature_squared else 1.0
        loss_T = torch.zeros_like(tokens.log_p_T.detach())
        metrics = sampled_metrics(tokens)
        for share, part in self.parts:
            part_T, found = part.losses(tokens.of_origin(part.origin), baseline_T)
            loss_T = loss_T + (share * scale) * part_T
            prefix = f"{part.divergence.name}/" if len(self.parts) > 1 else ""
            metrics |= {prefix + name: value for name, value in found.items()}
        return loss_T, metrics
