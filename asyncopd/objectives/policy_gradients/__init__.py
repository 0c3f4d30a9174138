"""Policy-gradient surrogates by name. A new one is one file, one line in ``SURROGATES``, and one test."""

from asyncopd.objectives.policy_gradients.decoupled import Decoupled
from asyncopd.objectives.policy_gradients.icepop import IcePop
from asyncopd.objectives.policy_gradients.pg_cached import PGCached
from asyncopd.objectives.policy_gradients.pg_recompute import PGRecompute
from asyncopd.objectives.policy_gradients.pg_uncorrected import PGUncorrected
from asyncopd.objectives.policy_gradients.ppo_clip import PPOClip
from asyncopd.objectives.policy_gradients.second_moment import SecondMoment
from asyncopd.objectives.policy_gradients.sequence_ratio import SequenceRatio
from asyncopd.objectives.policy_gradients.surrogate import StepSurrogate, Surrogate

__all__ = ["SURROGATES", "StepSurrogate", "Surrogate"]

SURROGATES = {
    "decoupled": Decoupled,
    "icepop": IcePop,
    "pg_cached": PGCached,
    "pg_recompute": PGRecompute,
    "pg_uncorrected": PGUncorrected,
    "ppo_clip": PPOClip,
    "second_moment": SecondMoment,
    "sequence_ratio": SequenceRatio,
}
