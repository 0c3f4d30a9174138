"""The vLLM engine against the transformers engine: the same tokens, logprobs and candidates, whatever happens."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncopd.errors import CheckpointError, ConfigError, RequestRefusedError, RolloutError
from asyncopd.rollout.engine import RolloutEngine
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.vllm_config import LORA_RANKS, VllmEngineConfig
from asyncopd.types import Rollout, RolloutRequest
from tests.conftest import EOS, VOCABULARY
from tests.with_vllm.conftest import Pair
from tests.with_vllm.models import KINDS, save

pytestmark = pytest.mark.vllm

# Longer than a block of vLLM's cache (16 tokens), so that a shared beginning is really taken from it.
BEGINNING = tuple(range(20, 60))
PROMPTS = [(7, 8, 9), (*BEGINNING, 1), (*BEGINNING, 2), (90,), (14, 13, 12, 11, 10)]
APPLIED, MERGED = {"adapters": "apply"}, {"adapters": "merge"}
GREEDY = SamplingConfig(max_new_tokens=20, temperature=1e-4)
Pairs = Callable[..., Pair]


def requests(count: int = 10, prefix: str = "s", **settings: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            uid=f"{prefix}{index}", prompt_ids=PROMPTS[index % len(PROMPTS)], **{"min_version": 0, **settings}
        )
        for index in range(count)
    ]


def drain(engine: RolloutEngine) -> dict[str, Rollout]:
    done: dict[str, Rollout] = {}
    while engine.in_flight:
        done |= {rollout.uid: rollout for rollout in engine.step()}
    return done


def generate(engine: RolloutEngine, wanted: Sequence[RolloutRequest]) -> dict[str, Rollout]:
    engine.submit(wanted)
    return drain(engine)


def advance(engine: RolloutEngine, steps: int) -> dict[str, Rollout]:
    return {rollout.uid: rollout for _ in range(steps) for rollout in engine.step()}


def assert_same(ours: dict[str, Rollout], theirs: dict[str, Rollout]) -> None:
    assert ours.keys() == theirs.keys()
    for uid, expected in theirs.items():
        got = ours[uid]
        assert got.response_ids_T.tolist() == expected.response_ids_T.tolist()
        assert got.versions_T.tolist() == expected.versions_T.tolist()
        assert got.finish == expected.finish
        torch.testing.assert_close(got.log_b_T, expected.log_b_T, atol=1e-4, rtol=0)
        assert (got.candidates is None) == (expected.candidates is None)
        if got.candidates is not None and expected.candidates is not None:
            assert got.candidates.design == expected.candidates.design
            assert got.candidates.version == expected.candidates.version
            assert got.candidates.ids_TC.tolist() == expected.candidates.ids_TC.tolist()
            torch.testing.assert_close(got.candidates.log_w_TC, expected.candidates.log_w_TC, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *product(KINDS, [{"prefix_caching": True}, {"prefix_caching": False}]),
        *product(["tied-llama", "untied-qwen3"], [APPLIED]),
        ("tied-llama", MERGED),
    ],
    ids=str,
)
def test_greedy_answers_equal_those_of_transformers_before_and_after_swaps(
    pair: Pairs, kind: str, options: dict[str, object]
) -> None:
    engines = pair(kind, sampling=GREEDY, **options)
    ours, theirs = engines.vllm, engines.transformers()
    found = []
    for version, directory in enumerate((engines.a, engines.b, engines.a), start=1):
        for engine in (ours, theirs):
            engine.load_weights(directory, version)
        done, expected = generate(ours, requests()), generate(theirs, requests())
        for uid, rollout in done.items():
            assert rollout.response_ids_T.tolist() == expected[uid].response_ids_T.tolist()
            text = [*rollout.prompt_ids, *rollout.response_ids_T.tolist()]
            torch.testing.assert_close(ours.logprobs(text), theirs.logprobs(text), atol=1e-4, rtol=0)
        found.append([done[uid].response_ids_T.tolist() for uid in sorted(done)])
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("design", ["systematic(6)", "multi_sample(4)", "two_phase(12,4)", "top_k_tail(6)", "full"])
def test_sampled_answers_and_candidates_equal_those_of_transformers(pair: Pairs, design: str) -> None:
    engines = pair("tied-llama", design=design)
    engines.vllm.load_weights(engines.a, 0)
    done = generate(engines.vllm, requests(12))
    assert_same(done, generate(engines.transformers(), requests(12)))
    assert {rollout.finish for rollout in done.values()} <= {"eos", "length"}


def test_truncated_sampling_is_what_the_logprobs_belong_to(pair: Pairs) -> None:
    sampling = SamplingConfig(
        max_new_tokens=20, min_new_tokens=3, temperature=0.8, top_p=0.9, top_k=30, min_p=0.01, stop_token_ids=(65,)
    )
    engines = pair("untied-qwen3", sampling=sampling, design="systematic(6)")
    engines.vllm.load_weights(engines.a, 0)
    done = generate(engines.vllm, requests(30))
    assert_same(done, generate(engines.transformers(), requests(30)))
    for rollout in done.values():
        ended_by = rollout.response_ids_T[-1].item() in (EOS, 65)
        assert ended_by == (rollout.finish == "eos")


def test_rows_that_come_go_and_are_abandoned_leave_the_others_as_they_are(pair: Pairs) -> None:
    engines = pair("tied-llama", design="systematic(6)")
    engines.vllm.load_weights(engines.a, 0)
    expected = generate(engines.transformers(), requests(14))
    ours, done = engines.vllm, {}
    for index, request in enumerate(requests(14)):
        ours.submit([request])
        done |= advance(ours, 2)
        if index % 5 == 4:
            ours.abandon([request.uid, "unknown"])
            del expected[request.uid]
            done.pop(request.uid, None)
    assert_same(done | drain(ours), expected)


@pytest.mark.parametrize("options", [{"prefix_caching": True}, {"prefix_caching": False}, APPLIED, MERGED], ids=str)
def test_an_answer_in_flight_across_a_swap_goes_on_under_the_new_weights(
    pair: Pairs, options: dict[str, object]
) -> None:
    sampling = SamplingConfig(max_new_tokens=20, min_new_tokens=20)
    engines = pair("tied-llama", sampling=sampling, **options)
    ours, theirs = engines.vllm, engines.transformers()
    for engine in (ours, theirs):
        engine.load_weights(engines.a, 3)
        engine.submit(requests(4))
        advance(engine, 7)
        engine.load_weights(engines.b, 8)
        # These share a beginning with answers whose keys and values older weights left.
        engine.submit(requests(4, "late"))
    done = drain(ours)
    assert_same(done, drain(theirs))
    assert done["s1"].versions_T.tolist() == [3] * 7 + [8] * 13
    assert done["late1"].versions_T.tolist() == [8] * 20


@pytest.mark.parametrize("options", [{}, APPLIED], ids=str)
@pytest.mark.parametrize("keep_tokens", [True, False])
def test_restarted_answers_leave_nothing_of_the_old_weights_behind(
    pair: Pairs, keep_tokens: bool, options: dict[str, object]
) -> None:
    sampling = SamplingConfig(max_new_tokens=20, min_new_tokens=20)
    engines = pair("tied-llama", sampling=sampling, **options)
    ours, theirs = engines.vllm, engines.transformers()
    for engine in (ours, theirs):
        engine.load_weights(engines.a, 3)
        engine.submit(requests(4))
        advance(engine, 7)
        engine.load_weights(engines.b, 8)
        engine.restart(keep_tokens)
    done = drain(ours)
    assert_same(done, drain(theirs))
    assert done["s1"].versions_T.tolist() == ([3] * 7 + [8] * 13 if keep_tokens else [8] * 20)


def test_logprobs_of_a_text_are_those_of_transformers_and_disturb_no_answer(pair: Pairs) -> None:
    engines = pair("untied-qwen3", design="systematic(6)")
    ours, theirs = engines.vllm, engines.transformers()
    ours.load_weights(engines.a, 0)
    expected = generate(engines.transformers(), requests())
    ours.submit(requests())
    advanced = advance(ours, 3)
    text = [(17 * place) % VOCABULARY for place in range(24)]
    torch.testing.assert_close(ours.logprobs(text), theirs.logprobs(text), atol=1e-4, rtol=0)
    assert_same(advanced | drain(ours), expected)


def test_a_probe_does_not_wait_until_an_answer_ends(pair: Pairs) -> None:
    slots = 3
    sampling = SamplingConfig(max_new_tokens=20, min_new_tokens=20)
    engines = pair("tied-llama", slots=slots, sampling=sampling)
    ours, theirs = engines.vllm, engines.transformers()
    ours.load_weights(engines.a, 0)
    ours.submit(requests(slots))
    advance(ours, 1)
    text = [1, 2, 3]
    torch.testing.assert_close(ours.logprobs(text), theirs.logprobs(text), atol=1e-4, rtol=0)
    # A first token and at most one for each of the two that were asked about, of twenty.
    assert all(len(answer.tokens) <= 4 for answer in ours._answers.values())
    assert len(ours._answers) == slots
    drain(ours)


def test_a_probe_that_vllm_reads_in_two_parts_is_answered_at_its_end(pair: Pairs) -> None:
    engines = pair("tied-llama", slots=64)
    ours, theirs = engines.vllm, engines.transformers()
    ours.load_weights(engines.a, 0)
    text = [(17 * place) % VOCABULARY for place in range(32)]
    # What is left of the tokens that vLLM reads at once ends in the middle of the longest probe.
    left = ours._llm.vllm_config.scheduler_config.max_num_batched_tokens - sum(range(1, 31)) - 15
    prompts = [tuple(range(first, first + min(100, left - first))) for first in range(0, left, 100)]
    prompts = [tuple((place + 1) * token % VOCABULARY for token in ids) for place, ids in enumerate(prompts)]
    ours.submit([RolloutRequest(uid=f"p{i}", prompt_ids=ids, min_version=0) for i, ids in enumerate(prompts)])
    torch.testing.assert_close(ours.logprobs(text), theirs.logprobs(text), atol=1e-4, rtol=0)
    drain(ours)


def test_a_request_that_cannot_be_served_is_refused_and_the_engine_goes_on(
    pair: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = pair("tied-llama", design="systematic(6)")
    ours = engines.vllm
    ours.load_weights(engines.a, 4)
    with pytest.raises(RequestRefusedError, match="128 in all"):
        ours.submit([*requests(1), RolloutRequest(uid="long", prompt_ids=tuple(range(120)), min_version=0)])
    with pytest.raises(RequestRefusedError, match="token id 100000"):
        ours.submit([RolloutRequest(uid="odd", prompt_ids=(100_000,), min_version=0)])
    monkeypatch.setattr(ours, "_max_context", 10_000)
    with pytest.raises(RequestRefusedError, match="vLLM refuses"):
        ours.submit([RolloutRequest(uid="longer", prompt_ids=(1,) * 200, min_version=0)])
    with pytest.raises(RolloutError, match="needs version 5"):
        ours.submit(requests(1, min_version=5))
    assert ours.in_flight == 0
    ours.submit(requests(1, exact_version=4))
    with pytest.raises(RolloutError, match="only be generated by version 4"):
        ours.load_weights(engines.b, 5)
    assert len(drain(ours)) == 1


def test_weights_that_do_not_fit_are_refused_before_anything_is_changed(pair: Pairs, tmp_path: Path) -> None:
    engines = pair("untied-qwen3", design="systematic(6)")
    ours = engines.vllm
    ours.load_weights(engines.a, 4)
    before = generate(ours, requests(1))
    whole = load_file(engines.b / "model.safetensors")
    for message, tensors in {
        "missing lm_head.weight": {name: tensor for name, tensor in whole.items() if name != "lm_head.weight"},
        "unexpected extra.weight": {**whole, "extra.weight": torch.zeros(2)},
        "has shape": {**whole, "lm_head.weight": torch.zeros(3, 3)},
    }.items():
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            ours.load_weights(tmp_path, 5)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot read"):
        ours.load_weights(tmp_path, 5)
    assert ours.policy_version == 4
    assert_same(generate(ours, requests(1)), before)


@pytest.mark.parametrize("options", [APPLIED, MERGED], ids=str)
def test_adapters_that_cannot_be_taken_are_refused_and_those_that_it_has_stay(
    pair: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    from asyncopd.rollout import vllm_engine

    engines = pair("tied-llama", sampling=SamplingConfig(max_new_tokens=20, min_new_tokens=20), **options)
    ours = engines.vllm
    ours.load_weights(engines.a, 4)
    before = generate(ours, requests(1))
    whole = load_file(engines.b / "adapter_model.safetensors")
    config = (engines.b / "adapter_config.json").read_text()
    name = next(name for name in whole if name.endswith("o_proj.lora_B.weight"))
    wrong = [("which the model has as", config, {**whole, name: torch.zeros(3, 4)})]
    if options == APPLIED:
        message = r"cannot apply .*is greater than max_lora_rank.*rollout\.vllm\.adapters to merge"
        wrong.append((message, config.replace('"r": 4', '"r": 9'), whole))
    for message, text, tensors in wrong:
        (tmp_path / "adapter_config.json").write_text(text)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            ours.load_weights(tmp_path, 5)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="published whole"):
        ours.load_weights(tmp_path, 5)
    # As when the version is deleted after the check.
    for name in ("check_shapes", "check_adapters"):
        monkeypatch.setattr(vllm_engine, name, lambda *args, **options: None)
    with pytest.raises(CheckpointError, match="cannot apply" if options == APPLIED else "published whole"):
        ours.load_weights(tmp_path, 5)
    assert ours.policy_version == 4
    assert_same(generate(ours, requests(1)), before)


def test_vllm_makes_room_for_the_ranks_that_a_run_may_ask_for() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == LORA_RANKS


def test_too_little_memory_is_an_error_that_names_the_options(tmp_path: Path) -> None:
    from asyncopd.rollout.vllm_engine import VllmEngine

    path, config = save("tied-llama", 0, tmp_path), VllmEngineConfig(kv_cache_gb=1e-5)
    with pytest.raises(RolloutError, match=r"(?s)vLLM cannot run .*kv_cache_gb on a CPU.*max_context"):
        VllmEngine(path, vocabulary=VOCABULARY, eos_token_ids=(EOS,), sampling=GREEDY, run_seed=5, config=config)


def test_a_design_that_reuses_the_token_refuses_truncated_sampling_before_vllm_starts(tmp_path: Path) -> None:
    from asyncopd.rollout.vllm_engine import VllmEngine

    with pytest.raises(ConfigError, match="reuses the rollout's own token"):
        VllmEngine(
            tmp_path, vocabulary=VOCABULARY, eos_token_ids=(EOS,), run_seed=5, design="sampled",
            sampling=SamplingConfig(top_p=0.9),
        )  # fmt: skip
