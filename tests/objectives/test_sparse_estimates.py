"""Sparse losses estimate their dense divergence: by enumeration, in order of bias, and where models meet or part."""

import pytest
import torch

from asyncopd.audit import TARGETS, measure
from asyncopd.audit.registered import divergence_subject, surrogate_subject
from asyncopd.audit.states import random_state
from asyncopd.audit.targets import Target, jsd, mixed, skew_forward_kl, skew_reverse_kl
from asyncopd.objectives import DIVERGENCES, SURROGATES, ObjectiveConfig, build_objective
from tests.objectives.build_tokens import gradient, world

DESIGNS = [
    "full",
    "gumbel(2)",
    "head_tail(2,2)",
    "multi_sample(2)",
    "sampled",
    "systematic(3)",
    "two_phase(3,2)",
    "two_phase_centred(3,2)",
]


def configured(name: str, design: str, **fields: object) -> ObjectiveConfig:
    centring = "none" if name in ("reverse_kl", "mixed") else "auto"
    if design.startswith("two_phase"):
        fields["origin"] = "student"
    return ObjectiveConfig(name=name, design=design, **{"centring": centring, **fields})  # type: ignore[arg-type]


PAIRS = [
    (name, design) for name in DIVERGENCES for design in DESIGNS if not (name == "mixed" and "two_phase" in design)
]


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize(("name", "design"), PAIRS)
def test_expected_value_and_gradient_are_the_dense_ones(name: str, design: str, stale: bool) -> None:
    subject = divergence_subject(configured(name, design))
    for size in (4, 6, 8) if not design.startswith("gumbel") else (5,):
        found = measure(subject, random_state(size, stale=stale, seed=1))
        assert found.value_bias < 1e-9
        assert found.grad_bias < 1e-9


@pytest.mark.parametrize(
    ("fields", "target"),
    [
        ({"name": "jsd", "beta": 0.2}, jsd(0.2)),
        ({"name": "jsd", "beta": 0.9, "scaled": True}, jsd(0.9, scaled=True)),
        ({"name": "skew_forward_kl", "alpha": 0.4}, skew_forward_kl(0.4)),
        ({"name": "skew_reverse_kl", "alpha": 0.4}, skew_reverse_kl(0.4)),
        ({"name": "mixed", "mix": 0.3, "centring": "none"}, mixed(0.3)),
    ],
)
@pytest.mark.parametrize("origin", ["student", "teacher"])
def test_parameters_move_the_divergence_that_is_estimated(
    fields: dict[str, object], target: Target, origin: str
) -> None:
    if fields["name"] == "mixed":
        origin = "auto"
    config = ObjectiveConfig(design="systematic(3)", origin=origin, **fields)  # type: ignore[arg-type]
    objective = build_objective(config)
    subject = divergence_subject(config)
    state = random_state(6, stale=True)
    wrong = measure(subject, state)
    assert wrong.grad_bias > 1e-3  # against the default parameter
    right = measure(type(subject)(**{**{f: getattr(subject, f) for f in subject.__slots__}, "target": target}), state)
    assert (right.value_bias < 1e-9, right.grad_bias < 1e-9) == (True, True)
    assert objective.token_local


@pytest.mark.parametrize(("beta", "limit"), [(1e-5, "forward_kl"), (1 - 1e-5, "reverse_kl")])
def test_scaled_jsd_ends_at_the_two_kls(beta: float, limit: str) -> None:
    state = random_state(6, stale=False)
    found = measure(divergence_subject(ObjectiveConfig(name="jsd", design="full", beta=beta, scaled=True)), state)
    end = measure(divergence_subject(configured(limit, "full")), state)
    assert found.value == pytest.approx(end.value, rel=1e-3)
    assert torch.allclose(found.gradient_TV, end.gradient_TV, atol=1e-3)


def test_policy_gradient_and_bregman_multi_sample_have_one_gradient() -> None:
    """``pg_recompute`` on each of 8 draws, averaged, against ``reverse_kl`` on the 8 together: equal to 1e-12."""
    at = world(tokens=16, vocabulary=50)
    config = ObjectiveConfig(design="multi_sample(8)", centring="none", form="bregman")
    objective = build_objective(config)
    tokens = at.tokens(objective)
    sparse = gradient(objective.token_losses(tokens)[0].sum(), at)

    surrogate = build_objective(ObjectiveConfig(name="pg_recompute"))
    noise_tokens = at.tokens(objective)
    candidates = noise_tokens.student
    assert candidates is not None
    total = torch.zeros((), dtype=torch.float64)
    for draw in range(8):
        one = type(tokens)(
            log_p_T=candidates.log_p_TC[:, draw],
            log_q_T=candidates.log_q_TC[:, draw],
            log_b_T=-candidates.log_w_TC[:, draw] - torch.log(torch.tensor(8.0, dtype=torch.float64)),
            sequence_T=tokens.sequence_T,
            staleness_T=tokens.staleness_T,
        )
        total = total + surrogate.token_losses(one)[0].sum() / 8
    assert (gradient(total, at) - sparse).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl"])
