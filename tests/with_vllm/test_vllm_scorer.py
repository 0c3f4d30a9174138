"""Records of a teacher that vLLM runs, against those of the same teacher in transformers, in float32."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from recipes.prepare_smollm2 import teacher_path
from teacher_cache.designs import draw_candidates, parse_design
from teacher_cache.errors import ScoringError
from teacher_cache.local_teacher import LocalTeacherConfig
from teacher_cache.noise import noise_for
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.transformers_scorer import TransformersScorer
from teacher_cache.vllm_scorer import VllmModel, VllmScorer, VllmScorerConfig
from tests.conftest import VOCABULARY
from tests.teacher_cache.serving import ThreadedService
from tests.teacher_cache.test_transformers_scorer import LENGTHS, candidates, request
from tests.with_vllm.models import KINDS, save

pytestmark = pytest.mark.vllm

TEMPERATURES = [0.6, 1.0, 1.5]
TEXT = (
    "The capital of France is Paris, which lies on the river Seine.",
    "To add two fractions, bring them to a common denominator first. Then add the numerators and simplify.",
    "She opened the window, and the sound of the sea came in with the evening wind.",
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> "Teacher":
    """Checkpoint and vLLM's body of it, by kind and context.

    Each is started once and lives on: an engine that goes takes the process groups of the others with it.
    """
    folder = tmp_path_factory.mktemp("vllm-teachers")
    started: dict[tuple[str, int], tuple[Path, VllmModel]] = {}

    def get(kind: str, max_context: int = 0) -> tuple[Path, VllmModel]:
        key = (kind, max_context)
        if key not in started:
            path = save(kind, 3, folder)
            config = VllmScorerConfig(kv_cache_gb=0.05, max_context=max_context)
            # The budget is less than the longest sequence and than a batch, so both must be taken apart or together.
            started[key] = (
                path,
                VllmModel(path, vocabulary=VOCABULARY, dtype=torch.float32, batch_tokens=64, config=config),
            )
        return started[key]

    return get


Teacher = Callable[..., tuple[Path, VllmModel]]


def both(
    path: Path, model: VllmModel, requests: list[ScoreRequest], temperature: float, vocabulary: int = VOCABULARY
) -> list[tuple[TeacherRecord, TeacherRecord]]:
    """The records of vLLM and of transformers, in pairs."""
    settings = {"vocabulary": vocabulary, "temperature": temperature}
    ours = VllmScorer(model, **settings).score(requests)
    theirs = TransformersScorer(path, **settings, dtype=torch.float32).score(requests)
    pairs = []
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, TeacherRecord), one
        assert isinstance(other, TeacherRecord), other
        pairs.append((one, other))
    return pairs


def assert_close(one: torch.Tensor | None, other: torch.Tensor | None, tolerance: float = 1e-4) -> None:
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_token_entropy_and_the_whole_distribution_are_those_of_transformers(
    teacher: Teacher, kind: str, temperature: float
) -> None:
    """Mixed lengths, an empty answer and one that fills the context."""
    requests = [request(*lengths, draw="full") for lengths in [*LENGTHS, (1, 127)]]
    for one, other in both(*teacher(kind), requests, temperature):
        assert_close(one.log_q_T, other.log_q_T)
        assert_close(one.entropy_T, other.entropy_T)
        assert_close(one.of_origin("teacher").log_q_TC, other.of_origin("teacher").log_q_TC)


@pytest.mark.parametrize("spec", ["systematic(8)", "top_k(8)", "multi_sample(8)"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_teacher_draws_is_the_designs_draw_from_its_distribution(
    teacher: Teacher, kind: str, spec: str
) -> None:
    _, model = teacher(kind)
    scorer = VllmScorer(model, vocabulary=VOCABULARY, temperature=0.6)
    asked = [request(*lengths) for lengths in LENGTHS if lengths[1]]
    dense = scorer.score([replace(each, draw="full") for each in asked])
    drawn = scorer.score([replace(each, draw=spec) for each in asked])
    for each, whole, found in zip(asked, dense, drawn, strict=True):
        assert isinstance(whole, TeacherRecord)
        assert isinstance(found, TeacherRecord)
        log_q_TV = whole.of_origin("teacher").log_q_TC
        assert log_q_TV is not None
        expected = draw_candidates(
            parse_design(spec),
            log_g_TV=log_q_TV,
            noise=noise_for(11, [(each.uid, t) for t in range(len(log_q_TV))], "candidates"),
            sampled_T=None,
            origin="teacher",
            temperature=0.6,
            version=None,
        )
        own = found.of_origin("teacher")
        assert own.ids_TC.tolist() == expected.ids_TC.tolist()
        assert_close(own.log_w_TC, expected.log_w_TC)
        assert_close(own.log_q_TC, log_q_TV.gather(1, expected.ids_TC.long()))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("spec", ["systematic(6)", "two_phase(24,6)", "full"])
@pytest.mark.parametrize("kind", ["tied-llama", "untied-qwen3"])
def test_candidates_that_a_student_drew_get_the_scores_that_transformers_gives(
    teacher: Teacher, kind: str, spec: str, temperature: float
) -> None:
    torch.manual_seed(0)
    requests = []
    for lengths in LENGTHS:
        asked = request(*lengths)
        if lengths[1]:
            log_g = torch.log_softmax(torch.randn(lengths[1], VOCABULARY), dim=-1)
            asked = replace(asked, candidates=candidates(log_g, spec, asked.uid, temperature))
            requests.append(asked)
    for one, other in both(*teacher(kind), requests, temperature):
        mine, its = one.of_origin("student"), other.of_origin("student")
        assert mine.ids_TC.tolist() == its.ids_TC.tolist()
        assert_close(mine.log_q_TC, its.log_q_TC)
        assert_close(mine.log_w_TC, its.log_w_TC, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_smollm2_on_natural_text_is_scored_as_in_transformers(
    smollm2: tuple[Path, VllmModel], temperature: float
) -> None:
    path, model = smollm2
    tokenizer = AutoTokenizer.from_pretrained(path)
    requests = []
    for place, text in enumerate(TEXT):
        ids = tokenizer(text)["input_ids"]
        requests.append(
            ScoreRequest(
                uid=f"{place}", prompt_ids=tuple(ids[:3]), response_ids_T=torch.tensor(ids[3:]).int(), draw="top_k(64)"
            )
        )
    # The logits of the two bodies are 1e-4 apart at most, and a temperature below 1 scales that up.
    within = 1e-4 / min(1.0, temperature)
    for one, other in both(path, model, requests, temperature, len(tokenizer)):
        assert_close(one.log_q_T, other.log_q_T, within)
        assert_close(one.entropy_T, other.entropy_T, within)
        assert_close(one.of_origin("teacher").log_q_TC, other.of_origin("teacher").log_q_TC, within)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, VllmModel]:
    path = teacher_path()
    return path, VllmModel(path, vocabulary=49152, dtype=torch.float32)


def test_a_sequence_beyond_the_context_costs_no_other(teacher: Teacher) -> None:
    path, model = teacher("tied-llama")
    results = VllmScorer(model, vocabulary=VOCABULARY).score([request(3, 7), request(100, 29), request(3, 8)])
    assert isinstance(results[1], ScoringError)
    assert "context holds 128" in str(results[1])
    assert [isinstance(result, TeacherRecord) for result in results] == [True, False, True]


def test_a_shorter_context_is_what_vllm_needs_room_for_and_what_the_service_announces(teacher: Teacher) -> None:
    path, model = teacher("tied-llama", max_context=16)
    config = VllmScorerConfig(kv_cache_gb=0.05, max_context=16)
    assert model._llm.llm_engine.model_config.max_model_len == 16
    results = VllmScorer(model, vocabulary=VOCABULARY).score([request(3, 14), request(3, 13)])
    assert "context holds 16" in str(results[0])
    assert isinstance(results[1], TeacherRecord)
    local = LocalTeacherConfig(model=path, backend="vllm", dtype="fp32", device="cpu", vllm=config)
    assert local.identity().max_context == 16
    assert local.identity().fingerprint == replace(local, vllm=VllmScorerConfig()).identity().fingerprint


def test_a_service_over_vllm_answers_as_the_scorer_does(teacher: Teacher) -> None:
    from teacher_cache.client import TeacherClient
    from teacher_cache.identity import Expectation

    path, model = teacher("tied-llama")
    config = LocalTeacherConfig(model=path, backend="vllm", dtype="fp32", device="cpu")
    scorer = VllmScorer(model, vocabulary=VOCABULARY)
    requests = [request(*lengths, draw="systematic(5)") for lengths in LENGTHS]
    with ThreadedService(scorer, identity=config.identity()) as service:
        expected = Expectation(fingerprint=config.identity().fingerprint, draw="systematic(5)")
        with TeacherClient([service.url], expected=expected) as client:
            for found, own in zip(client.score(requests), scorer.score(requests), strict=True):
                assert isinstance(found, TeacherRecord)
                assert isinstance(own, TeacherRecord)
                assert_close(found.log_q_T, own.log_q_T, 1e-5)
                assert_close(found.of_origin("teacher").log_q_TC, own.of_origin("teacher").log_q_TC, 1e-5)


def test_too_small_a_cache_is_an_error_that_says_so(teacher: Teacher) -> None:
    path, _ = teacher("tied-llama")
    config = VllmScorerConfig(kv_cache_gb=1e-5)
    with pytest.raises(ScoringError, match=r"vLLM cannot run .*vllm\.kv_cache_gb.*cache blocks"):
        VllmModel(path, vocabulary=VOCABULARY, dtype=torch.float32, config=config)


def test_options_that_cannot_work_are_refused_before_vllm_starts(teacher: Teacher) -> None:
    path, _ = teacher("tied-llama")
    for wrong, says in (
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"memory_fraction": 1.0}, "memory_fraction is 1.0"),
        ({"kv_cache_gb": 0.0}, "kv_cache_gb is 0.0"),
        ({"max_context": -1}, "max_context is -1"),
        ({"cores": "a-b"}, "cores is 'a-b'"),
    ):
        with pytest.raises(ScoringError, match=says):
            VllmScorerConfig(**wrong)
    assert VllmScorerConfig(cores="0-2,5").core_set == {0, 1, 2, 5}
    for settings, says in (
        ({"vllm": VllmScorerConfig(cores="4000")}, "4000.*choose among these"),
        ({"vllm": VllmScorerConfig(tensor_parallel=2)}, "no GPU; expected 1"),
        ({"compile": True}, "options of the backend transformers"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
    ):
        with pytest.raises(ScoringError, match=says):
            LocalTeacherConfig(model=path, backend="vllm", **{"device": "cpu", **settings})
    one, other = (LocalTeacherConfig(model=path, backend=backend, device="cpu") for backend in ("vllm", "transformers"))
    assert one.identity().fingerprint != other.identity().fingerprint
