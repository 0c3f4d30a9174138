"""What a loss may claim to estimate: dense divergences, written directly from their definitions.

They share no code with ``asyncopd.objectives``, which they judge. Shape suffixes: T positions, V vocabulary.
"""

from collections.abc import Callable
from math import log

import torch
from torch import Tensor

Target = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``target(log_p_TV, log_q_TV, log_b_TV)`` in nats a position [T]; gradient with respect to the first."""


def forward_kl(log_p_TV: Tensor, log_q_TV: Tensor, log_b_TV: Tensor) -> Tensor:
    """``KL(q, p)``."""
    return (log_q_TV.exp() * (log_q_TV - log_p_TV)).sum(-1)


def reverse_kl(log_p_TV: Tensor, log_q_TV: Tensor, log_b_TV: Tensor) -> Tensor:
    """``KL(p, q)``."""
    return (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)


def reverse_kl_minus_drift(log_p_TV: Tensor, log_q_TV: Tensor, log_b_TV: Tensor) -> Tensor:
    """``KL(p, q) - KL(p, b)``, which a policy gradient with a cached signal descends."""
    return (log_p_TV.exp() * (log_b_TV - log_q_TV)).sum(-1)


def total_variation(log_p_TV: Tensor, log_q_TV: Tensor, log_b_TV: Tensor) -> Tensor:
    """Half the L1 distance."""
    return 0.5 * (log_p_TV.exp() - log_q_TV.exp()).abs().sum(-1)


def jsd(beta: float, scaled: bool = False) -> Target:
    """``beta*KL(q, m) + (1-beta)*KL(p, m)``, ``m = beta*q + (1-beta)*p``; ``scaled`` divides by ``beta*(1-beta)``."""

    def target(log_p_TV: Tensor, log_q_TV: Tensor, log_b_TV: Tensor) -> Tensor:
        log_m_TV = torch.logaddexp(log_q_TV + log(beta), log_p_TV + log(1 - beta))
        teacher_T = (log_q_TV.exp() * (log_q_TV - log_m_TV)).sum(-1)
        student_T = (log_p_TV.exp() * (log_p_TV - log_m_TV)).sum(-1)
        return (beta * teacher_T + (1 - beta) * student_T) / (beta * (1 - beta) if scaled else 1.0)

    return target


def skew_forward_kl(alpha: float) -> Target:
    """``KL(q, alpha*q + (1-alpha)*p)``."""

    def target(log_p_TV: Tensor, log_q_TV: Tensor, log_b_TV: Tensor) -> Tensor:
        log_m_TV = torch.logaddexp(log_q_TV + log(alpha), log_p_TV + log(1 - alpha))
        return (log_q_TV.exp() * (log_q_TV - log_m_TV)).sum(-1)

    return target


def skew_reverse_kl(alpha: float) -> Target:
    """``KL(p, alpha*p + (1-alpha)*q)``."""

    def target(log_p_TV: Tensor, log_q_TV: Tensor, log_b_TV: Tensor) -> Tensor:
        log_m_TV = torch.logaddexp(log_p_TV + log(alpha), log_q_TV + log(1 - alpha))
        return (log_p_TV.exp() * (log_p_TV - log_m_TV)).sum(-1)

    return target


def mixed(mix: float) -> Target:
    """``mix*KL(q, p) + (1-mix)*KL(p, q)``."""

    def target(log_p_TV: Tensor, log_q_TV: Tensor, log_b_TV: Tensor) -> Tensor:
        forward_T = forward_kl(log_p_TV, log_q_TV, log_b_TV)
        return mix * forward_T + (1 - mix) * reverse_kl(log_p_TV, log_q_TV, log_b_TV)

    return target


TARGETS: dict[str, Target] = {
    "forward_kl": forward_kl,
    "jsd": jsd(0.5),
    "mixed": mixed(0.5),
    "reverse_kl": reverse_kl,
    "reverse_kl_minus_drift": reverse_kl_minus_drift,
    "skew_forward_kl": skew_forward_kl(0.1),
    "skew_reverse_kl": skew_reverse_kl(0.1),
    "total_variation": total_variation,
}
"""By name, with the default parameter of the objective of that name."""
