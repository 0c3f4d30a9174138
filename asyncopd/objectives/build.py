"""From a config to the objective that the learner evaluates."""

import warnings

from asyncopd.objectives.config import ObjectiveConfig
from asyncopd.objectives.divergence_objective import DivergenceObjective
from asyncopd.objectives.objective import Objective
from asyncopd.objectives.policy_gradient_objective import PolicyGradientObjective
from asyncopd.objectives.policy_gradients import SURROGATES
from asyncopd.objectives.resolution import parts, surrogate


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective; warns where the choice works but is known to be poor."""
    if config.name in SURROGATES:
        return PolicyGradientObjective(config=config, surrogate=surrogate(config))
    objective = DivergenceObjective(config=config, parts=parts(config))
    for advice in _advice(objective):
        warnings.warn(advice, stacklevel=2)
    return objective


def _advice(objective: DivergenceObjective) -> list[str]:
    """What to do instead, for choices that are right but poor."""
    found = []
    for _, part in objective.parts:
        if (
            part.divergence.name == "forward_kl"
            and part.origin == "student"
            and part.design.unbiased
            and part.design.budget
        ):
            found.append("forward_kl on student-drawn candidates works only close to the teacher; use origin teacher")
        if part.design.reuses_sampled_token and part.design.spec.startswith("head_tail"):
            found.append(
                f"{part.design.spec} has several times the error of systematic({part.design.budget}) at the same cost; "
                "use it only where the engine gives no more than top logprobs"
            )
    return found
