"""Every design's weights make sparse sums unbiased, by enumeration of all that it can draw.

Shape suffixes: T positions, C candidates, V vocabulary, N outcomes.
"""

from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncopd.audit.enumeration import feed, inclusion, outcomes
from teacher_cache.designs import DESIGNS, draw_candidates, parse_design
from teacher_cache.errors import DesignError
from teacher_cache.noise import noise_for
from teacher_cache.record import Origin

UNBIASED = [
    "full",
    "gumbel(2)",
    "gumbel(3)",
    "head_tail(1,1)",
    "head_tail(2,1)",
    "head_tail(2,2)",
    "multi_sample(1)",
    "multi_sample(2)",
    "multi_sample(3)",
    "sampled",
    "systematic(1)",
    "systematic(2)",
    "systematic(3)",
    "systematic(4)",
    "two_phase(3,2)",
    "two_phase(4,1)",
    "two_phase(5,5)",
    "two_phase_centred(3,2)",
    "two_phase_centred(4,1)",
]


def logprobs(size: int, seed: int, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(size, generator=generator, dtype=torch.float64)).log_softmax(-1)


def expected_weight(spec: str, log_g_V: Tensor, log_q_V: Tensor, origin: Origin) -> Tensor:
    """``E[sum_i w_i 1{a_i = a}]`` for every token a."""
    space = outcomes(parse_design(spec), log_g_V, log_q_V, student=origin == "student")
    assert float(space.chance_N.sum()) == pytest.approx(1.0, abs=1e-10)
    weight_NC = space.log_w_NC.exp() * space.chance_N[:, None]
    total_V = torch.zeros_like(log_g_V)
    return total_V.index_add_(0, space.ids_NC.flatten(), weight_NC.flatten())


CASES = [
    (spec, size, origin)
    for spec in UNBIASED
    for size in (4, 5, 8)
    for origin in ("student", "teacher")
    if not (spec.startswith("two_phase") and origin == "teacher")  # its second phase needs a student's proposal
    if not (spec == "multi_sample(3)" and size == 8)  # 512 outcomes; smaller vocabularies show the same
]


@pytest.mark.parametrize(("spec", "size", "origin"), CASES)
def test_expected_weight_of_every_token_is_one(spec: str, size: int, origin: Origin) -> None:
    for seed in range(3):
        weight_V = expected_weight(spec, logprobs(size, seed), logprobs(size, seed + 50), origin)
        assert (weight_V - 1.0).abs().max() < 1e-9


@pytest.mark.parametrize("spec", ["top_k(2)", "top_k_tail(2)"])
def test_top_k_gives_weight_one_to_the_head_and_none_to_the_tail(spec: str) -> None:
    log_g_V = logprobs(6, 0)
    weight_V = expected_weight(spec, log_g_V, log_g_V, "student")
    assert weight_V[log_g_V.topk(2).indices].tolist() == [1.0, 1.0]
    assert float(weight_V.sum()) == 2.0
    assert not parse_design(spec).unbiased


