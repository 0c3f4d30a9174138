"""The transformers engine on tiny models, against one-by-one generation and naive forwards."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, PreTrainedModel
from transformers.models.gemma2 import Gemma2ForCausalLM
from transformers.models.mistral import MistralForCausalLM

from asyncopd.errors import CheckpointError, ConfigError, RolloutError
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.types import Rollout, RolloutRequest
from teacher_cache.designs import draw_candidates, parse_design
from teacher_cache.noise import noise_for
from tests.conftest import EOS, VOCABULARY, make_tiny_llama

PROMPTS = [(7, 8, 9), (200, 31), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), (90,), (14, 13, 12, 11, 10)]


def requests(count: int = len(PROMPTS), **settings: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(uid=f"s{index}", prompt_ids=PROMPTS[index % len(PROMPTS)], **{"min_version": 0, **settings})
        for index in range(count)
    ]


def engine(model: Path | PreTrainedModel, *, version: int = 0, **settings: object) -> TransformersEngine:
    sampling = settings.pop("sampling", SamplingConfig(max_new_tokens=20))
    return TransformersEngine(
        model, vocabulary=VOCABULARY, eos_token_ids=(EOS,), sampling=sampling, run_seed=5, version=version, **settings
    )


def drain(running: TransformersEngine) -> dict[str, Rollout]:
    done: dict[str, Rollout] = {}
    while running.in_flight:
        done |= {rollout.uid: rollout for rollout in running.step()}
    return done


def generate(running: TransformersEngine, wanted: Sequence[RolloutRequest]) -> dict[str, Rollout]:
    running.submit(wanted)
    return drain(running)


def assert_same(one: Rollout, other: Rollout) -> None:
    assert one.response_ids_T.tolist() == other.response_ids_T.tolist()
    assert one.finish == other.finish
    torch.testing.assert_close(one.log_b_T, other.log_b_T, atol=1e-5, rtol=0)


def naive_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float) -> torch.Tensor:
    """Float64 logprobs [T, V] of every response position by one forward without cache or padding."""
    ids = torch.tensor([*rollout.prompt_ids, *rollout.response_ids_T.tolist()])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(rollout.prompt_ids) - 1 : -1, :VOCABULARY]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_behaviour_logprobs_are_those_of_a_naive_forward(tiny_model_dir: Path, temperature: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    sampling = SamplingConfig(max_new_tokens=20, temperature=temperature)
    for rollout in generate(engine(model, sampling=sampling), requests()).values():
        expected = naive_logprobs(model, rollout, temperature)
        own = expected.gather(1, rollout.response_ids_T.long()[:, None])[:, 0]
        torch.testing.assert_close(rollout.log_b_T.double(), own, atol=1e-5, rtol=0)


def test_near_zero_temperature_is_the_greedy_generation_of_transformers(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    sampling = SamplingConfig(max_new_tokens=20, temperature=1e-4)
    done = generate(engine(model, sampling=sampling), requests())
    banned = [[row] for row in range(VOCABULARY, model.config.vocab_size)]
    for rollout in done.values():
        prompt = torch.tensor([rollout.prompt_ids])
        greedy = model.generate(prompt, max_new_tokens=20, do_sample=False, bad_words_ids=banned)
        assert rollout.response_ids_T.tolist() == greedy[0, prompt.shape[1] :].tolist()


def test_batched_generation_equals_one_by_one(tiny_model_dir: Path) -> None:
    together = generate(engine(tiny_model_dir), requests())
    alone = engine(tiny_model_dir)
    for request in requests():
        assert_same(together[request.uid], generate(alone, [request])[request.uid])


@pytest.mark.parametrize("gap", [1, 3, 12])
def test_joining_a_running_batch_changes_no_answer(tiny_model_dir: Path, gap: int) -> None:
    together = generate(engine(tiny_model_dir), requests(8))
    running = engine(tiny_model_dir)
    done: dict[str, Rollout] = {}
    for request in requests(8):
        running.submit([request])
        for _ in range(gap):
            done |= {rollout.uid: rollout for rollout in running.step()}
    done |= drain(running)
    assert done.keys() == together.keys()
    for uid, rollout in together.items():
        assert_same(rollout, done[uid])


def test_an_answer_longer_than_the_cache_headroom_is_generated_whole(tiny_llama_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    sampling = SamplingConfig(max_new_tokens=100, min_new_tokens=100)
    rollout = generate(engine(model, sampling=sampling), requests(2))["s0"]
    log_b = naive_logprobs(model, rollout, 1.0)
    log_b[:, EOS] = -torch.inf
    log_b[-1:] = naive_logprobs(model, rollout, 1.0)[-1:].where(torch.arange(VOCABULARY) != EOS, -torch.inf)
    log_b = torch.log_softmax(log_b, dim=-1).gather(1, rollout.response_ids_T.long()[:, None])[:, 0]
    torch.testing.assert_close(rollout.log_b_T.double(), log_b, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_sliding_windows_hold_in_a_padded_batch_and_over_joins(kind: str) -> None:
    torch.manual_seed(2)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "initializer_range": 0.2,
        "bos_token_id": EOS - 1, "eos_token_id": EOS, "pad_token_id": EOS, "max_position_embeddings": 128,
    }  # fmt: skip
    model = (
        MistralForCausalLM(MistralConfig(**shape)) if kind == "mistral" else Gemma2ForCausalLM(Gemma2Config(**shape))
    ).eval()
    running = engine(model, sampling=SamplingConfig(max_new_tokens=30))
    running.submit(requests()[:2])
    done: dict[str, Rollout] = {}
    for _ in range(10):
        done |= {rollout.uid: rollout for rollout in running.step()}
    running.submit(requests()[2:])
    done |= drain(running)
    assert len(done) == len(PROMPTS)
    for rollout in done.values():
        own = naive_logprobs(model, rollout, 1.0).gather(1, rollout.response_ids_T.long()[:, None])[:, 0]
        torch.testing.assert_close(rollout.log_b_T.double(), own, atol=1e-5, rtol=0)


def test_finished_rows_leave_the_batch_at_once(tiny_llama_dir: Path) -> None:
    running = engine(tiny_llama_dir, sampling=SamplingConfig(max_new_tokens=20))
    running.submit(requests(8))
    while running.in_flight:
        before = running.in_flight
        ended = running.step()
        assert running.in_flight == before - len(ended)
        assert running._running is None or running._running.cache.rows == running.in_flight


def test_a_request_may_end_its_answer_earlier_and_never_later(tiny_llama_dir: Path) -> None:
    running = engine(tiny_llama_dir, sampling=SamplingConfig(max_new_tokens=6, min_new_tokens=6))
    bounds = {"s0": 2, "s1": 40, "s2": None}
    wanted = [replace(each, max_new_tokens=bounds[each.uid]) for each in requests(3)]
    done = generate(running, wanted)
    assert {uid: len(each.response_ids_T) for uid, each in done.items()} == {"s0": 2, "s1": 6, "s2": 6}
    assert {each.finish for each in done.values()} == {"length"}


def test_padding_that_all_rows_share_is_dropped(tiny_llama_dir: Path) -> None:
    running = engine(tiny_llama_dir, sampling=SamplingConfig(max_new_tokens=6, min_new_tokens=6))
    running.submit([RolloutRequest(uid="long", prompt_ids=tuple(range(60)), min_version=0)])
    for _ in range(3):
        running.step()
    running.submit([RolloutRequest(uid="short", prompt_ids=(3, 4), min_version=0)])
    while running.in_flight == 2:
        running.step()
    running.step()
    assert running._running is not None
    assert running._running.cache.length == 2 + 3


def test_a_short_answer_left_behind_by_a_long_prompt_is_unchanged(tiny_model_dir: Path) -> None:
    short = RolloutRequest(uid="short", prompt_ids=(3, 4), min_version=0)
    sampling = SamplingConfig(max_new_tokens=12, min_new_tokens=12)
    alone = generate(engine(tiny_model_dir, sampling=sampling), [short])["short"]
    running = engine(tiny_model_dir, sampling=sampling)
    running.submit([RolloutRequest(uid="long", prompt_ids=tuple(range(60)), min_version=0)])
    for _ in range(6):
        running.step()
    running.submit([short])
    done = drain(running)
    assert_same(alone, done["short"])


def test_eos_is_a_response_token_and_the_last_one(tiny_llama_dir: Path) -> None:
    done = generate(engine(tiny_llama_dir, sampling=SamplingConfig(max_new_tokens=60)), requests(40))
    finishes = {rollout.finish for rollout in done.values()}
    assert finishes == {"eos", "length"}
    for rollout in done.values():
        tokens = rollout.response_ids_T.tolist()
        assert EOS not in tokens[:-1]
        assert (tokens[-1] == EOS) == (rollout.finish == "eos")
        assert rollout.finish == "eos" or len(tokens) == 60


def test_a_stop_token_ends_an_answer(tiny_llama_dir: Path) -> None:
    plain = generate(engine(tiny_llama_dir), requests(1))["s0"]
    tokens = plain.response_ids_T.tolist()
    stop = tokens[2]
    sampling = SamplingConfig(max_new_tokens=20, stop_token_ids=(stop,))
    stopped = generate(engine(tiny_llama_dir, sampling=sampling), requests(1))["s0"]
    assert stopped.finish == "eos"
    assert stopped.response_ids_T.tolist() == tokens[: tokens.index(stop) + 1]


def test_padded_head_rows_are_never_drawn_and_take_no_mass(tiny_qwen3_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3_dir)
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY:] = 10 * model.lm_head.weight[:5]
    for rollout in generate(engine(model, design="systematic(8)"), requests()).values():
        assert rollout.response_ids_T.max() < VOCABULARY
        assert rollout.candidates is not None
        assert rollout.candidates.ids_TC.max() < VOCABULARY
        own = naive_logprobs(model, rollout, 1.0).gather(1, rollout.response_ids_T.long()[:, None])[:, 0]
        torch.testing.assert_close(rollout.log_b_T.double(), own, atol=1e-5, rtol=0)


@pytest.mark.parametrize("spec", ["systematic(6)", "multi_sample(6)", "sampled", "top_k(6)", "two_phase(12,4)", "full"])
def test_candidates_are_the_draw_of_the_design_at_every_position(tiny_llama_dir: Path, spec: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    for rollout in generate(engine(model, design=spec), requests()).values():
        length = len(rollout.response_ids_T)
        expected = draw_candidates(
            parse_design(spec),
            log_g_TV=naive_logprobs(model, rollout, 1.0).float(),
            noise=noise_for(5, [(rollout.uid, position) for position in range(length)], "candidates"),
            sampled_T=rollout.response_ids_T.long(),
            origin="student",
            temperature=1.0,
            version=0,
        )
        drawn = rollout.candidates
        assert drawn is not None
        assert (drawn.design, drawn.origin, drawn.version) == (expected.design, "student", 0)
        assert drawn.ids_TC.tolist() == expected.ids_TC.tolist()
        torch.testing.assert_close(drawn.log_w_TC, expected.log_w_TC, atol=1e-4, rtol=0)
        assert (drawn.log_g_TC is None) == (expected.log_g_TC is None)


def test_candidates_come_from_the_untruncated_softmax_at_the_objective_temperature(tiny_llama_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    sampling = SamplingConfig(max_new_tokens=8, temperature=0.5, top_k=3)
    for rollout in generate(
        engine(model, sampling=sampling, design="systematic(6)", temperature=1.5), requests()
    ).values():
        drawn = rollout.candidates
        assert drawn is not None
        assert drawn.temperature == 1.5
        mass = (drawn.log_w_TC.double() + naive_logprobs(model, rollout, 1.5).gather(1, drawn.ids_TC.long())).exp()
        torch.testing.assert_close(mass.sum(-1), torch.ones(len(mass)).double(), atol=1e-5, rtol=0)


def test_a_design_that_reuses_the_token_refuses_another_sampling_distribution(tiny_llama_dir: Path) -> None:
    for sampling in (SamplingConfig(top_p=0.9), SamplingConfig(temperature=0.7), SamplingConfig(min_new_tokens=2)):
        with pytest.raises(ConfigError, match="reuses the rollout's own token"):
            engine(tiny_llama_dir, sampling=sampling, design="sampled")


def publish(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def test_weights_swapped_in_mid_generation_show_in_the_versions(tiny_llama_dir: Path, tmp_path: Path) -> None:
    newer = publish(make_tiny_llama(seed=9), tmp_path)
    sampling = SamplingConfig(max_new_tokens=10, min_new_tokens=10)
    running = engine(tiny_llama_dir, sampling=sampling, version=3, design="systematic(4)")
    running.submit(requests(3))
    for _ in range(4):
        running.step()
    running.load_weights(newer, 7)
    assert running.policy_version == 7
    for rollout in drain(running).values():
        assert rollout.versions_T.tolist() == [3] * 4 + [7] * 6
        assert rollout.candidates is not None
        assert rollout.candidates.version == 3
    old = generate(engine(tiny_llama_dir, sampling=sampling), requests(3))
    new = generate(running, requests(3))
    fresh = generate(engine(make_tiny_llama(seed=9), sampling=sampling), requests(3))
    for uid in old:
        assert (
            new[uid].response_ids_T.tolist() == fresh[uid].response_ids_T.tolist() != old[uid].response_ids_T.tolist()
        )


def test_a_tied_head_follows_the_published_embedding(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """The file holds the embedding once, under one name; the head must not keep its old values."""
    newer = make_tiny_llama(seed=9)
    names = load_file(publish(newer, tmp_path) / "model.safetensors").keys()
    assert "lm_head.weight" not in names
    running = engine(tiny_llama_dir)
    running.load_weights(tmp_path, 1)
    for rollout in generate(running, requests()).values():
        own = naive_logprobs(newer, rollout, 1.0).gather(1, rollout.response_ids_T.long()[:, None])[:, 0]
        torch.testing.assert_close(rollout.log_b_T.double(), own, atol=1e-5, rtol=0)


def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    running = engine(tiny_qwen3_dir)
    before = generate(running, requests(1))["s0"]
    whole = load_file(tiny_qwen3_dir / "model.safetensors")
    for name, tensors in {
        "missing lm_head.weight": {key: value for key, value in whole.items() if key != "lm_head.weight"},
        "unexpected extra.weight": {**whole, "extra.weight": torch.zeros(2)},
        "has shape": {**whole, "lm_head.weight": torch.zeros(3, 3)},
    }.items():
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=name):
            running.load_weights(tmp_path, 1)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot read"):
        running.load_weights(tmp_path, 1)
    with pytest.raises(CheckpointError, match="cannot read"):
        running.load_weights(tmp_path / "nowhere", 1)
    assert running.policy_version == 0
    assert_same(before, generate(running, requests(1))["s0"])


def test_a_request_for_other_weights_is_refused(tiny_llama_dir: Path) -> None:
    running = engine(tiny_llama_dir, version=4)
    with pytest.raises(RolloutError, match="needs version 5"):
        running.submit(requests(1, min_version=5))
    with pytest.raises(RolloutError, match="only be generated by version 3"):
        running.submit(requests(1, exact_version=3))
    with pytest.raises(RolloutError, match="needs version 0"):
        engine(tiny_llama_dir, version=-1).submit(requests(1))
    assert running.in_flight == 0


def test_weights_are_not_swapped_under_an_answer_that_is_pinned(tiny_llama_dir: Path) -> None:
    running = engine(tiny_llama_dir, version=4)
    running.submit(requests(1, exact_version=4))
    with pytest.raises(RolloutError, match="only be generated by version 4"):
        running.load_weights(tiny_llama_dir, 5)


def test_a_prompt_that_would_outgrow_the_context_is_refused_alone(tiny_llama_dir: Path) -> None:
    running = engine(tiny_llama_dir)
    with pytest.raises(RolloutError, match="128 in all"):
        running.submit([RolloutRequest(uid="long", prompt_ids=tuple(range(120)), min_version=0)])
    with pytest.raises(RolloutError, match="in flight already"):
        running.submit([*requests(1), *requests(1)])
    assert running.in_flight == 0


def test_abandoned_answers_are_forgotten_and_the_others_go_on(tiny_llama_dir: Path) -> None:
    expected = generate(engine(tiny_llama_dir), requests())
    running = engine(tiny_llama_dir)
    running.submit(requests())
    running.step()
    running.submit([RolloutRequest(uid="waiting", prompt_ids=(1,), min_version=0)])
    running.abandon(["s0", "waiting", "unknown"])
    done = drain(running)
    assert done.keys() == expected.keys() - {"s0"}
    for uid, rollout in done.items():
        assert_same(rollout, expected[uid])


def test_weights_without_finite_logits_fail_loudly(tiny_llama_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    running = engine(model)
    running.submit(requests(1))
    with pytest.raises(RolloutError, match="no finite logits"):
        running.step()


def test_bf16_sampling_logprobs_are_normalised(tiny_llama_dir: Path) -> None:
    done = generate(engine(tiny_llama_dir, dtype=torch.bfloat16, design="full"), requests())
    assert all(torch.isfinite(rollout.log_b_T).all() for rollout in done.values())