@pytest.mark.parametrize("origin", ["student", "teacher"])
def test_bregman_top_k_is_below_top_k_tail_is_below_dense(name: str, origin: str) -> None:
    at = world(tokens=60, vocabulary=30)
    losses = []
    for design in ("top_k(5)", "top_k_tail(5)", "full"):
        objective = build_objective(ObjectiveConfig(name=name, design=design, origin=origin))  # type: ignore[arg-type]
        losses.append(objective.token_losses(at.tokens(objective))[0])
    assert (losses[0] <= losses[1] + 1e-12).all()
    assert (losses[1] <= losses[2] + 1e-12).all()
    assert (losses[0] < losses[2] - 1e-3).any()
    assert (losses[0] >= 0).all()


def test_the_bias_of_top_k_is_pinned() -> None:
    """The dropped tail of two positions, worked out from the definition."""
    state = random_state(6, stale=False)
    for form, sign in (("bregman", 1.0), ("plain", 0.0)):
        config = ObjectiveConfig(design="top_k(2)", form=form, centring="none")  # type: ignore[arg-type]
        found = measure(divergence_subject(config), state)
        log_p_TV, log_q_TV = state.student_TV.log_softmax(-1), state.teacher_TV.log_softmax(-1)
        top = log_p_TV.topk(2).indices
        p, q = log_p_TV.exp().gather(1, top), log_q_TV.exp().gather(1, top)
        assert found.value == pytest.approx(float((p * (p / q).log() + sign * (q - p)).sum()), rel=1e-12)
        assert found.value_bias > 0.05
        assert found.grad_bias > 0.05


@pytest.mark.parametrize("name", [*DIVERGENCES, *SURROGATES])
def test_identical_models_give_zero_at_every_position(name: str) -> None:
    """Bregman terms vanish one by one, so value and gradient are zero for every draw, not only on average."""
    at = world(stale=False)
    at = type(at)(
        logits_TV=at.logits_TV,
        log_q_TV=at.log_p_TV.detach(),
        log_b_TV=at.log_b_TV,
        token_T=at.token_T,
        sequence_T=at.sequence_T,
    )
    objective = build_objective(ObjectiveConfig(name=name))
    tokens = at.tokens(objective)
    context = objective.step_context(tokens) if objective.needs_step_pass else None
    loss_T, _ = objective.token_losses(tokens, context)
    if name not in ("pg_uncorrected",):
        assert loss_T.abs().max() < 1e-12
    if name in SURROGATES or name in ("reverse_kl", "total_variation", "skew_reverse_kl"):
        assert gradient(loss_T.sum(), at).abs().max() < 1e-12


BOUNDABLE = ["forward_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation"]


@pytest.mark.parametrize("name", [*BOUNDABLE, "reverse_kl"])
def test_every_bregman_term_is_nonnegative(name: str) -> None:
    divergence = DIVERGENCES[name]()
    log_q = torch.full((400,), -3.0, dtype=torch.float64)
    log_p = log_q + torch.linspace(-20.0, 2.9, 400, dtype=torch.float64)
    assert (divergence.phi(log_p, log_q, divergence.slope_at_one) >= -1e-15).all()


@pytest.mark.parametrize("name", BOUNDABLE)
def test_the_slope_at_infinity_bounds_teacher_drawn_terms(name: str) -> None:
    """At ``p/q = e^20``, ``phi/q`` is at most the log of the ratio; with the other linear term it is like the ratio."""
    divergence = DIVERGENCES[name]()
    log_p, log_q = torch.tensor(-1.0, dtype=torch.float64), torch.tensor(-21.0, dtype=torch.float64)
    assert abs(float(divergence.phi(log_p, log_q, divergence.slope_at_infinity) / log_q.exp())) <= 20.0 + 1e-9
    assert abs(float(divergence.phi(log_p, log_q, divergence.slope_at_one) / log_q.exp())) > 1e7


def test_every_target_is_named_after_its_objective() -> None:
    assert set(TARGETS) - {"reverse_kl_minus_drift"} == set(DIVERGENCES)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_fresh_surrogate_has_the_gradient_of_its_target(name: str) -> None:
    found = measure(surrogate_subject(ObjectiveConfig(name=name)), random_state(6, stale=False))
    assert found.grad_bias < 1e-9
