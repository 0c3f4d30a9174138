"""Expected value and gradient of a loss by enumeration, against the dense target.

Shape suffixes: T positions, V vocabulary, N outcomes of a position, C candidates, J joint outcomes of all positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncopd.audit.batches import Space, batch_of, spaces
from asyncopd.audit.states import State
from asyncopd.audit.subject import AuditBatch, Subject, logprobs
from asyncopd.errors import ConfigError

_MOST_CALLS = 1000
"""Outcomes of a position beyond which a loss is not called once for each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measurement:
    """What enumeration found, over all positions of a state.

    value_bias      abs(expected - true value) / true value (taken as at least 1e-6 nats)
    grad_bias       norm of the error of the expected logit gradient / norm of the true one (at least 1e-6)
    grad_rel_mse    expected squared error of the gradient / squared norm of the true one (at least 1e-12)
    cosine          between expected and true gradient; NaN where either is zero
    value           expected value summed over positions, nats
    gradient_TV     expected gradient with respect to the logits
    """

    value_bias: float
    grad_bias: float
    grad_rel_mse: float
    cosine: float
    value: float
    gradient_TV: Tensor


def measure(subject: Subject, state: State) -> Measurement:
    """Enumerate ``subject`` on ``state`` exactly."""
    vocabulary, drawn = state.student_TV.shape[1], spaces(subject, state)
    leaf_TV = state.student_TV.clone().requires_grad_()
    log_q_TV, log_b_TV = logprobs(state.teacher_TV, vocabulary), logprobs(state.behaviour_TV, vocabulary)
    true_T = subject.target(logprobs(leaf_TV, vocabulary), log_q_TV, log_b_TV)
    (true_TV,) = torch.autograd.grad(true_T.sum(), leaf_TV)

    probe = subject.loss(batch_of(state, drawn, [torch.zeros(1, dtype=torch.int64) for _ in drawn]))
    if probe.dim() == 0:
        value, mean_TV, variance = _coupled(subject, state, drawn)
    else:
        value, mean_TV, variance = _tokenwise(subject, state, drawn)
    true_value, norm, length = float(true_T.detach().sum()), float(true_TV.norm()), float(mean_TV.norm())
    error = float((mean_TV - true_TV).norm())
    return Measurement(
        value_bias=abs(value - true_value) / max(abs(true_value), 1e-6),
        grad_bias=error / max(norm, 1e-6),
        grad_rel_mse=(variance + error**2) / max(norm**2, 1e-12),
        cosine=float((mean_TV * true_TV).sum()) / (norm * length) if norm * length > 0 else float("nan"),
        value=value,
        gradient_TV=mean_TV,
    )


def _tokenwise(subject: Subject, state: State, drawn: list[Space]) -> tuple[float, Tensor, float]:
    """Value, gradient and variance of a loss that gives a number a token.

    All outcomes are sequences of one batch. Where tokens may influence each other, every outcome has a batch of its
    own instead, with one more sequence that always stays at its first outcome; only the first is measured.
    """
    positions = len(drawn)
    longest = max(len(space.token_N) for space in drawn)
    rows = [torch.arange(longest).where(torch.arange(longest) < len(space.token_N), 0) for space in drawn]
    if subject.token_local:
        losses_T, gradients_TV = _evaluate(subject, batch_of(state, drawn, rows), longest * positions)
    else:
        found = []
        for row in range(longest):
            pick = [torch.stack([chosen[row], torch.zeros_like(chosen[row])]) for chosen in rows]
            found.append(_evaluate(subject, batch_of(state, drawn, pick), positions))
        losses_T, gradients_TV = torch.cat([pair[0] for pair in found]), torch.cat([pair[1] for pair in found])
    value, variance, means = 0.0, 0.0, []
    for position, space in enumerate(drawn):
        own = slice(position, positions * len(space.token_N), positions)
        value += float(space.mean(losses_T[own]))
        means.append(space.mean(gradients_TV[own]))
        variance += space.variance(gradients_TV[own])
    return value, torch.stack(means), variance


def _evaluate(subject: Subject, batch: AuditBatch, measured: int) -> tuple[Tensor, Tensor]:
    """Losses and logit gradients of the first ``measured`` tokens."""
    loss_T = subject.loss(batch)[:measured]
    (gradient_TV,) = torch.autograd.grad(loss_T.sum(), batch.logits_TV)
    return loss_T.detach(), gradient_TV[:measured]


def _coupled(subject: Subject, state: State, drawn: list[Space]) -> tuple[float, Tensor, float]:
    """Value, gradient and variance of a loss that gives one number a batch, from one call for each joint outcome.

    The positions are coupled by their quantiles: any coupling gives the expectation of a sum over tokens.
    """
    chances = [space.groups[0] for space in drawn]
    if max(len(chance) for chance in chances) > _MOST_CALLS:
        raise ConfigError(f"{subject.design} has too many outcomes for a scalar loss; return one number a token")
    edge_J = torch.cat([torch.zeros(1, dtype=torch.float64), *[chance.cumsum(0) for chance in chances]])
    edge_J = edge_J.clamp(max=1.0).sort().values
    chance_J, middle_J = edge_J.diff(), (edge_J[1:] + edge_J[:-1]) / 2
    rows = [torch.searchsorted(c.cumsum(0), middle_J, right=True).clamp(max=len(c) - 1) for c in chances]
    values, gradients = [], []
    for joint in range(len(chance_J)):
        batch = batch_of(state, drawn, [row[joint : joint + 1] for row in rows])
        loss = subject.loss(batch) * batch.step_tokens
        values.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, batch.logits_TV)[0])
    gradient_JTV = torch.stack(gradients)
    mean_TV = torch.tensordot(chance_J, gradient_JTV, 1)
    variance = torch.tensordot(chance_J, (gradient_JTV - mean_TV).square().sum((-1, -2)), 1)
    return float(torch.tensordot(chance_J, torch.stack(values), 1)), mean_TV, float(variance)
