"""Held-out KL against a naive float64 computation over whole forwards."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from asyncopd.errors import ConfigError
from asyncopd.evaluation import EvaluationConfig, HeldOut, held_out_kl, ratio_estimate
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.students import drop_layers
from asyncopd.types import Prompt
from teacher_cache.identity import vocabulary_of
from tests.conftest import EOS, VOCABULARY, make_tiny_llama

SAMPLING = SamplingConfig(max_new_tokens=24)


def prompts(tokenizer: PreTrainedTokenizerFast, count: int = 7) -> list[Prompt]:
    texts = [f"Say {index}" + "." * index for index in range(count)]
    return [
        Prompt(index=index, text=text, token_ids=tuple(tokenizer(text)["input_ids"]))
        for index, text in enumerate(texts)
    ]


@pytest.mark.parametrize("temperature", [1.0, 1.4])
def test_both_kls_are_the_dense_sums_over_the_answers(
    tiny_llama_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, temperature: float
) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    student = drop_layers(teacher, [1])
    asked = prompts(tiny_tokenizer)
    found = held_out_kl(
        student,
        teacher,
        asked,
        SAMPLING,
        tokenizer=tiny_tokenizer,
        eos_token_ids=(EOS,),
        temperature=temperature,
        batch=3,
    )
    reverse, forward, tokens = 0.0, 0.0, 0
    for prompt, (text, answer_ids) in zip(asked, answers(student, asked), strict=True):
        assert text == prompt.text
        ids = torch.tensor([[*prompt.token_ids, *answer_ids]])
        with torch.no_grad():
            log_p, log_q = (
                torch.log_softmax(
                    model(ids).logits[0, len(prompt.token_ids) - 1 : -1, :VOCABULARY].double() / temperature, dim=-1
                )
                for model in (student, teacher)
            )
        reverse += float((log_p.exp() * (log_p - log_q)).sum())
        forward += float((log_q.exp() * (log_q - log_p)).sum())
        tokens += len(answer_ids)
    assert found.reverse_kl.mean == pytest.approx(reverse / tokens, abs=1e-5)
    assert found.forward_kl.mean == pytest.approx(forward / tokens, abs=1e-5)
    assert found.mean_length.mean == pytest.approx(tokens / len(asked))


def answers(student: torch.nn.Module, asked: list[Prompt]) -> list[tuple[str, list[int]]]:
    """The answers that an evaluation must have drawn: same seed, same names, one by one."""
    from asyncopd.evaluation import EVALUATION_SEED
    from asyncopd.rollout.transformers_engine import TransformersEngine
    from asyncopd.types import RolloutRequest

    engine = TransformersEngine(
        student, vocabulary=VOCABULARY, eos_token_ids=(EOS,), sampling=SAMPLING, run_seed=EVALUATION_SEED, version=0
    )
    found = []
    for place, prompt in enumerate(asked):
        engine.submit([RolloutRequest(uid=f"held-out-{place}", prompt_ids=prompt.token_ids, min_version=0)])
        while not (done := engine.step()):
            pass
        found.append((prompt.text, done[0].response_ids_T.tolist()))
    return found


def evaluate(student: object, teacher: object, tokenizer: PreTrainedTokenizerFast, **settings: object) -> HeldOut:
    return held_out_kl(
        student, teacher, prompts(tokenizer), SAMPLING, tokenizer=tokenizer, eos_token_ids=(EOS,), **settings
    )


def test_a_model_is_no_nats_from_itself(tiny_llama_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    found = evaluate(tiny_llama_dir, tiny_llama_dir, tiny_tokenizer)
    assert found.reverse_kl.mean == pytest.approx(0, abs=1e-6)
    assert found.forward_kl.mean == pytest.approx(0, abs=1e-6)


def test_an_evaluation_repeats_exactly_and_the_batch_changes_nothing(
    tiny_llama_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    student = make_tiny_llama(seed=4)
    first = evaluate(student, tiny_llama_dir, tiny_tokenizer)
    assert evaluate(student, tiny_llama_dir, tiny_tokenizer) == first
    other = evaluate(student, tiny_llama_dir, tiny_tokenizer, batch=2)
    assert other.samples == first.samples
    assert other.reverse_kl.mean == pytest.approx(first.reverse_kl.mean, abs=1e-5)


def test_a_student_in_training_stays_as_it_was(tiny_llama_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    student = make_tiny_llama(seed=4).train()
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    evaluate(student, tiny_llama_dir, tiny_tokenizer, dtype=torch.bfloat16)
    evaluate(student, tiny_llama_dir, tiny_tokenizer)
    assert student.training
    assert student.dtype == torch.float32
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())
    assert all(parameter.requires_grad for parameter in student.parameters())


def test_the_interval_covers_the_mean_of_clustered_tokens_19_times_in_20() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(600):
        lengths = torch.randint(2, 40, (40,), generator=generator).double()
        level = torch.randn(40, generator=generator).double() * 0.5 + 1
        estimate = ratio_estimate(level * lengths, lengths)
        covered += abs(estimate.mean - 1) <= estimate.ci95
    assert 0.92 <= covered / 600 <= 0.97


def test_the_ratio_interval_is_the_delta_method_by_hand() -> None:
    estimate = ratio_estimate(torch.tensor([2.0, 9.0, 4.0]), torch.tensor([1.0, 3.0, 2.0]))
    residuals = [2 - 2.5, 9 - 7.5, 4 - 5.0]
    assert estimate.mean == pytest.approx(2.5)
    assert estimate.ci95 == pytest.approx(1.96 * math.sqrt(1.5 * sum(r * r for r in residuals) / 36))


def test_one_answer_gives_no_interval() -> None:
    assert math.isnan(ratio_estimate(torch.tensor([2.0]), torch.tensor([1.0])).ci95)


def test_no_prompts_is_an_error_with_a_remedy(tiny_llama_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.prompts"):
        held_out_kl(tiny_llama_dir, tiny_llama_dir, [], SAMPLING, tokenizer=tiny_tokenizer, eos_token_ids=(EOS,))


@pytest.mark.parametrize("settings", [{"prompts": -1}, {"every": -1}, {"max_new_tokens": 0}, {"batch": 0}], ids=str)
def test_a_wrong_setting_is_named(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"evaluation\.{next(iter(settings))} is"):
        EvaluationConfig(**settings)


def test_ids_that_no_token_has_do_not_shorten_the_vocabulary(
    tiny_llama_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """``len(tokenizer)`` counts the tokens, and EOS is the last of the ids."""
    words = {f"t{index}": index for index in range(VOCABULARY) if index not in (7, 9)}
    gaps = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")))
    assert (len(gaps), vocabulary_of(gaps)) == (VOCABULARY - 2, VOCABULARY)
    student = drop_layers(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), [1])
    found, expected = (
        held_out_kl(student, tiny_llama_dir, prompts(tiny_tokenizer), SAMPLING, tokenizer=each, eos_token_ids=(EOS,))
        for each in (gaps, tiny_tokenizer)
    )
    assert (found.reverse_kl, found.mean_length) == (expected.reverse_kl, expected.mean_length)