def test_every_registered_design_is_enumerated_by_these_tests() -> None:
    covered = {spec.partition("(")[0] for spec in [*UNBIASED, "top_k(2)", "top_k_tail(2)"]}
    assert covered == set(DESIGNS)
    for name in DESIGNS:
        spec = next(spec for spec in [*UNBIASED, "top_k(2)", "top_k_tail(2)"] if spec.partition("(")[0] == name)
        assert parse_design(spec).unbiased == (spec in UNBIASED)


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.one_of(st.floats(-30, 30), st.just(-float("inf"))), min_size=2, max_size=9),
    budget=st.integers(1, 10),
    single=st.booleans(),
)
def test_systematic_is_unbiased_on_any_proposal_it_can_meet(logits: list[float], budget: int, single: bool) -> None:
    """Saturated heads, forbidden tokens, float32, budgets beyond the support; ``sum w*g`` is 1 for every offset."""
    if max(logits) == -float("inf"):
        logits = [0.0, *logits]
    log_g_V = torch.tensor(logits, dtype=torch.float64).log_softmax(-1)
    if single:
        log_g_V = log_g_V.float().double()
    pi_V = inclusion(log_g_V.exp(), budget)
    offset_N = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64)
    rows_NV = log_g_V.expand(len(offset_N), -1).to(torch.float32 if single else torch.float64)
    draw = parse_design(f"systematic({budget})").draw(rows_NV, feed(offset_N[:, None]), None)
    alive_NC = draw.log_w_TC > -torch.inf
    carried_N = (draw.log_w_TC.exp() * log_g_V.exp()[draw.ids_TC]).where(alive_NC, 0.0).sum(-1)
    assert (carried_N - 1.0).abs().max() < (1e-5 if single else 1e-9)
    chosen_NV = torch.zeros(rows_NV.shape, dtype=torch.float64).scatter_add_(1, draw.ids_TC, alive_NC.double())
    assert chosen_NV.max() <= 1.0
    assert (chosen_NV.mean(0) - pi_V).abs().max() < 0.003
    drawn_w_V = (-pi_V.log())[draw.ids_TC]
    assert (draw.log_w_TC - drawn_w_V)[alive_NC].abs().max() < (1e-4 if single else 1e-8)


def test_systematic_of_one_is_the_law_of_the_sampled_token() -> None:
    log_g_V = logprobs(6, 3)
    space = outcomes(parse_design("systematic(1)"), log_g_V, log_g_V, student=True)
    chance_V = torch.zeros(6, dtype=torch.float64).index_add_(0, space.ids_NC[:, 0], space.chance_N)
    assert torch.allclose(chance_V, log_g_V.exp(), atol=1e-12)
    assert torch.allclose(space.log_w_NC[:, 0], -log_g_V[space.ids_NC[:, 0]], atol=1e-12)


def test_gumbel_matches_its_closed_form_and_the_threshold_integral() -> None:
    """The formula of OBJECTIVES section 4, and the code itself on a 401-point grid of thresholds over [-12, 45]."""
    log_g_V, budget, size = logprobs(5, 1), 2, 5
    g_V = log_g_V.exp()
    grid_N = torch.linspace(-12, 45, 401, dtype=torch.float64)
    for token in range(size):
        closed, integrated = 0.0, 0.0
        for chosen in combinations(range(size), budget):
            if token not in chosen:
                continue
            others = [i for i in chosen if i != token]
            rest = 1.0 - float(g_V[list(chosen)].sum())
            for count in range(len(others) + 1):
                for removed in combinations(others, count):
                    closed += (-1) ** count * rest / (rest + float(g_V[list(removed)].sum()))
            outside = next(i for i in range(size) if i not in chosen)
            key_NV = grid_N[:, None] - torch.ones(size, dtype=torch.float64)
            key_NV[:, list(chosen)] += 2.0
            key_NV[:, outside] += 1.0
            uniform_NV = (-(log_g_V - key_NV).exp()).exp().clamp(1e-300, 1 - 2.0**-53)
            draw = parse_design("gumbel(2)").draw(log_g_V.expand(401, -1), feed(uniform_NV), None)
            weight_N = (draw.log_w_TC.exp() * (draw.ids_TC == token)).sum(-1)
            level_N = (-grid_N).exp()
            density_N = rest * level_N * (-rest * level_N).exp()
            above_N = (-torch.expm1(-g_V[list(chosen)] * level_N[:, None])).prod(-1)
            integrated += float((weight_N * density_N * above_N).sum() * (grid_N[1] - grid_N[0]))
        assert closed == pytest.approx(1.0, abs=1e-12)
        assert integrated == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("spec", ["gumbel(8)", "systematic(8)"])
def test_a_budget_beyond_the_support_becomes_full(spec: str) -> None:
    log_g_V = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64).log()
    noise = noise_for(0, [("a", 0), ("a", 1)], "candidates")
    draw = parse_design(spec).draw(log_g_V.expand(2, -1), noise, None)
    alive = draw.log_w_TC > -torch.inf
    for row in range(2):
        assert sorted(draw.ids_TC[row][alive[row]].tolist()) == [0, 1, 2]
    assert draw.log_w_TC[alive].abs().max() < 1e-12


