"""What to train on, in plain fields.

Every field is read by the objective it is set for, or refused.
"""

from dataclasses import dataclass
from typing import Literal

from asyncopd.objectives.resolution import check, check_sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """An objective: a divergence on candidates, or a policy-gradient surrogate on the sampled tokens.

    name            a key of ``DIVERGENCES`` or ``SURROGATES``
    design          how candidates are drawn, for example ``systematic(16)``; divergences only
    origin          whose candidates; auto is the one that suits the divergence
    centring        baseline of the sampled reverse KL; auto is hajek from 4 candidates on
    form            linear term ``c*(p - q)``: bregman ``f'(1)``, bounded ``f'(inf)``, plain none; auto goes by origin
    temperature     at which student and teacher are compared
    temperature_squared  multiply the loss by its square, so that the gradient keeps its size
    reduction       how token losses become the step's loss
    fixed_length    tokens; the constant of reduction fixed_length
    truncate        cap on p/g of student-drawn multi_sample candidates
    allow_unbounded  permit reverse_kl on teacher-drawn candidates

    The rest are parameters of single objectives; None is the objective's own default: beta and scaled (jsd), alpha
    (skewed KLs), mix (mixed), signal, clip_low, clip_high, dual, cap, budget, ratio_low, ratio_high (surrogates).
    """

    name: str = "reverse_kl"
    design: str = "systematic(16)"
    origin: Literal["auto", "student", "teacher"] = "auto"
    centring: Literal["auto", "none", "hajek", "mean", "leave_one_out"] = "auto"
    form: Literal["auto", "bregman", "bounded", "plain"] = "auto"
    temperature: float = 1.0
    temperature_squared: bool = False
    reduction: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    fixed_length: int | None = None
    truncate: float | None = None
    allow_unbounded: bool = False
    beta: float | None = None
    scaled: bool | None = None
    alpha: float | None = None
    mix: float | None = None
    signal: Literal["cached", "recompute"] | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual: float | None = None
    cap: float | None = None
    budget: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None

    def __post_init__(self) -> None:
        check(self)

    def validate_with_sampling(self, *, temperature: float, truncated: bool, vocabulary: int) -> None:
        """ConfigError where the objective does not fit the way in which tokens are sampled, or the vocabulary's size.

        truncated    whether some tokens cannot be drawn, as ``SamplingConfig.truncated`` says
        """
        check_sampling(self, temperature=temperature, truncated=truncated, vocabulary=vocabulary)
