"""What the rollout says of its tokens and candidates is what a scorer says of the same weights, and of others."""

from pathlib import Path

import pytest
import torch

from asyncopd.evaluation import held_out_kl
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.types import Prompt, Rollout, RolloutRequest
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.transformers_scorer import TransformersScorer
from tests.conftest import EOS, VOCABULARY, make_tiny_llama, make_tiny_tokenizer

SAMPLING = SamplingConfig(max_new_tokens=30)
PROMPTS = [Prompt(index=index, text="", token_ids=tuple(range(index, 2 * index + 3))) for index in range(24)]


def rollouts(model: object, spec: str, temperature: float) -> list[Rollout]:
    engine = TransformersEngine(
        model,
        vocabulary=VOCABULARY,
        eos_token_ids=(EOS,),
        sampling=SamplingConfig(max_new_tokens=30, temperature=temperature),
        run_seed=2,
        design=spec,
        temperature=temperature,
        version=0,
    )
    engine.submit([RolloutRequest(uid=f"{p.index}", prompt_ids=p.token_ids, min_version=0) for p in PROMPTS])
    done = []
    while engine.in_flight:
        done += engine.step()
    return done


def scored(model: object, answers: list[Rollout], temperature: float) -> list[TeacherRecord]:
    scorer = TransformersScorer(model, vocabulary=VOCABULARY, temperature=temperature, dtype=torch.float32)
    results = scorer.score(
        [
            ScoreRequest(
                uid=answer.uid,
                prompt_ids=answer.prompt_ids,
                response_ids_T=answer.response_ids_T,
                candidates=answer.candidates,
            )
            for answer in answers
        ]
    )
    assert all(isinstance(result, TeacherRecord) for result in results)
    return [result for result in results if isinstance(result, TeacherRecord)]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_behaviour_logprobs_are_a_scorers_logprobs_of_the_same_weights(
    tiny_model_dir: Path, temperature: float
) -> None:
    answers = rollouts(tiny_model_dir, "systematic(6)", temperature)
    for answer, record in zip(answers, scored(tiny_model_dir, answers, temperature), strict=True):
        torch.testing.assert_close(record.log_q_T, answer.log_b_T, atol=2e-5, rtol=0)
        drawn = record.of_origin("student")
        assert drawn.log_q_TC is not None
        mass_T = (drawn.log_w_TC.double() + drawn.log_q_TC.double()).exp().sum(-1)
        torch.testing.assert_close(mass_T, torch.ones_like(mass_T), atol=1e-4, rtol=0)


def test_scored_candidates_add_up_to_the_exact_kl_of_the_same_answers(tiny_llama_dir: Path) -> None:
    """Over some 500 positions the weighted sum over 32 candidates comes within its noise of the dense reverse KL."""
    student = make_tiny_llama(seed=8)
    answers = rollouts(student, "systematic(32)", 1.0)
    own, other = scored(student, answers, 1.0), scored(tiny_llama_dir, answers, 1.0)
    per_token = []
    for mine, theirs in zip(own, other, strict=True):
        log_p_TC, drawn = mine.of_origin("student").log_q_TC, theirs.of_origin("student")
        assert log_p_TC is not None
        assert drawn.log_q_TC is not None
        weight_TC = (drawn.log_w_TC + log_p_TC).exp()
        per_token.append((weight_TC * (log_p_TC - drawn.log_q_TC)).sum(-1))
    estimate_T = torch.cat(per_token)
    exact = held_out_kl(
        student, tiny_llama_dir, PROMPTS, SAMPLING, tokenizer=make_tiny_tokenizer(), eos_token_ids=(EOS,), batch=24
    ).reverse_kl
    assert len(estimate_T) > 300
    error = 1.96 * float(estimate_T.std()) / len(estimate_T) ** 0.5
    assert float(estimate_T.mean()) == pytest.approx(exact.mean, abs=2 * (error + exact.ci95))
