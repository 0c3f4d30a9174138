"""What can be had from a stock server's prompt_logprobs, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from teacher_cache.client import ClientConfig
from teacher_cache.errors import HandshakeError, ScoringError, ServiceError
from teacher_cache.identity import Expectation
from teacher_cache.prompt_logprobs_scorer import PromptLogprobsScorer, impossible
from teacher_cache.record import TeacherRecord
from tests.conftest import EOS, VOCABULARY, make_tiny_tokenizer
from tests.teacher_cache.build_requests import make_request
from tests.teacher_cache.stock_server import StockServer, log_q
from tests.teacher_cache.test_transformers_scorer import request

TOP = Expectation(temperature=1.0, draw="top_k(5)", designs=("top_k(5)",))


def connect(*urls: str, expected: Expectation = TOP, deadline_s: float = 20.0) -> PromptLogprobsScorer:
    config = ClientConfig(deadline_s=deadline_s, teacher="far")
    return PromptLogprobsScorer(urls, expected=expected, tokenizer=make_tiny_tokenizer(), config=config)


@pytest.mark.parametrize("spec", ["top_k(5)", "top_k_tail(5)"])
def test_own_logprob_and_likeliest_tokens_are_the_servers_at_each_position(
    tiny_tokenizer: PreTrainedTokenizerFast, spec: str
) -> None:
    requests = [request(prompt, response, draw=spec) for prompt, response in [(3, 9), (1, 1), (20, 30), (2, 0)]]
    expected_of = Expectation(temperature=1.0, draw=spec, designs=(spec,))
    with StockServer(tiny_tokenizer) as server, connect(server.url, expected=expected_of) as scorer:
        assert scorer.max_context == 63
        records = scorer.score(requests)
    for asked, record in zip(requests, records, strict=True):
        assert isinstance(record, TeacherRecord), record
        assert (record.teacher, record.temperature) == ("far", 1.0)
        assert record.entropy_T.isnan().all()
        ids = [*asked.prompt_ids, *asked.response_ids_T.tolist()]
        drawn = record.of_origin("teacher")
        assert drawn.design == spec
        assert drawn.log_q_TC is not None
        for t, token in enumerate(asked.response_ids_T.tolist()):
            expected = log_q(ids[: len(asked.prompt_ids) + t])
            assert float(record.log_q_T[t]) == pytest.approx(float(expected[token]), abs=1e-6)
            top = expected.topk(5)
            assert drawn.ids_TC[t].tolist() == top.indices.tolist()
            torch.testing.assert_close(drawn.log_q_TC[t], top.values)
            assert drawn.log_w_TC[t].tolist() == [0.0] * 5


def test_without_a_design_only_the_tokens_own_logprob_is_asked_for(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with StockServer(tiny_tokenizer) as server, connect(server.url, expected=Expectation()) as scorer:
        (record,) = scorer.score([request(3, 9)])
        assert {asked["prompt_logprobs"] for asked in server.asked} == {0}
    assert isinstance(record, TeacherRecord)
    assert record.sets == ()
    assert record.log_q_T.isfinite().all()


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (Expectation(temperature=0.7), "temperature: 0.7 here"),
        (Expectation(draw="systematic(16)", designs=("systematic(16)",)), "teacher-drawn systematic"),
        (Expectation(draw="full", designs=("full",)), "teacher-drawn full"),
        (Expectation(designs=("top_k(5)",)), "student-drawn top_k"),
        (Expectation(draw="top_k(5)", designs=("top_k(5)", "top_k(5)")), "student-drawn top_k"),
    ],
)
def test_what_a_stock_server_cannot_give_is_refused_before_it_is_asked(expected: Expectation, says: str) -> None:
    with pytest.raises(HandshakeError, match="teacher-cache serve") as refused:
        connect("http://127.0.0.1:9", expected=expected)
    assert says in str(refused.value)
    assert len(impossible(expected)) == 1


def test_each_difference_is_named() -> None:
    both = Expectation(temperature=2.0, draw="gumbel(4)", designs=("systematic(4)", "gumbel(4)"))
    assert [found.partition(":")[0] for found in impossible(both)] == ["temperature", "design", "design"]


def test_another_tokenizer_another_special_token_and_several_models_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    class Another:
        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [1, 2]}

        def decode(self, ids: list[int]) -> str:
            return tiny_tokenizer.decode(ids)

    with StockServer(Another()) as server, pytest.raises(HandshakeError, match=r"tokenizer: .* \[1, 2\] at"):
        connect(server.url)

    class OtherEnd(Another):
        def __call__(self, text: str, **settings: object) -> dict[str, list[int]]:
            return tiny_tokenizer(text, **settings)

        def decode(self, ids: list[int]) -> str:
            return "</s>" if ids == [EOS] else tiny_tokenizer.decode(ids)

    with StockServer(OtherEnd()) as server, pytest.raises(HandshakeError, match=f"special token {EOS}"):
        connect(server.url)
    with StockServer(tiny_tokenizer, models=("a", "b")) as server, pytest.raises(HandshakeError, match="one model"):
        connect(server.url)


def test_a_budget_above_the_servers_limit_is_refused_with_what_the_server_says(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    many = Expectation(draw="top_k(64)", designs=("top_k(64)",))
    with StockServer(tiny_tokenizer) as server, pytest.raises(HandshakeError, match=r"above 20.*--max-logprobs"):
        connect(server.url, expected=many)


def _without_own(rows: list[Any]) -> None:
    least = max(rows[5], key=lambda index: rows[5][index]["rank"])
    del rows[5][least]


def _without_the_third(rows: list[Any]) -> None:
    third = next(index for index, entry in rows[5].items() if entry["rank"] == 3)
    del rows[5][third]


def _beyond(rows: list[Any]) -> None:
    rows[5][str(VOCABULARY)] = {"logprob": -1.0, "rank": 1}


def _logits(rows: list[Any]) -> None:
    for entry in rows[5].values():
        entry["logprob"] = abs(entry["logprob"])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_without_own, "position 2 came back with no logprob of its own token"),
        (_without_the_third, "position 2 came back with 4 of the 5"),
        (_beyond, f"position 2 came back with a token outside the vocabulary of {VOCABULARY}"),
        (_logits, "--logprobs-mode raw_logprobs"),
        (lambda rows: rows.pop(), "8 positions came back of 9"),
        (lambda rows: rows.__setitem__(5, None), "no prompt_logprobs as vLLM's"),
    ],
)
def test_a_missing_or_wrong_score_is_that_records_error_and_never_a_number(
    tiny_tokenizer: PreTrainedTokenizerFast, damage: Callable[[list[Any]], None], says: str
) -> None:
    with StockServer(tiny_tokenizer, damage=damage) as server, connect(server.url) as scorer:
        asked = request(3, 9, draw="top_k(5)")
        (result,) = scorer.score([asked])
    assert isinstance(result, ScoringError)
    assert says in str(result)
    assert asked.uid in str(result)


def test_a_request_that_is_refused_costs_no_other(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    drawn = make_request(1, length=3, design="top_k(4)").candidates
    assert drawn is not None
    wrong = [
        request(40, 24, draw="top_k(5)"),
        request(3, 4, draw="top_k(4)"),
        replace(request(3, 3), candidates=replace(drawn, ids_TC=drawn.ids_TC % VOCABULARY)),
    ]
    with StockServer(tiny_tokenizer) as server, connect(server.url) as scorer:
        results = scorer.score([request(3, 4, draw="top_k(5)"), *wrong, request(3, 5, draw="top_k(5)")])
        server.refuses = [400]
        (refused,) = scorer.score([request(3, 4, draw="top_k(5)")])
    assert [isinstance(result, TeacherRecord) for result in results] == [True, False, False, False, True]
    assert "context holds 63" in str(results[1])
    assert "more than was agreed" in str(results[2])
    assert "more than was agreed" in str(results[3])
    assert "the server refuses it (400)" in str(refused)


def test_an_answer_on_which_a_server_always_fails_costs_that_answer_alone(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    good, bad = request(3, 4, draw="top_k(5)"), request(3, 5, draw="top_k(5)")
    broken = [*bad.prompt_ids, *bad.response_ids_T.tolist()]
    with StockServer(tiny_tokenizer, fails=lambda ids: ids == broken) as server, connect(server.url) as scorer:
        scored, failed, again = scorer.score([good, bad, good])
    assert isinstance(scored, TeacherRecord)
    assert isinstance(again, TeacherRecord)
    assert "the server refuses it (500)" in str(failed)
    assert "broken on this" in str(failed)


def test_a_server_that_fails_on_everything_ends_the_call(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    broken: list[bool] = []
    with (
        StockServer(tiny_tokenizer, fails=lambda ids: bool(broken)) as server,
        connect(server.url, deadline_s=2.0) as scorer,
    ):
        broken.append(True)
        with pytest.raises(ServiceError, match=r"no server answered within 2 s .*status 500"):
            scorer.score([request(3, 4, draw="top_k(5)")])


def test_failures_that_may_pass_are_tried_again_and_one_that_may_not_ends_the_call(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    asked = [request(3, 4, draw="top_k(5)")]
    with StockServer(tiny_tokenizer) as server, connect(server.url) as scorer:
        server.refuses = [500, 429, 503]
        assert isinstance(scorer.score(asked)[0], TeacherRecord)
        server.refuses = [401]
        with pytest.raises(ServiceError, match="refuses the call"):
            scorer.score(asked)
    with StockServer(tiny_tokenizer) as server:
        scorer = connect(server.url, deadline_s=0.5)
    with scorer, pytest.raises(ServiceError, match="no server answered within"):
        scorer.score(asked)
    with pytest.raises(ServiceError, match="no server answers"):
        connect("http://127.0.0.1:9", deadline_s=0.3)
