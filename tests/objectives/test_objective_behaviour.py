"""Surrogates, centring, reductions, masks and metrics do what their formulas say.

Shape suffixes: T tokens, C candidates, N sequences.
"""

from dataclasses import replace

import pytest
import torch

from asyncopd.errors import ConfigError
from asyncopd.objectives import (
    DIVERGENCES,
    METRICS,
    SURROGATES,
    Candidates,
    ObjectiveConfig,
    StepContext,
    build_objective,
    by_staleness,
    token_scales,
    valid_positions,
)
from teacher_cache.record import CandidateSet, TeacherRecord
from tests.objectives.build_tokens import World, gradient, world


def surrogate_losses(at: World, name: str, **fields: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    objective = build_objective(ObjectiveConfig(name=name, **fields))  # type: ignore[arg-type]
    tokens = at.tokens(objective)
    return objective.token_losses(tokens, objective.step_context(tokens) if objective.needs_step_pass else None)


def test_ppo_clip_takes_the_gradient_away_exactly_outside_the_bounds() -> None:
    at = world(tokens=200)
    loss_T, metrics = surrogate_losses(at, "ppo_clip", clip_low=0.1, clip_high=0.3)
    tokens = at.tokens(build_objective(ObjectiveConfig(name="ppo_clip")))
    r_T, a_T = (tokens.log_p_T - tokens.log_b_T).exp().detach(), (tokens.log_q_T - tokens.log_p_T).detach()
    expected_T = -torch.minimum(r_T * a_T, r_T.clamp(0.9, 1.3) * a_T)
    assert torch.allclose(loss_T, expected_T)
    outside_T = ((r_T > 1.3) & (a_T > 0)) | ((r_T < 0.9) & (a_T < 0))
    assert torch.equal(metrics["clipped"] > 0, outside_T)
    silent_T = gradient(loss_T.sum(), at).norm(dim=-1) < 1e-15
    assert torch.equal(silent_T, outside_T)
    assert 0.1 < float(outside_T.double().mean()) < 0.9


def test_dual_clip_bounds_the_loss_where_the_signal_is_negative() -> None:
    at = world(tokens=400, spread=2.5)
    free_T, _ = surrogate_losses(at, "ppo_clip")
    loss_T, metrics = surrogate_losses(at, "ppo_clip", dual=1.5)
    tokens = at.tokens(build_objective(ObjectiveConfig(name="ppo_clip")))
    a_T = (tokens.log_q_T - tokens.log_p_T).detach()
    ceiling_T = torch.where(a_T < 0, -1.5 * a_T, torch.inf)
    assert torch.allclose(loss_T, free_T.minimum(ceiling_T))
    bitten_T = free_T > ceiling_T
    assert (metrics["clipped"][bitten_T] == 1).all()
    assert gradient(loss_T[bitten_T].sum(), at).abs().max() < 1e-15
    assert bitten_T.any()


def test_decoupled_clips_around_the_start_of_the_step_and_drops_beyond_the_cap() -> None:
    at = world(tokens=200)
    objective = build_objective(ObjectiveConfig(name="decoupled", cap=1.2, clip_low=0.1, clip_high=0.1))
    tokens = at.tokens(objective)
    start = objective.step_context(tokens)
    shift_T = torch.linspace(-0.3, 0.3, 200, dtype=torch.float64)
    loss_T, metrics = objective.token_losses(tokens, StepContext(value_T=start.value_T - shift_T))
    a_T = (tokens.log_q_T - tokens.log_p_T).detach()
    behaviour_T = (start.value_T - shift_T - tokens.log_b_T).exp()
    inner_T = -torch.minimum(shift_T.exp() * a_T, shift_T.exp().clamp(0.9, 1.1) * a_T)
    assert torch.allclose(loss_T, (behaviour_T * inner_T).where(behaviour_T <= 1.2, 0.0))
    assert (metrics["clipped"][behaviour_T > 1.2] == 1).all()


def test_second_moment_masks_the_largest_ratios_until_the_mean_fits() -> None:
    at = world(tokens=200)
    objective = build_objective(ObjectiveConfig(name="second_moment", budget=0.05))
    tokens = at.tokens(objective)
    kept_T = objective.step_context(tokens).value_T > 0
    square_T = (tokens.log_p_T - tokens.log_b_T).detach().square()
    assert float(square_T[kept_T].mean()) <= 0.05
    dropped = square_T[~kept_T].min()
    assert dropped >= square_T[kept_T].max()
    assert float(torch.cat([square_T[kept_T], dropped[None]]).mean()) > 0.05  # one more would not fit


def test_icepop_keeps_ratios_within_bounds() -> None:
    at = world(tokens=200)
    loss_T, metrics = surrogate_losses(at, "icepop", ratio_low=0.8, ratio_high=1.25)
    free_T, _ = surrogate_losses(at, "pg_recompute")
    tokens = at.tokens(build_objective(ObjectiveConfig(name="icepop")))
    r_T = (tokens.log_p_T - tokens.log_b_T).exp()
    inside_T = (r_T >= 0.8) & (r_T <= 1.25)
    assert torch.equal(loss_T, free_T.where(inside_T, torch.zeros_like(free_T)))
    assert torch.equal(metrics["clipped"] == 0, inside_T)


def test_sequence_ratio_is_the_geometric_mean_with_the_tokens_own_gradient() -> None:
    at = world(tokens=12)
    loss_T, metrics = surrogate_losses(at, "sequence_ratio")
    tokens = at.tokens(build_objective(ObjectiveConfig(name="sequence_ratio")))
    a_T = (tokens.log_q_T - tokens.log_p_T).detach()
    for sequence in range(3):
        own_T = tokens.sequence_T == sequence
        s = (tokens.log_p_T - tokens.log_b_T)[own_T].mean().exp()
        assert torch.allclose(metrics["sequence_ratio"][own_T], s.detach().expand(int(own_T.sum())))
        assert torch.allclose(loss_T[own_T], (-s * a_T[own_T]).detach())
    expected = gradient((-metrics["sequence_ratio"] * a_T * tokens.log_p_T).sum(), at)
    assert torch.allclose(gradient(loss_T.sum(), at), expected)


def test_cached_and_recomputed_signals_differ_by_the_drift_of_the_policy() -> None:
    at = world()
    cached_T, _ = surrogate_losses(at, "icepop", signal="cached", ratio_low=0.0, ratio_high=1e9)
    fresh_T, _ = surrogate_losses(at, "icepop", signal="recompute", ratio_low=0.0, ratio_high=1e9)
    tokens = at.tokens(build_objective(ObjectiveConfig(name="icepop")))
    drift_T = tokens.log_p_T - tokens.log_b_T
    assert torch.allclose(cached_T - fresh_T, -drift_T.exp() * drift_T)


def test_hajek_leaves_only_what_is_above_or_below_the_mean() -> None:
    """The centred gradient with respect to log p is ``w p (log(p/q) - B)``, which sums to zero over candidates."""
    at = world()
    objective = build_objective(ObjectiveConfig(design="systematic(8)"))
    tokens = at.tokens(objective)
    assert tokens.student is not None
    leaf = tokens.student.log_p_TC.detach().requires_grad_()
    loss_T, _ = objective.token_losses(replace(tokens, student=replace(tokens.student, log_p_TC=leaf)))
    (k_TC,) = torch.autograd.grad(loss_T.sum(), leaf)
    assert k_TC.sum(-1).abs().max() < 1e-12
    assert k_TC.abs().max() > 0.01


def test_mean_centring_uses_the_other_sequences_only() -> None:
    at = world()
    objective = build_objective(ObjectiveConfig(centring="mean"))
    tokens = at.tokens(objective)
    before_T = objective.step_context(tokens).value_T
    assert tokens.student is not None
    changed_TC = tokens.student.log_q_TC.clone()
    changed_TC[tokens.sequence_T == 1] += 0.7
    after_T = objective.step_context(replace(tokens, student=replace(tokens.student, log_q_TC=changed_TC))).value_T
    own_T = tokens.sequence_T == 1
    assert torch.equal(before_T[own_T], after_T[own_T])
    assert (before_T[~own_T] != after_T[~own_T]).all()
    plain = build_objective(ObjectiveConfig(centring="none")).token_losses(tokens)[1]["divergence"]
    assert torch.allclose(before_T[own_T], plain[~own_T].mean().expand(int(own_T.sum())))


@pytest.mark.parametrize("fields", [{"centring": "mean"}, *[{"name": n} for n in SURROGATES]], ids=str)
def test_a_step_pass_cannot_be_left_out_nor_asked_for_in_vain(fields: dict[str, str]) -> None:
    objective = build_objective(ObjectiveConfig(**fields))  # type: ignore[arg-type]
    tokens = world().tokens(objective)
    assert objective.token_local != objective.needs_step_pass
    if objective.needs_step_pass:
        with pytest.raises(ConfigError, match="step_context"):
            objective.token_losses(tokens)
        context = objective.step_context(tokens)
        whole_T, _ = objective.token_losses(tokens, context)
        assert not context.value_T.requires_grad
        pieces = [torch.arange(0, 5), torch.arange(5, 12)]
        assert [len(context.slice(piece).value_T) for piece in pieces] == [5, 7]
        assert whole_T.requires_grad
    else:
        with pytest.raises(ConfigError, match="no step pass"):
            objective.step_context(tokens)


def test_truncation_caps_the_importance_ratio_and_reports_it() -> None:
    at = world(tokens=100)
    free = build_objective(ObjectiveConfig(design="multi_sample(8)", centring="none"))
    capped = build_objective(ObjectiveConfig(design="multi_sample(8)", centring="none", truncate=1.3))
    tokens = at.tokens(free)
    assert tokens.student is not None
    ratio_TC = 8 * (tokens.student.log_w_TC + tokens.student.log_p_TC.detach()).exp()
    shrunk_TC = tokens.student.log_w_TC + (1.3 / ratio_TC).clamp(max=1.0).log()
    expected_T, _ = free.token_losses(replace(tokens, student=replace(tokens.student, log_w_TC=shrunk_TC)))
    loss_T, metrics = capped.token_losses(tokens)
    assert torch.allclose(loss_T, expected_T)
    assert torch.allclose(metrics["truncated"], (ratio_TC > 1.3).double().mean(-1))
    assert 0.02 < float(metrics["truncated"].mean()) < 0.98


def test_temperature_squared_multiplies_the_loss() -> None:
    at = world()
    plain = build_objective(ObjectiveConfig(temperature=0.5))
    scaled = build_objective(ObjectiveConfig(temperature=0.5, temperature_squared=True))
    tokens = at.tokens(plain)
    assert torch.allclose(scaled.token_losses(tokens)[0], 0.25 * plain.token_losses(tokens)[0])


@pytest.mark.parametrize("name", [*DIVERGENCES, *SURROGATES])
def test_an_empty_slot_and_its_garbage_reach_neither_loss_nor_gradient_nor_metrics(name: str) -> None:
    at = world()
    objective = build_objective(ObjectiveConfig(name=name))
    tokens = at.tokens(objective)

    def dirty(found: Candidates | None) -> Candidates | None:
        if found is None:
            return None
        bad = torch.full((12, 2), torch.nan, dtype=torch.float64)
        return Candidates(
            log_p_TC=torch.cat([found.log_p_TC, bad.nan_to_num(nan=-torch.inf)], 1),
            log_q_TC=torch.cat([found.log_q_TC, bad], 1),
            log_w_TC=torch.cat([found.log_w_TC, bad.nan_to_num(nan=-torch.inf)], 1),
        )

    padded = replace(tokens, student=dirty(tokens.student), teacher=dirty(tokens.teacher))
    context = objective.step_context(tokens) if objective.needs_step_pass else None
    loss_T, metrics = objective.token_losses(tokens, context)
    found_T, found = objective.token_losses(padded, context)
    assert torch.allclose(found_T, loss_T)
    assert torch.allclose(gradient(found_T.sum(), at), gradient(loss_T.sum(), at))
    for key, value_T in metrics.items():
        assert torch.allclose(found[key], value_T), key
        assert key.rpartition("/")[2] in METRICS
        assert not value_T.requires_grad


def test_tokens_that_nobody_can_emit_give_no_nan() -> None:
    at = world(vocabulary=10)
    forbidden = torch.zeros(10, dtype=torch.float64)
    forbidden[3] = -torch.inf
    at = replace(
        at,
        logits_TV=(at.logits_TV.detach() + forbidden).requires_grad_(),
        log_q_TV=(at.log_q_TV + forbidden).log_softmax(-1),
        log_b_TV=(at.log_b_TV + forbidden).log_softmax(-1),
        token_T=at.token_T.where(at.token_T != 3, 4),
    )
    for name in DIVERGENCES:
        objective = build_objective(ObjectiveConfig(name=name, design="full"))
        tokens = at.tokens(objective)
        assert tokens.teacher is not None
        open_weights = replace(tokens.teacher, log_w_TC=torch.zeros_like(tokens.teacher.log_w_TC))
        loss_T, _ = objective.token_losses(replace(tokens, teacher=open_weights))
        assert loss_T.isfinite().all()
        assert gradient(loss_T.sum(), at).isfinite().all()


@pytest.mark.parametrize("design", ["multi_sample(16)", "systematic(16)", "head_tail(8,8)"])
def test_covered_mass_counts_each_token_once(design: str) -> None:
    at = world(tokens=30, vocabulary=12)
    objective = build_objective(ObjectiveConfig(design=design))
    tokens = at.tokens(objective)
    _, metrics = objective.token_losses(tokens)
    assert tokens.student is not None
    for row in range(30):
        alive = tokens.student.log_w_TC[row] > -torch.inf
        distinct = torch.unique(tokens.student.log_p_TC[row][alive].detach())
        assert float(metrics["student_mass"][row]) == pytest.approx(float(distinct.exp().sum()))
    assert (metrics["ess"] >= 1 - 1e-9).all()
    assert (metrics["ess"] <= 16 + 1e-9).all()


def test_entropies_are_exact_on_the_full_vocabulary() -> None:
    at = world()
    _, metrics = (o := build_objective(ObjectiveConfig(design="full"))).token_losses(at.tokens(o))
    p_TV = at.log_p_TV.detach()
    assert torch.allclose(metrics["student_entropy"], -(p_TV.exp() * p_TV).sum(-1))
    assert torch.allclose(metrics["teacher_entropy"], -(at.log_q_TV.exp() * at.log_q_TV).sum(-1))
    assert torch.equal(metrics["top_agreement"] > 0, p_TV.argmax(-1) == at.log_q_TV.argmax(-1))


def test_metrics_are_averaged_within_staleness_buckets() -> None:
    value_T = torch.arange(7.0)
    staleness_T = torch.tensor([0, 1, 2, 3, 4, 8, 40])
    means = by_staleness({"divergence": value_T, "ess": value_T}, staleness_T)
    assert {k.rpartition("_")[2]: v for k, v in means.items() if k.startswith("ess/")} == {
        "0": 0.0,
        "1": 1.0,
        "2": 2.0,
        "3-4": 3.5,
        "5-8": 5.0,
        "9+": 6.0,
    }
    assert means["tokens/staleness_3-4"] == 2.0
    assert means["divergence_se/staleness_3-4"] == pytest.approx(0.5)
    assert "divergence_se/staleness_0" not in means


SEQUENCE_T = torch.tensor([0, 0, 0, 1, 2, 2])
LENGTHS_N = torch.tensor([3, 1, 2])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [1 / 6] * 6),
        ("sequence_mean", [1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 6, 1 / 6]),
        ("fixed_length", [1 / 30] * 6),
    ],
)
def test_scales_do_not_depend_on_how_the_step_is_split(reduction: str, expected: list[float]) -> None:
    fixed = {"fixed_length": 10} if reduction == "fixed_length" else {}
    pieces = [
        token_scales(reduction, sequence_T=piece, lengths_N=LENGTHS_N, step_tokens=6, step_sequences=3, **fixed)
        for piece in (SEQUENCE_T, SEQUENCE_T[:2], SEQUENCE_T[2:])
    ]
    assert torch.allclose(pieces[0], torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(pieces[0], torch.cat(pieces[1:]))


def test_an_empty_step_has_no_scale_to_divide_by_zero() -> None:
    empty_T = torch.zeros(0, dtype=torch.int64)
    found_T = token_scales("token_mean", sequence_T=empty_T, lengths_N=empty_T, step_tokens=0, step_sequences=0)
    assert found_T.shape == (0,)


def test_one_bad_score_or_weight_masks_its_whole_position() -> None:
    log_q_TC, log_w_TC = torch.full((6, 3), -1.0), torch.zeros(6, 3)
    log_q_TC[1, 2], log_q_TC[2, 0], log_w_TC[3, 1] = torch.nan, -torch.inf, torch.inf
    log_q_TC[4, 0], log_w_TC[4, 0] = torch.nan, -torch.inf  # an empty slot may hold anything
    own_T = torch.full((6,), -1.0)
    own_T[5] = torch.nan
    drawn = CandidateSet(
        origin="student",
        design="systematic(3)",
        temperature=1.0,
        version=0,
        ids_TC=torch.zeros(6, 3, dtype=torch.int32),
        log_w_TC=log_w_TC,
        log_q_TC=log_q_TC,
    )
    record = TeacherRecord(temperature=1.0, teacher="t", log_q_T=own_T, entropy_T=own_T, sets=(drawn,))
    assert valid_positions(record, {"student"}).tolist() == [True, False, False, False, True, True]
    assert valid_positions(record, set()).tolist() == [True] * 5 + [False]
