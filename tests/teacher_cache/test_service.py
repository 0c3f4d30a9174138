"""The service as a client meets it, well-behaved or not."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import psutil
import pytest
import torch

from teacher_cache.client import ClientConfig, TeacherClient
from teacher_cache.errors import ServiceError
from teacher_cache.handshake import expectation_body
from teacher_cache.identity import Expectation
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.service import ServiceConfig, TeacherService, is_loopback
from teacher_cache.wire import decode_requests, decode_results, encode_requests
from tests.teacher_cache.build_requests import (
    DESIGNS,
    IDENTITY,
    VOCABULARY,
    CountingScorer,
    assert_same,
    make_request,
    score_one,
)
from tests.teacher_cache.serving import ThreadedService

REQUESTS = [
    *[make_request(1, design=design) for design in DESIGNS],
    *[make_request(2, draw=design) for design in DESIGNS if not design.startswith("two_phase")],
    make_request(3, design="systematic(4)", draw="top_k(4)"),
    make_request(4, length=0, draw="systematic(2)"),
]


@pytest.fixture(scope="module")
def service() -> Iterator[ThreadedService]:
    with ThreadedService(max_body_bytes=100_000, max_record_bytes=200_000) as running:
        yield running


def body_of(*requests: ScoreRequest, precision: str = "fp32") -> bytes:
    return encode_requests(requests, vocabulary=VOCABULARY, precision=precision)


def post(service: ThreadedService, body: bytes, **headers: str) -> httpx.Response:
    return httpx.post(f"{service.url}/v1/score", content=body, headers=headers, timeout=60)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r.candidates and r.candidates.design}-{r.draw}")
def test_a_request_arrives_as_it_was_sent(request_: ScoreRequest) -> None:
    (back,), precision = decode_requests(body_of(request_), vocabulary=VOCABULARY)
    assert precision == "fp32"
    assert (back.uid, back.prompt_ids, back.draw, back.run_seed) == (
        request_.uid,
        request_.prompt_ids,
        request_.draw,
        request_.run_seed,
    )
    assert torch.equal(back.response_ids_T, request_.response_ids_T)
    assert_same(score_one(replace(back, candidates=request_.candidates)), score_one(request_))


def test_every_kind_of_request_comes_back_as_if_scored_here(service: ThreadedService) -> None:
    answer = post(service, body_of(*REQUESTS))
    assert answer.status_code == 200
    results = decode_results(answer.content, REQUESTS, temperature=1.0, teacher="default")
    for result, request in zip(results, REQUESTS, strict=True):
        assert isinstance(result, TeacherRecord)
        assert_same(result, score_one(request))


def test_an_over_long_sequence_is_refused_for_that_sample_only(service: ThreadedService) -> None:
    requests = [make_request(1), make_request(2, length=80), make_request(3)]
    results = decode_results(post(service, body_of(*requests)).content, requests, temperature=1.0, teacher="default")
    assert [isinstance(result, TeacherRecord) for result in results] == [True, False, True]
    assert "context holds 64" in str(results[1])


def test_a_record_that_would_be_too_large_is_refused_for_that_sample_only(service: ThreadedService) -> None:
    requests = [make_request(1), make_request(2, length=59, draw="full")]
    results = decode_results(post(service, body_of(*requests)).content, requests, temperature=1.0, teacher="default")
    assert isinstance(results[0], TeacherRecord)
    assert "lower the budget" in str(results[1])


def test_a_body_that_is_too_large_is_413_whether_or_not_it_says_so(service: ThreadedService) -> None:
    assert post(service, b"x" * 100_001).status_code == 413

    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 10_000

    assert httpx.post(f"{service.url}/v1/score", content=parts(), timeout=60).status_code == 413


def test_another_teachers_fingerprint_is_409(service: ThreadedService) -> None:
    assert post(service, body_of(make_request(1)), **{"X-Teacher-Fingerprint": "other"}).status_code == 409
    own = {"X-Teacher-Fingerprint": IDENTITY.fingerprint}
    assert post(service, body_of(make_request(1)), **own).status_code == 200


def test_a_body_that_was_damaged_on_its_way_is_asked_for_again(service: ThreadedService) -> None:
    answer = post(service, body_of(make_request(1)), **{"X-Body-Digest": "0" * 32})
    assert answer.status_code == 503
    assert "send it again" in answer.json()["error"]


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (Expectation(temperature=0.6), "temperature: 0.6 here, 1.0 at the teacher"),
        (Expectation(tokenizer=replace(IDENTITY.tokenizer, digest="z")), "tokenizer hash: z here, t at the teacher"),
        (Expectation(tokenizer=replace(IDENTITY.tokenizer, vocabulary=7)), "vocabulary size: 7 here, 300"),
        (Expectation(tokenizer=replace(IDENTITY.tokenizer, special_ids=(5,))), "special ids: [5] here, [0, 1]"),
        (Expectation(draw="two_phase(8,4)"), "a teacher draws in one phase"),
        (Expectation(draw="systematic(301)"), "lower the budget or take full"),
        (Expectation(designs=("sistematic(4)",)), "did you mean systematic"),
    ],
)
def test_a_handshake_names_the_difference(service: ThreadedService, expected: Expectation, says: str) -> None:
    answer = httpx.post(f"{service.url}/v1/handshake", content=expectation_body(expected))
    assert answer.status_code == 409
    (difference,) = answer.json()["differences"]
    assert says in difference


def test_a_handshake_that_fits_is_answered_with_the_identity(service: ThreadedService) -> None:
    expected = Expectation(tokenizer=IDENTITY.tokenizer, temperature=1.0, draw="systematic(4)", designs=DESIGNS)
    answer = httpx.post(f"{service.url}/v1/handshake", content=expectation_body(expected))
    assert answer.status_code == 200
    assert answer.json()["fingerprint"] == IDENTITY.fingerprint


def test_health_and_readiness(service: ThreadedService) -> None:
    assert httpx.get(f"{service.url}/health").json()["status"] == "ok"
    assert httpx.get(f"{service.url}/ready").status_code == 200


def test_only_health_is_told_to_a_caller_without_the_token() -> None:
    with ThreadedService(token="secret") as running:
        assert httpx.get(f"{running.url}/health").status_code == 200
        for path in ("/ready", "/v1/teacher"):
            assert httpx.get(running.url + path).status_code == 401
            right = httpx.get(running.url + path, headers={"Authorization": "Bearer secret"})
            assert right.status_code == 200
        for path in ("/v1/score", "/v1/handshake"):
            wrong = httpx.post(running.url + path, content=b"", headers={"Authorization": "Bearer secreT"})
            assert wrong.status_code == 401


def test_an_address_that_others_reach_needs_a_token() -> None:
    config = ServiceConfig(host="0.0.0.0")
    with pytest.raises(ServiceError, match="TEACHER_CACHE_TOKEN"):
        TeacherService(CountingScorer(), IDENTITY, config)
    TeacherService(CountingScorer(), IDENTITY, config, token="x")
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == [
        True,
        True,
        True,
        False,
        False,
    ]


class SlowScorer(CountingScorer):
    """Waits for leave, and notes how much came at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = threading.Event()
        self.batches: list[int] = []

    def score(self, requests: Sequence[ScoreRequest]):
        self.batches.append(len(requests))
        assert self.leave.wait(30)
        return super().score(requests)


