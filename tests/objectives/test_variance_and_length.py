"""Which estimator errs least on a pinned pair, and which reductions are blind to length.

Shape suffixes: T tokens, V vocabulary.
"""

from itertools import product

import pytest
import torch

from asyncopd.audit import Measurement, measure
from asyncopd.audit.registered import divergence_subject
from asyncopd.audit.states import State
from asyncopd.objectives import ObjectiveConfig, token_scales


def pinned(design: str, name: str = "reverse_kl", centring: str = "none", size: int = 9) -> Measurement:
    """Exact bias and error on peaked distributions, stale proposal."""
    generator = torch.Generator().manual_seed(7)
    student_TV = 2.0 * torch.randn(2, size, generator=generator, dtype=torch.float64)
    teacher_TV = student_TV + 0.5 * torch.randn(2, size, generator=generator, dtype=torch.float64)
    drift_TV = 0.3 * torch.randn(2, size, generator=generator, dtype=torch.float64)
    state = State(student_TV=student_TV, teacher_TV=teacher_TV, behaviour_TV=student_TV + drift_TV)
    config = ObjectiveConfig(name=name, design=design, centring=centring)  # type: ignore[arg-type]
    return measure(divergence_subject(config), state)


def pinned_error(design: str, name: str = "reverse_kl", centring: str = "none", size: int = 9) -> float:
    """Relative squared gradient error."""
    return pinned(design, name, centring, size).grad_rel_mse


def test_drawing_without_replacement_beats_independent_draws() -> None:
    errors = [pinned_error(design) for design in ("multi_sample(4)", "gumbel(4)", "systematic(4)")]
    assert errors[0] > errors[1] > errors[2]
    assert errors[0] > 3 * errors[2]


def test_what_the_scorer_knows_and_centring_lower_the_error_and_together_most() -> None:
    plain, thinned = pinned_error("systematic(8)", size=100), pinned_error("two_phase(24,8)", size=100)
    centred = pinned_error("systematic(8)", centring="hajek", size=100)
    both = pinned_error("two_phase_centred(24,8)", centring="hajek", size=100)
    assert both < thinned < plain
    assert both < centred < plain


@pytest.mark.parametrize("design", ["systematic(8)", "systematic(16)", "two_phase_centred(24,8)"])
def test_the_bias_of_hajek_is_a_hundredth_of_its_squared_error_from_8_candidates_on(design: str) -> None:
    found = pinned(design, centring="hajek", size=100)
    assert 0.0 < found.grad_bias**2 < 0.01 * found.grad_rel_mse


def test_the_own_token_in_a_head_and_tail_design_is_poor() -> None:
    assert pinned_error("head_tail(3,1)") > pinned_error("systematic(4)")


def test_forward_kl_prefers_drawing_without_replacement_too() -> None:
    assert pinned_error("multi_sample(4)", "forward_kl") > 3 * pinned_error("systematic(4)", "forward_kl")


def length_bias(reduction: str) -> float:
    """Relative bias of the gradient of a step of two answers with own-token candidates, by enumeration.

    A policy over {stop, go} that answers with one or two tokens; the target weighs every visited state alike: the sum
    over sequences of the reverse KL at the states that it visits. Importance weights are 1 (fresh).
    """
    theta = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)  # logit of go at the two states
    log_q_TV = torch.tensor([[0.4, 0.6], [0.8, 0.2]], dtype=torch.float64).log()
    log_p_TV = torch.stack([torch.zeros(2, dtype=torch.float64), theta], 1).log_softmax(-1)
    kl_T = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)
    chance_go = log_p_TV[0, 1].exp().detach()
    (target,) = torch.autograd.grad(kl_T[0] + chance_go * kl_T[1], theta, retain_graph=True)
    answers = [(0,), (1, 0), (1, 1)]
    total = torch.zeros(2, dtype=torch.float64)
    mass = torch.zeros((), dtype=torch.float64)
    for pair in product(answers, repeat=2):
        logs = [log_p_TV[t, token] for answer in pair for t, token in enumerate(answer)]
        signal = [log_q_TV[t, token] for answer in pair for t, token in enumerate(answer)]
        chance = torch.stack(logs).sum().exp().detach()
        lengths_N = torch.tensor([len(answer) for answer in pair])
        scale_T = token_scales(
            reduction,
            sequence_T=torch.arange(2).repeat_interleave(lengths_N),
            lengths_N=lengths_N,
            step_tokens=int(lengths_N.sum()),
            step_sequences=2,
            fixed_length=2 if reduction == "fixed_length" else None,
        )
        log_T, log_q_T = torch.stack(logs), torch.stack(signal)
        loss = (-(log_T - log_T.detach()).exp() * (log_q_T - log_T).detach() * scale_T).sum()
        (found,) = torch.autograd.grad(loss, theta, retain_graph=True)
        total += chance * found
        mass += chance
    assert float(mass) == pytest.approx(1.0)
    scale = float((total * target).sum() / target.square().sum())  # a common factor is a learning rate, not a bias
    return float((total - scale * target).norm() / (scale * target).norm())


def test_only_a_fixed_length_is_free_of_length_bias_with_own_token_candidates() -> None:
    assert length_bias("fixed_length") < 1e-12
    assert length_bias("token_mean") > 0.02
    assert length_bias("sequence_mean") > 0.02
