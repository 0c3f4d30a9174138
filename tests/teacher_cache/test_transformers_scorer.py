"""Teacher records against a naive float64 log-softmax of the same model's fp32 logits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, PreTrainedModel
from transformers.models.gemma2 import Gemma2ForCausalLM
from transformers.models.granite import GraniteForCausalLM

from teacher_cache.causal_scorer import in_batches
from teacher_cache.designs import draw_candidates, parse_design
from teacher_cache.designs.two_phase import TwoPhase
from teacher_cache.errors import DesignError, ScoringError
from teacher_cache.noise import noise_for
from teacher_cache.record import CandidateSet, TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.transformers_scorer import TransformersScorer
from tests.conftest import EOS, VOCABULARY

LENGTHS = [(3, 5), (1, 1), (40, 2), (2, 0), (7, 40), (1, 17), (12, 12)]


def request(prompt: int, response: int, seed: int = 0, **settings: object) -> ScoreRequest:
    generator = torch.Generator().manual_seed(1000 * prompt + response + seed)
    ids = torch.randint(0, VOCABULARY, (prompt + response,), generator=generator)
    return ScoreRequest(
        uid=f"{prompt}-{response}-{seed}",
        prompt_ids=tuple(ids[:prompt].tolist()),
        response_ids_T=ids[prompt:].int(),
        run_seed=11,
        **settings,
    )


def scorer(model: Path | PreTrainedModel, temperature: float = 1.0, batch_tokens: int = 4096) -> TransformersScorer:
    return TransformersScorer(
        model, vocabulary=VOCABULARY, temperature=temperature, batch_tokens=batch_tokens, dtype=torch.float32
    )


def records(scoring: TransformersScorer, requests: Sequence[ScoreRequest]) -> list[TeacherRecord]:
    results = scoring.score(requests)
    assert all(isinstance(result, TeacherRecord) for result in results), results
    return [result for result in results if isinstance(result, TeacherRecord)]


def naive(model: PreTrainedModel, request: ScoreRequest, temperature: float) -> torch.Tensor:
    """Float64 logprobs [T, V]: one forward a position over what precedes it, nothing batched, nothing shifted."""
    rows = []
    for t in range(len(request.response_ids_T)):
        context = torch.tensor([[*request.prompt_ids, *request.response_ids_T[:t].tolist()]])
        with torch.no_grad():
            logits = model(context).logits[0, -1, :VOCABULARY]
        rows.append(torch.log_softmax(logits.double() / temperature, dim=-1))
    return torch.stack(rows) if rows else torch.empty(0, VOCABULARY).double()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_every_logprob_is_the_teachers_own_at_that_position_and_temperature(
    tiny_model_dir: Path, temperature: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    requests = [request(*lengths, draw="systematic(8)") for lengths in LENGTHS]
    for asked, record in zip(requests, records(scorer(model, temperature), requests), strict=True):
        log_q = naive(model, asked, temperature)
        assert_close(record.log_q_T, log_q.gather(1, asked.response_ids_T.long()[:, None])[:, 0])
        assert_close(record.entropy_T, -(log_q.exp() * log_q).sum(-1))
        drawn = record.of_origin("teacher")
        assert drawn.log_q_TC is not None
        assert_close(drawn.log_q_TC, log_q.gather(1, drawn.ids_TC.long()))


def test_batch_composition_and_budget_change_no_more_than_float32_rounds(tiny_model_dir: Path) -> None:
    requests = [request(*lengths, seed=seed, draw="systematic(4)") for lengths in LENGTHS for seed in range(3)]
    together = records(scorer(tiny_model_dir), requests)
    for budget in (1, 60):
        backwards = records(scorer(tiny_model_dir, batch_tokens=budget), requests[::-1])[::-1]
        for one, other in zip(together, backwards, strict=True):
            assert_close(one.log_q_T, other.log_q_T.double())
            assert_close(one.entropy_T, other.entropy_T.double())
            assert one.of_origin("teacher").ids_TC.tolist() == other.of_origin("teacher").ids_TC.tolist()


def test_batch_composition_changes_nothing_where_the_body_does_not_round(tiny_model_dir: Path) -> None:
    """A float64 body rounds 1e-9 of what float32 does: what is left is one rounding of the returned float32."""
    requests = [request(*lengths, seed=seed, draw="top_k(4)") for lengths in LENGTHS for seed in range(3)]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)
    alone, together = (records(scorer(model, batch_tokens=budget), requests) for budget in (1, 4096))
    for one, other in zip(alone, together, strict=True):
        assert_close(one.log_q_T, other.log_q_T.double(), 2e-6)
        assert_close(one.entropy_T, other.entropy_T.double(), 2e-6)


def test_batches_respect_the_token_budget_and_take_like_lengths() -> None:
    requests = [request(*lengths, seed=seed) for lengths in LENGTHS for seed in range(3)]
    seen = []
    for batch in in_batches(requests, 60):
        lengths = [len(requests[index].prompt_ids) + len(requests[index].response_ids_T[:-1]) for index in batch]
        assert len(batch) == 1 or max(lengths) * len(batch) <= 60
        seen += batch
    assert sorted(seen) == [place for place, asked in enumerate(requests) if len(asked.response_ids_T)]


def test_an_empty_answer_has_an_empty_record(tiny_llama_dir: Path) -> None:
    empty = CandidateSet(
        origin="student",
        design="systematic(4)",
        temperature=1.0,
        version=0,
        ids_TC=torch.empty((0, 4), dtype=torch.int32),
        log_w_TC=torch.empty(0, 4),
    )
    record = records(scorer(tiny_llama_dir), [request(4, 0, candidates=empty, draw="systematic(3)")])[0]
    assert record.log_q_T.shape == record.entropy_T.shape == (0,)
    assert record.of_origin("student").ids_TC.shape == (0, 4)
    assert record.of_origin("teacher").ids_TC.shape == (0, 3)
    two_phase = replace(empty, design="two_phase(4,2)", log_g_TC=torch.empty(0, 4))
    record = records(scorer(tiny_llama_dir), [request(4, 0, candidates=two_phase)])[0]
    assert record.of_origin("student").ids_TC.shape == (0, 2)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_an_answer_that_fills_the_context_is_scored_exactly(tiny_llama_dir: Path, temperature: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    asked = request(1, 127, draw="top_k(8)")
    log_q = naive(model, asked, temperature)
    record = records(scorer(model, temperature), [asked])[0]
    assert_close(record.log_q_T, log_q.gather(1, asked.response_ids_T.long()[:, None])[:, 0])
    drawn = record.of_origin("teacher")
    assert drawn.log_q_TC is not None
    assert_close(drawn.log_q_TC, log_q.topk(8).values)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_scores_do_not_depend_on_the_side_that_another_program_pads_on(
    tiny_llama_dir: Path, temperature: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    requests = [request(*lengths) for lengths in LENGTHS if lengths[1]]
    longest = max(len(asked.prompt_ids) + len(asked.response_ids_T) for asked in requests)
    for asked, record in zip(requests, records(scorer(model, temperature), requests), strict=True):
        ids = [*asked.prompt_ids, *asked.response_ids_T.tolist()]
        padding = longest - len(ids)
        mask = torch.tensor([[0] * padding + [1] * len(ids)])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            padded = torch.tensor([[EOS] * padding + ids])
            logits = model(padded, attention_mask=mask, position_ids=positions).logits[0, :, :VOCABULARY].double()
        log_q = torch.log_softmax(logits / temperature, dim=-1)
        places = torch.arange(padding + len(asked.prompt_ids), longest)
        assert_close(record.log_q_T, log_q[places - 1, asked.response_ids_T.long()])


def test_a_teacher_spread_by_a_device_map_scores_the_same(tiny_llama_dir: Path) -> None:
    asked = [request(*lengths) for lengths in LENGTHS]
    spread = TransformersScorer(tiny_llama_dir, vocabulary=VOCABULARY, dtype=torch.float32, device_map="cpu")
    for one, other in zip(records(scorer(tiny_llama_dir), asked), records(spread, asked), strict=True):
        assert torch.equal(one.log_q_T, other.log_q_T)


@pytest.mark.slow
def test_a_compiled_teacher_scores_the_same(tiny_llama_dir: Path) -> None:
    asked = [request(*lengths) for lengths in LENGTHS]
    compiled = TransformersScorer(tiny_llama_dir, vocabulary=VOCABULARY, dtype=torch.float32, compiled=True)
    for one, other in zip(records(scorer(tiny_llama_dir), asked), records(compiled, asked), strict=True):
        assert_close(one.log_q_T, other.log_q_T.double())


def candidates(log_g_TV: torch.Tensor, spec: str, uid: str, temperature: float = 1.0) -> CandidateSet:
    return draw_candidates(
        parse_design(spec),
        log_g_TV=log_g_TV,
        noise=noise_for(11, [(uid, t) for t in range(len(log_g_TV))], "candidates"),
        sampled_T=torch.zeros(len(log_g_TV), dtype=torch.int64),
        origin="student",
        temperature=temperature,
        version=4,
    )


@pytest.mark.parametrize("spec", ["systematic(6)", "multi_sample(6)", "top_k(6)", "full"])
def test_student_drawn_candidates_get_scores_and_nothing_else(tiny_llama_dir: Path, spec: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    asked = request(5, 20)
    drawn = candidates(torch.log_softmax(torch.randn(20, VOCABULARY), dim=-1), spec, asked.uid)
    scored = records(scorer(model), [replace(asked, candidates=drawn)])[0].of_origin("student")
    assert scored.log_q_TC is not None
    assert_close(scored.log_q_TC, naive(model, asked, 1.0).gather(1, drawn.ids_TC.long()))
    assert torch.equal(scored.ids_TC, drawn.ids_TC)
    assert torch.equal(scored.log_w_TC, drawn.log_w_TC)
    assert (scored.version, scored.design, scored.origin) == (4, spec, "student")


def test_both_origins_fit_in_one_record(tiny_llama_dir: Path) -> None:
    asked = request(5, 9, draw="full")
    drawn = candidates(torch.log_softmax(torch.randn(9, VOCABULARY), dim=-1), "systematic(3)", asked.uid)
    record = records(scorer(tiny_llama_dir), [replace(asked, candidates=drawn)])[0]
    assert [scored.origin for scored in record.sets] == ["student", "teacher"]
    dense = record.of_origin("teacher")
    assert dense.ids_TC.shape == (9, VOCABULARY)
    assert dense.log_q_TC is not None
    torch.testing.assert_close(dense.log_q_TC.exp().sum(-1), torch.ones(9))


def test_two_phase_candidates_are_thinned_where_the_teacher_is_known(tiny_llama_dir: Path) -> None:
    asked = request(5, 40)
    drawn = candidates(torch.log_softmax(torch.randn(40, VOCABULARY), dim=-1), "two_phase(32,4)", asked.uid)
    assert drawn.log_g_TC is not None
    scoring = scorer(tiny_llama_dir)
    kept = records(scoring, [replace(asked, candidates=drawn)])[0].of_origin("student")
    all_scored = records(scoring, [replace(asked, candidates=replace(drawn, log_g_TC=None))])[0].of_origin("student")
    design = parse_design("two_phase(32,4)")
    assert isinstance(design, TwoPhase)
    assert all_scored.log_q_TC is not None
    expected, log_q = design.thin(
        ids_TC=drawn.ids_TC,
        log_w_TC=drawn.log_w_TC,
        log_g_TC=drawn.log_g_TC,
        log_q_TC=all_scored.log_q_TC,
        noise=noise_for(11, [(asked.uid, t) for t in range(40)], "thin"),
    )
    assert kept.ids_TC.shape == (40, 4)
    assert kept.ids_TC.tolist() == expected.ids_TC.tolist()
    torch.testing.assert_close(kept.log_w_TC, expected.log_w_TC.float())
    torch.testing.assert_close(kept.log_q_TC, log_q)
    assert kept.log_g_TC is None


def test_a_thinned_set_that_is_scored_again_keeps_its_candidates(tiny_llama_dir: Path) -> None:
    asked = request(5, 10)
    drawn = candidates(torch.log_softmax(torch.randn(10, VOCABULARY), dim=-1), "two_phase(32,4)", asked.uid)
    scoring = scorer(tiny_llama_dir)
    once = records(scoring, [replace(asked, candidates=drawn)])[0].of_origin("student")
    twice = records(scoring, [replace(asked, candidates=replace(once, log_q_TC=None))])[0].of_origin("student")
    assert torch.equal(once.ids_TC, twice.ids_TC)
    assert torch.equal(once.log_w_TC, twice.log_w_TC)


def test_teacher_drawn_candidates_are_the_designs_draw_from_the_teacher(tiny_llama_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    asked = request(5, 37, draw="systematic(6)")
    expected = draw_candidates(
        parse_design("systematic(6)"),
        log_g_TV=naive(model, asked, 0.7).float(),
        noise=noise_for(11, [(asked.uid, t) for t in range(37)], "candidates"),
        sampled_T=None,
        origin="teacher",
        temperature=0.7,
        version=None,
    )
    drawn = records(scorer(model, 0.7), [asked])[0].of_origin("teacher")
    assert drawn.ids_TC.tolist() == expected.ids_TC.tolist()
    assert_close(drawn.log_w_TC, expected.log_w_TC.double(), 1e-4)
    assert drawn.version is None


def test_a_teacher_cannot_draw_in_two_phases(tiny_llama_dir: Path) -> None:
    with pytest.raises(DesignError, match="one phase"):
        scorer(tiny_llama_dir).score([request(3, 3, draw="two_phase(8,4)")])


def wrong_requests() -> dict[str, ScoreRequest]:
    drawn = candidates(torch.log_softmax(torch.randn(5, VOCABULARY), dim=-1), "systematic(3)", "x")
    return {
        "context holds 128": request(100, 29),
        "prompt is empty": request(0, 4),
        "outside the teacher's vocabulary": replace(request(3, 2), response_ids_T=torch.tensor([1, VOCABULARY])),
        "candidates at temperature 0.5": request(3, 5, candidates=replace(drawn, temperature=0.5)),
        "candidates for 5 positions": request(3, 4, candidates=drawn),
        "a candidate outside": request(3, 5, candidates=replace(drawn, ids_TC=drawn.ids_TC + VOCABULARY)),
    }


@pytest.mark.parametrize("says", wrong_requests())
def test_a_request_that_cannot_be_scored_costs_no_other_request(tiny_llama_dir: Path, says: str) -> None:
    wrong = wrong_requests()[says]
    good = request(3, 7)
    results = scorer(tiny_llama_dir).score([good, wrong, good])
    assert isinstance(results[1], ScoringError)
    assert says in str(results[1])
    assert wrong.uid in str(results[1])
    for result in (results[0], results[2]):
        assert isinstance(result, TeacherRecord)


def test_no_requests_give_no_records(tiny_llama_dir: Path) -> None:
    assert scorer(tiny_llama_dir).score([]) == []


def test_padded_head_rows_take_no_mass(tiny_qwen3_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3_dir)
    asked = request(4, 9)
    expected = records(scorer(model), [asked])[0]
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY:] = 50.0
    assert torch.equal(records(scorer(model), [asked])[0].log_q_T, expected.log_q_T)


TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": EOS - 1,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}


@pytest.mark.parametrize("kind", ["soft-cap", "scaling"])
def test_scale_and_soft_cap_come_before_the_temperature(kind: str) -> None:
    torch.manual_seed(3)
    if kind == "soft-cap":
        model = Gemma2ForCausalLM(Gemma2Config(**TINY, final_logit_softcapping=2.0)).eval()
    else:
        model = GraniteForCausalLM(GraniteConfig(**TINY, logits_scaling=3.0)).eval()
    asked = request(4, 12)
    record = records(scorer(model, 0.6), [asked])[0]
    log_q = naive(model, asked, 0.6)
    assert_close(record.log_q_T, log_q.gather(1, asked.response_ids_T.long()[:, None])[:, 0])


def test_a_model_that_treats_its_logits_in_an_unknown_way_is_refused(tiny_llama_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    forward = model.forward

    def doubled(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    with pytest.raises(ScoringError, match="teach CausalHead"):
        scorer(model)


def test_a_vocabulary_larger_than_the_head_is_refused(tiny_llama_dir: Path) -> None:
    with pytest.raises(ScoringError, match=r"give vocabulary_of\(tokenizer\)"):
        TransformersScorer(tiny_llama_dir, vocabulary=1000)


def test_bf16_logits_are_normalised_in_float32(tiny_llama_dir: Path) -> None:
    scoring = TransformersScorer(tiny_llama_dir, vocabulary=VOCABULARY, dtype=torch.bfloat16)
    record = records(scoring, [request(4, 30, draw="full")])[0]
    dense = record.of_origin("teacher").log_q_TC
    assert dense is not None
    torch.testing.assert_close(dense.double().exp().sum(-1), torch.ones(30).double(), atol=1e-6, rtol=0)


def test_scoring_never_imports_asyncopd() -> None:
    folder = Path(__file__).parents[2] / "teacher_cache"
    imports = ("import asyncopd", "from asyncopd")
    assert not [path for path in folder.rglob("*.py") if any(line in path.read_text() for line in imports)]
