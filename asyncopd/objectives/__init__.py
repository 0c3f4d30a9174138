"""Objectives: what the student is trained on, as pure functions of tensors.

``DIVERGENCES`` and ``SURROGATES`` are the registries; ``build_objective`` makes what an ``ObjectiveConfig`` names.
"""

from asyncopd.objectives.build import build_objective
from asyncopd.objectives.config import ObjectiveConfig
from asyncopd.objectives.diagnostics import METRICS, by_staleness
from asyncopd.objectives.divergences import DIVERGENCES
from asyncopd.objectives.objective import Objective, StepContext
from asyncopd.objectives.policy_gradients import SURROGATES
from asyncopd.objectives.reduction import token_scales
from asyncopd.objectives.tokens import Candidates, Tokens
from asyncopd.objectives.validity import valid_positions

__all__ = [
    "DIVERGENCES",
    "METRICS",
    "SURROGATES",
    "Candidates",
    "Objective",
    "ObjectiveConfig",
    "StepContext",
    "Tokens",
    "build_objective",
    "by_staleness",
    "token_scales",
    "valid_positions",
]
