"""The client loses no sample to what can pass, and says at once what cannot."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from teacher_cache.client import AsyncTeacherClient, ClientConfig, TeacherClient
from teacher_cache.errors import HandshakeError, ScoringError, ServiceError
from teacher_cache.identity import Expectation
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from tests.teacher_cache.build_requests import IDENTITY, CountingScorer, assert_same, make_request, score_one
from tests.teacher_cache.serving import CuttingProxy, ThreadedService

SHORT = ClientConfig(deadline_s=20, chunk_tokens=24)
REQUESTS = [make_request(number, design="systematic(4)", draw="top_k(3)") for number in range(12)]


def assert_all_right(results: Sequence[TeacherRecord | ScoringError], requests: Sequence[ScoreRequest]) -> None:
    assert len(results) == len(requests)
    for result, request in zip(results, requests, strict=True):
        assert isinstance(result, TeacherRecord), result
        assert_same(result, score_one(request))


def test_a_client_is_a_scorer() -> None:
    with ThreadedService() as service, TeacherClient([service.url], config=SHORT) as client:
        assert client.max_context == 64
        assert client.identity == IDENTITY
        assert_all_right(client.score(REQUESTS), REQUESTS)
        assert client.score([]) == []


def test_the_async_client_gives_the_same() -> None:
    async def go(url: str) -> list[TeacherRecord | ScoringError]:
        client = AsyncTeacherClient([url], config=SHORT)
        with pytest.raises(ServiceError, match="connect"):
            await client.score(REQUESTS)
        await client.connect()
        results = await client.score(REQUESTS)
        await client.aclose()
        return results

    with ThreadedService() as service:
        assert_all_right(asyncio.run(go(service.url)), REQUESTS)


def test_half_precision_on_the_wire_is_close() -> None:
    config = replace(SHORT, precision="fp16", teacher="math")
    with ThreadedService() as service, TeacherClient([service.url], config=config) as client:
        (result,) = client.score(REQUESTS[:1])
        assert isinstance(result, TeacherRecord)
        assert_same(replace(result, teacher="default"), score_one(REQUESTS[0]), 0.01)


def test_a_sample_that_is_refused_is_an_error_in_its_place() -> None:
    requests = [REQUESTS[0], make_request(1, length=90), REQUESTS[2]]
    with ThreadedService() as service, TeacherClient([service.url], config=SHORT) as client:
        results = client.score(requests)
    assert isinstance(results[1], ScoringError)
    assert_all_right([results[0], results[2]], [requests[0], requests[2]])


def test_a_call_that_is_too_large_is_halved_and_a_sample_that_is_too_large_is_refused() -> None:
    config = replace(SHORT, chunk_tokens=10**6)
    requests = [*[make_request(number) for number in range(6)], make_request(7, length=55, design="multi_sample(400)")]
    with ThreadedService(max_body_bytes=2000) as service, TeacherClient([service.url], config=config) as client:
        results = client.score(requests)
    assert_all_right(results[:6], requests[:6])
    assert isinstance(results[6], ScoringError)
    assert "larger than 2000 bytes" in str(results[6])


def test_a_mismatch_is_refused_at_once_with_the_difference_named() -> None:
    with ThreadedService() as service, pytest.raises(HandshakeError, match="temperature: 0.6 here, 1.0"):
        TeacherClient([service.url], expected=Expectation(temperature=0.6), config=SHORT)


def test_two_replicas_with_different_teachers_are_refused() -> None:
    with (
        ThreadedService() as one,
        ThreadedService(identity=replace(IDENTITY, weights="other")) as other,
        pytest.raises(HandshakeError, match="different teachers"),
    ):
        TeacherClient([one.url, other.url], config=SHORT)


def test_a_wrong_token_is_refused_at_once() -> None:
    started = time.monotonic()
    with ThreadedService(token="secret") as service:
        with pytest.raises(ServiceError, match="401"):
            TeacherClient([service.url], config=SHORT)
        with TeacherClient([service.url], config=replace(SHORT, token="secret")) as client:
            assert_all_right(client.score(REQUESTS), REQUESTS)
    assert time.monotonic() - started < 15


def test_without_a_service_the_client_gives_up_at_its_deadline_and_says_why() -> None:
    started = time.monotonic()
    with pytest.raises(ServiceError, match=r"within 0\.5 s .*Connect"):
        TeacherClient(["http://127.0.0.1:9"], config=replace(SHORT, deadline_s=0.5))
    assert time.monotonic() - started < 5


def test_work_is_shared_and_one_replica_down_costs_no_sample() -> None:
    with ThreadedService(CountingScorer(delay_s=0.0005)) as one:
        other = ThreadedService(CountingScorer(delay_s=0.0005))
        with other, TeacherClient([one.url, other.url], config=SHORT) as client:
            assert_all_right(client.score(REQUESTS), REQUESTS)
            assert 0 < other.scorer.scored < 12
            other.stop()
            assert_all_right(client.score(REQUESTS), REQUESTS)


def test_a_replica_that_was_down_at_first_is_used_once_it_is_up() -> None:
    with ThreadedService() as one:
        other = ThreadedService()
        port = other.port
        other._socket.close()
        with TeacherClient([one.url, other.url], config=SHORT) as client:
            assert_all_right(client.score(REQUESTS), REQUESTS)
            with ThreadedService(port=port) as late:
                deadline = time.monotonic() + 15
                while not late.scorer.scored and time.monotonic() < deadline:
                    assert_all_right(client.score(REQUESTS), REQUESTS)
                assert late.scorer.scored


def test_a_slow_replica_gets_less_of_the_work() -> None:
    with (
        ThreadedService(CountingScorer(delay_s=0.02)) as slow,
        ThreadedService(CountingScorer(delay_s=0.0005)) as fast,
        TeacherClient([slow.url, fast.url], config=replace(SHORT, chunk_tokens=12)) as client,
    ):
        requests = [make_request(number) for number in range(60)]
        assert_all_right(client.score(requests), requests)
        assert slow.scorer.scored < fast.scorer.scored


def test_a_replica_that_hangs_is_left_for_another() -> None:
    hung = threading.Event()

    class Hanging(CountingScorer):
        def score(self, requests: Sequence[ScoreRequest]):
            hung.wait(20)
            return super().score(requests)

    with ThreadedService(Hanging()) as stuck, ThreadedService() as good:
        try:
            config = replace(SHORT, attempt_s=0.5)
            with TeacherClient([stuck.url, good.url], config=config) as client:
                assert_all_right(client.score(REQUESTS), REQUESTS)
        finally:
            hung.set()


@pytest.mark.parametrize(("after", "flips"), [(200, False), (500, True)])
def test_an_answer_that_is_cut_or_damaged_is_asked_for_again(after: int, flips: bool) -> None:
    with (
        ThreadedService() as service,
        CuttingProxy(service.port, cuts=3, after=after, flips=flips) as proxy,
        TeacherClient([proxy.url], config=replace(SHORT, chunk_tokens=60)) as client,
    ):
        assert_all_right(client.score(REQUESTS), REQUESTS)
        assert proxy._cuts == 0


def test_a_service_that_is_killed_and_restarted_under_load_loses_no_sample() -> None:
    requests = [make_request(number) for number in range(40)]
    first = ThreadedService(CountingScorer(delay_s=0.002))
    results: list[TeacherRecord | ScoringError] = []
    with first, TeacherClient([first.url], config=replace(SHORT, chunk_tokens=12)) as client:
        caller = threading.Thread(target=lambda: results.extend(client.score(requests)), daemon=True)
        caller.start()
        deadline = time.monotonic() + 20
        while first.scorer.scored < 5 and time.monotonic() < deadline:
            time.sleep(0.005)
        first.server.force_exit = True
        first.stop()
        time.sleep(0.3)
        with ThreadedService(port=first.port) as second:
            caller.join(30)
            assert second.scorer.scored > 0
    assert_all_right(results, requests)


def test_a_full_service_is_waited_for() -> None:
    with (
        ThreadedService(CountingScorer(delay_s=0.002), queue_tokens=30) as service,
        TeacherClient([service.url], config=replace(SHORT, chunk_tokens=24)) as client,
    ):
        assert_all_right(client.score(REQUESTS), REQUESTS)


def test_whoever_watches_is_told_while_a_service_is_waited_for() -> None:
    told = []
    slow = CountingScorer(delay_s=0.2)
    with ThreadedService(slow) as service:
        with TeacherClient([service.url], config=SHORT, while_waiting=lambda: told.append(1)) as client:
            client.score([make_request(1)])
        assert told


@pytest.mark.parametrize("url", ["", "127.0.0.1:8471", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ServiceError, match="is no"):
        TeacherClient([url], config=SHORT)


def test_a_server_of_another_kind_is_told_apart() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(ServiceError, match="is it a teacher service"):
            TeacherClient([f"http://127.0.0.1:{other.server_port}"], config=SHORT)
        other.shutdown()