@pytest.mark.parametrize("spec", ["multi_sample(3)", "sampled", "head_tail(2,1)"])
def test_the_rollouts_own_token_is_reused_where_the_student_proposes(spec: str) -> None:
    log_g_TV = logprobs(12, 0).expand(4, -1)
    own_T = torch.tensor([0, 3, 7, 11])
    noise = noise_for(0, [("a", t) for t in range(4)], "candidates")

    def drawn(origin: Origin) -> Tensor:
        design = parse_design(spec)
        return draw_candidates(
            design, log_g_TV=log_g_TV, noise=noise, sampled_T=own_T, origin=origin, temperature=1.0, version=0
        ).ids_TC

    assert parse_design(spec).reuses_sampled_token
    assert (drawn("student") == own_T[:, None]).any(-1).all()
    assert not (drawn("teacher") == own_T[:, None]).any(-1).all()


@pytest.mark.parametrize("spec", ["systematic(8)", "multi_sample(8)", "gumbel(8)", "head_tail(4,4)", "two_phase(16,8)"])
def test_a_draw_depends_on_seed_sample_and_position_and_on_nothing_else(spec: str) -> None:
    log_g_TV = torch.stack([logprobs(300, seed) for seed in range(6)])
    rows = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 7)]
    design = parse_design(spec)
    whole = design.draw(log_g_TV, noise_for(5, rows, "candidates"), None)
    for row in (0, 3, 5):
        alone = design.draw(log_g_TV[row : row + 1], noise_for(5, rows[row : row + 1], "candidates"), None)
        assert torch.equal(alone.ids_TC[0], whole.ids_TC[row])
        assert torch.equal(alone.log_w_TC[0], whole.log_w_TC[row])
    other = design.draw(log_g_TV, noise_for(6, rows, "candidates"), None)
    assert not torch.equal(other.ids_TC, whole.ids_TC)


@pytest.mark.parametrize("spec", ["systematic(16)", "systematic(64)", "multi_sample(64)", "head_tail(8,8)"])
def test_float32_at_the_size_of_a_real_vocabulary_draws_what_float64_says(spec: str) -> None:
    """Frequencies of the likeliest tokens over 400 positions, and the mass that weights carry."""
    generator = torch.Generator().manual_seed(0)
    log_g_V = (4 * torch.randn(49_152, generator=generator)).log_softmax(-1)
    rows = [("a", t) for t in range(400)]
    draw = parse_design(spec).draw(log_g_V.expand(400, -1), noise_for(0, rows, "candidates"), None)
    weight_TC = draw.log_w_TC.exp()
    g_TC = log_g_V.double().exp()[draw.ids_TC]
    head = log_g_V.topk(50).indices
    carried_T = (weight_TC * g_TC * torch.isin(draw.ids_TC, head)).sum(-1)
    truth = float(log_g_V.double().exp()[head].sum())
    assert abs(float(carried_T.mean()) - truth) < 4 * float(carried_T.std()) / 20 + 1e-4
    assert torch.isfinite(weight_TC).all()


@pytest.mark.parametrize("name", ["two_phase", "two_phase_centred"])
@pytest.mark.parametrize("budget", [3, 8])
def test_two_phase_weights_are_the_product_of_both_phases(budget: int, name: str) -> None:
    log_g_TV = torch.stack([logprobs(200, seed) for seed in range(5)])
    log_q_TV = torch.stack([logprobs(200, seed + 9) for seed in range(5)])
    noise = noise_for(1, [("a", t) for t in range(5)], "candidates")
    design = parse_design(f"{name}(20,{budget})")
    first = draw_candidates(
        design, log_g_TV=log_g_TV, noise=noise, sampled_T=None, origin="student", temperature=1.0, version=3
    )
    assert first.ids_TC.shape == (5, 20)
    assert first.log_g_TC is not None
    ids_TC = first.ids_TC.long()
    draw, log_q_TK = design.thin(  # type: ignore[attr-defined]
        ids_TC=first.ids_TC,
        log_w_TC=first.log_w_TC,
        log_g_TC=first.log_g_TC,
        log_q_TC=log_q_TV.gather(1, ids_TC),
        noise=noise_for(1, [("a", t) for t in range(5)], "thin"),
    )
    assert draw.ids_TC.shape == (5, budget)
    assert torch.equal(log_q_TK, log_q_TV.gather(1, draw.ids_TC))
    for row, column in product(range(5), range(budget)):
        origin = (ids_TC[row] == draw.ids_TC[row, column]).nonzero()
        assert len(origin) == 1
        assert draw.log_w_TC[row, column] >= first.log_w_TC[row, origin[0, 0]] - 1e-6


