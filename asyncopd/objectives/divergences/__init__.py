"""Divergences by name. A new divergence is one file, one line in ``DIVERGENCES``, and one test."""

from asyncopd.objectives.divergences.divergence import Divergence
from asyncopd.objectives.divergences.forward_kl import ForwardKL
from asyncopd.objectives.divergences.jsd import JSD
from asyncopd.objectives.divergences.mixed import Mixed
from asyncopd.objectives.divergences.reverse_kl import ReverseKL
from asyncopd.objectives.divergences.skew_forward_kl import SkewForwardKL
from asyncopd.objectives.divergences.skew_reverse_kl import SkewReverseKL
from asyncopd.objectives.divergences.total_variation import TotalVariation

__all__ = ["DIVERGENCES", "Divergence", "Mixed"]

DIVERGENCES = {
    "forward_kl": ForwardKL,
    "jsd": JSD,
    "mixed": Mixed,
    "reverse_kl": ReverseKL,
    "skew_forward_kl": SkewForwardKL,
    "skew_reverse_kl": SkewReverseKL,
    "total_variation": TotalVariation,
}
