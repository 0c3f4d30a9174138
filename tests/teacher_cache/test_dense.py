"""The teacher's whole distribution through a service, within its limits."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from teacher_cache.client import TeacherClient
from teacher_cache.dense import dense_logprobs
from teacher_cache.errors import ScoringError
from teacher_cache.identity import identify_checkpoint
from tests.conftest import VOCABULARY
from tests.teacher_cache.build_requests import VOCABULARY as SCRIPTED_VOCABULARY
from tests.teacher_cache.build_requests import make_request
from tests.teacher_cache.serving import ThreadedService
from tests.teacher_cache.test_transformers_scorer import naive, request, scorer


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_dense_logprobs_through_a_service_are_the_teachers_within_1e_5(
    tiny_llama_dir: Path, temperature: float
) -> None:
    teacher = scorer(tiny_llama_dir, temperature)
    identity = identify_checkpoint(tiny_llama_dir, temperature=temperature, dtype="fp32")
    asked = request(7, 40, draw="systematic(4)")
    five_positions = 5 * VOCABULARY * 4
    # A record of all 40 positions is beyond this service.
    with (
        ThreadedService(teacher, identity=identity, max_record_bytes=3 * five_positions) as service,
        TeacherClient([service.url]) as client,
    ):
        pieces = list(dense_logprobs(client, asked, vocabulary=VOCABULARY, piece_bytes=five_positions))
    assert [first for first, _ in pieces] == list(range(0, 40, 5))
    found = torch.cat([log_q_tV for _, log_q_tV in pieces]).double()
    expected = naive(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), asked, temperature)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_an_answer_beyond_the_context_is_an_error_and_an_empty_one_is_nothing() -> None:
    with ThreadedService() as service, TeacherClient([service.url]) as client:
        assert list(dense_logprobs(client, make_request(1, length=0), vocabulary=SCRIPTED_VOCABULARY)) == []
        with pytest.raises(ScoringError, match="context holds 64"):
            list(dense_logprobs(client, make_request(1, length=80), vocabulary=SCRIPTED_VOCABULARY))
        with pytest.raises(ScoringError, match="real vocabulary"):
            list(dense_logprobs(client, make_request(1), vocabulary=SCRIPTED_VOCABULARY + 1))


def test_whole_vocabulary_records_are_asked_for_in_calls_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    requests = [make_request(number, length=7, draw="full") for number in range(6)]
    with ThreadedService() as service, TeacherClient([service.url]) as client:
        post = client._client._http.post

        async def counting(*args: object, **settings: object) -> object:
            answer = await post(*args, **settings)
            calls.append(len(answer.content))
            return answer

        monkeypatch.setattr(client._client._http, "post", counting)
        monkeypatch.setattr("teacher_cache.client._ANSWER_BYTES", 2 * 7 * SCRIPTED_VOCABULARY * 4)
        results = client.score(requests)
    assert all(not isinstance(result, ScoringError) for result in results)
    assert len(calls) == 3
    assert max(calls) < 2.2 * 7 * SCRIPTED_VOCABULARY * 4