def in_threads(service: ThreadedService, numbers: Sequence[int]) -> tuple[list[threading.Thread], dict[int, int]]:
    statuses: dict[int, int] = {}

    def call(number: int) -> None:
        statuses[number] = post(service, body_of(make_request(number))).status_code

    threads = [threading.Thread(target=call, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    return threads, statuses


def wait_for_queue(service: ThreadedService, tokens: int) -> None:
    deadline = time.monotonic() + 30
    while httpx.get(f"{service.url}/health").json()["queued"] < tokens:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_waits_while_the_teacher_works_is_scored_together() -> None:
    scorer = SlowScorer()
    with ThreadedService(scorer) as running:
        threads, statuses = in_threads(running, range(8))
        wait_for_queue(running, 8 * 12)
        scorer.leave.set()
        for thread in threads:
            thread.join(30)
    assert list(statuses.values()) == [200] * 8
    assert len(scorer.batches) <= 3
    assert sum(scorer.batches) == 8


def test_a_full_queue_turns_away_with_a_time_and_takes_more_later() -> None:
    scorer = SlowScorer()
    with ThreadedService(scorer, queue_tokens=40) as running:
        threads, statuses = in_threads(running, range(3))
        wait_for_queue(running, 36)
        turned_away = post(running, body_of(make_request(9)))
        assert turned_away.status_code == 429
        assert int(turned_away.headers["Retry-After"]) >= 1
        scorer.leave.set()
        for thread in threads:
            thread.join(30)
        assert list(statuses.values()) == [200] * 3
        assert post(running, body_of(make_request(9))).status_code == 200


def test_a_stop_finishes_what_was_accepted() -> None:
    scorer = SlowScorer()
    running = ThreadedService(scorer)
    with running:
        threads, statuses = in_threads(running, range(4))
        wait_for_queue(running, 4 * 12)
        stopper = threading.Thread(target=running.stop)
        stopper.start()
        time.sleep(0.3)
        scorer.leave.set()
        for thread in (*threads, stopper):
            thread.join(30)
    assert list(statuses.values()) == [200] * 4


class FragileScorer(CountingScorer):
    """Fails on one sample, and on every batch that holds it."""

    def score(self, requests: Sequence[ScoreRequest]):
        if any(request.uid == "0-2-0-0" for request in requests):
            raise RuntimeError("out of memory")
        return super().score(requests)


def test_a_sample_that_the_teacher_fails_on_costs_no_other() -> None:
    requests = [make_request(number) for number in range(4)]
    with ThreadedService(FragileScorer()) as running:
        results = decode_results(
            post(running, body_of(*requests)).content, requests, temperature=1.0, teacher="default"
        )
    assert [isinstance(result, TeacherRecord) for result in results] == [True, True, False, True]
    assert "out of memory" in str(results[2])


class DyingScorer(CountingScorer):
    """Scores one batch, and fails from then on, as a GPU does after an illegal access."""

    def score(self, requests: Sequence[ScoreRequest]):
        if self.scored:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().score(requests)


def test_a_teacher_that_fails_on_what_it_scored_before_ends_the_scoring_and_refuses_no_sample() -> None:
    with ThreadedService(DyingScorer()) as running:
        assert post(running, body_of(make_request(1))).status_code == 200
        assert post(running, body_of(make_request(2), make_request(3))).status_code == 503
        assert httpx.get(f"{running.url}/health").status_code == 503


class BrokenScorer(CountingScorer):
    """Gives fewer results than requests: a mistake in the scorer itself."""

    def score(self, requests: Sequence[ScoreRequest]):
        return super().score(requests)[:-1]


def test_a_scoring_loop_that_ends_fails_its_callers_and_its_health() -> None:
    with ThreadedService(BrokenScorer()) as running:
        assert post(running, body_of(make_request(1))).status_code == 503
        assert httpx.get(f"{running.url}/health").status_code == 503
        assert post(running, body_of(make_request(1))).status_code == 503


def test_a_service_whose_scorer_broke_down_ends_with_an_error_and_one_started_anew_serves_its_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    requests = [make_request(1)]
    broken = TeacherService(BrokenScorer(), IDENTITY, ServiceConfig(port=port))
    with ThreadPoolExecutor(2) as pool:
        ended = pool.submit(broken.serve)
        with TeacherClient([f"http://127.0.0.1:{port}"], config=ClientConfig(deadline_s=60)) as client:
            asked = pool.submit(client.score, requests)
            with pytest.raises(ServiceError, match="the scorer broke down: .*start the service again"):
                ended.result(60)
            with ThreadedService(port=port):
                assert isinstance(asked.result(60)[0], TeacherRecord)
    told = [record.getMessage() for record in caplog.records if record.name == "teacher_cache.replicas"]
    assert any("scoring has ended" in message and "asked again" in message for message in told), told


def malformed(generator: random.Random, good: bytes) -> bytes:
    """Noise, a cut, a flip, an insertion, or a changed header."""
    kind = generator.randrange(6)
    place = generator.randrange(len(good))
    if kind == 0:
        return generator.randbytes(generator.randrange(300))
    if kind == 1:
        return good[:place]
    if kind == 2:
        return good[:place] + generator.randbytes(1 + generator.randrange(8)) + good[place:]
    if kind == 3:
        return (2 ** generator.randrange(64)).to_bytes(8, "little") + good[8:]
    damaged = bytearray(good)
    for _ in range(1 + generator.randrange(4)):
        # Most of the damage goes to the header, where it matters.
        damaged[generator.randrange(len(good) if kind == 4 else 900)] = generator.randrange(256)
    return bytes(damaged)


GOOD = body_of(make_request(1, design="two_phase(8,3)", draw="systematic(4)"), make_request(2, design="full"))


def attacks(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Paths and malformed bodies."""
    generator = random.Random(seed)
    for number in range(count):
        if number % 9 == 0:
            yield "/v1/handshake", malformed(generator, expectation_body(Expectation()) * 20)
        else:
            yield "/v1/score", malformed(generator, GOOD)


def attacked(count: int, seed: int) -> tuple[set[int], float]:
    """Statuses of malformed requests, and growth in MB of the process after the first fifth of them."""
    teacher = TeacherService(CountingScorer(), IDENTITY, ServiceConfig())
    memory = psutil.Process().memory_info
    seen: set[int] = set()

    async def go() -> float:
        async with (
            teacher._lifespan(teacher.app),
            httpx.AsyncClient(transport=httpx.ASGITransport(teacher.app), base_url="http://teacher") as client,
        ):
            warm = 0
            for number, (path, body) in enumerate(attacks(count, seed)):
                seen.add((await client.post(path, content=body)).status_code)
                warm = memory().rss if number == count // 5 else warm
            assert (await client.post("/v1/score", content=body_of(make_request(1)))).status_code == 200
            return (memory().rss - warm) / 2**20

    return seen, asyncio.run(go())


def test_random_malformed_requests_never_make_a_500() -> None:
    seen, _ = attacked(1000, seed=1)
    assert seen <= {200, 400, 409, 413}
    assert 400 in seen


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_malformed_requests_leave_the_service_whole_and_memory_flat() -> None:
    seen, grown_mb = attacked(10_000, seed=2)
    assert seen <= {200, 400, 409, 413}
    assert grown_mb < 20