@pytest.mark.parametrize("name", ["two_phase", "two_phase_centred"])
def test_two_phase_masks_a_position_with_a_missing_score_even_if_it_would_not_keep_it(name: str) -> None:
    log_g_TV = torch.stack([logprobs(50, seed) for seed in range(2)])
    noise = noise_for(1, [("a", 0), ("a", 1)], "candidates")
    design = parse_design(f"{name}(10,2)")
    first = draw_candidates(
        design, log_g_TV=log_g_TV, noise=noise, sampled_T=None, origin="student", temperature=1.0, version=3
    )
    scores_TC = log_g_TV.gather(1, first.ids_TC.long()).float()
    for column in range(10):
        broken_TC = scores_TC.clone()
        broken_TC[0, column] = torch.nan
        _, log_q_TK = design.thin(  # type: ignore[attr-defined]
            ids_TC=first.ids_TC,
            log_w_TC=first.log_w_TC,
            log_g_TC=first.log_g_TC,
            log_q_TC=broken_TC,
            noise=noise,
        )
        assert log_q_TK[0].isnan().all()
        assert log_q_TK[1].isfinite().all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sistematic(16)", "did you mean systematic(budget)"),
        ("systematic", "write systematic(budget)"),
        ("systematic(x)", "write systematic(budget)"),
        ("head_tail(8)", "write head_tail(head, draws)"),
        ("full(3)", "write full"),
        ("gumbel(1)", "infinite variance"),
        ("systematic(0)", "at least 1"),
        ("two_phase(8,16)", "two_phase(128, 16)"),
        ("", "no support design"),
    ],
)
def test_a_bad_spec_is_refused_with_the_valid_form(spec: str, message: str) -> None:
    with pytest.raises(DesignError) as error:
        parse_design(spec)
    assert message in str(error.value)


@pytest.mark.parametrize("spec", [*UNBIASED, "top_k(4)", "top_k_tail(4)"])
def test_a_spec_reads_back_as_the_same_design(spec: str) -> None:
    assert parse_design(parse_design(spec).spec) == parse_design(spec)
    assert parse_design(f"  {spec.replace(',', ' , ')} ") == parse_design(spec)


@pytest.mark.parametrize("spec", ["top_k(9)", "top_k_tail(9)", "head_tail(9,1)"])
def test_a_head_larger_than_the_vocabulary_is_refused(spec: str) -> None:
    with pytest.raises(DesignError, match="8 tokens in the vocabulary"):
        parse_design(spec).draw(logprobs(8, 0)[None], noise_for(0, [("a", 0)], "candidates"), torch.tensor([1]))


def test_candidates_travel_in_four_bytes_an_entry() -> None:
    noise = noise_for(0, [("a", 0)], "candidates")
    found = draw_candidates(
        parse_design("systematic(4)"),
        log_g_TV=logprobs(9, 0)[None],
        noise=noise,
        sampled_T=torch.tensor([0]),
        origin="student",
        temperature=0.7,
        version=5,
    )
    assert (found.ids_TC.dtype, found.log_w_TC.dtype) == (torch.int32, torch.float32)
    assert (found.design, found.temperature, found.version, found.log_g_TC) == ("systematic(4)", 0.7, 5, None)
    assert np.dtype("int32").itemsize == 4
