"""Clients of the scoring service: ``AsyncTeacherClient``, and ``TeacherClient``, which is a Scorer.

    requests ──> chunks of like size ──> the least loaded replica that answers ──> results, in order

Tried again until the deadline: no connection, a connection that breaks or goes silent, an answer that is cut or
damaged, 429, 502, 503, 504. Scoring twice gives the same record, so that is safe. Never tried again: a request that the
service understood and refused.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from teacher_cache.errors import CodecError, HandshakeError, ScoringError, ServiceError
from teacher_cache.handshake import expectation_body
from teacher_cache.identity import Expectation, TeacherIdentity
from teacher_cache.record import TeacherRecord
from teacher_cache.replicas import Replica, Replicas
from teacher_cache.scorer import ScoreRequest
from teacher_cache.wire import (
    DIGEST_HEADER,
    FINGERPRINT_HEADER,
    MEDIA_TYPE,
    body_digest,
    candidates_of,
    decode_results,
    encode_requests,
)

T = TypeVar("T")
Result = TeacherRecord | ScoringError
_PASSING = (429, 502, 503, 504)
_CHUNKS_A_REPLICA = 4
_ANSWER_BYTES = 2**26
"""Scores that one call asks for: an answer over the whole vocabulary takes megabytes a token."""
_TELL_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    """How a client asks."""

    token: str | None = None
    """Bearer token, where the service wants one."""
    deadline_s: float = 600.0
    """Seconds until a call gives up, all tries together."""
    attempt_s: float = 120.0
    """Seconds until one try counts as failed and another replica is asked."""
    connect_s: float = 5.0
    """Seconds to make a connection."""
    chunk_tokens: int = 4096
    """Tokens sent in one request; a longer answer goes alone."""
    precision: str = "fp32"
    """Precision of scores on the wire: ``fp32``, ``fp16`` or ``bf16``."""
    teacher: str = "default"
    """Name written into the records."""

    def __post_init__(self) -> None:
        for name, value in (
            ("deadline_s", self.deadline_s),
            ("attempt_s", self.attempt_s),
            ("connect_s", self.connect_s),
            ("chunk_tokens", self.chunk_tokens),
        ):
            if value <= 0:
                raise ServiceError(f"{name} is {value}; expected above 0")


class AsyncTeacherClient:
    """A client for one event loop; ``connect`` comes first."""

    def __init__(
        self, urls: Sequence[str], *, expected: Expectation | None = None, config: ClientConfig | None = None
    ) -> None:
        if not urls:
            raise ServiceError("no service URL; give at least one, such as http://127.0.0.1:8471")
        for url in urls:
            _require_url(url)
        self._expected = expected or Expectation()
        self._config = config or ClientConfig()
        self._replicas = Replicas([Replica(url.rstrip("/")) for url in urls])
        self._slots = asyncio.Semaphore(_CHUNKS_A_REPLICA * len(urls))
        self._identity: TeacherIdentity | None = None
        headers = {} if self._config.token is None else {"Authorization": f"Bearer {self._config.token}"}
        timeout = httpx.Timeout(self._config.attempt_s, connect=self._config.connect_s)
        self._http = httpx.AsyncClient(timeout=timeout, headers=headers, trust_env=False)

    @property
    def identity(self) -> TeacherIdentity:
        """The teacher behind the services; ServiceError before ``connect``."""
        if self._identity is None:
            raise ServiceError("the client is not connected; call connect() first")
        return self._identity

    async def connect(self) -> TeacherIdentity:
        """Shake hands with every replica that answers; one must before the deadline.

        HandshakeError names what differs, from what is expected or between two replicas.
        """
        deadline = time.monotonic() + self._config.deadline_s
        while self._identity is None:
            found = await asyncio.gather(*(self._shake(replica, deadline) for replica in self._replicas.all))
            teachers = [teacher for teacher in found if teacher is not None]
            for teacher in teachers[1:]:
                self._require_same(teachers[0], teacher)
            if teachers:
                self._identity = teachers[0]
            elif time.monotonic() + self._replicas.next_try_s() >= deadline:
                raise self._gave_up()
            else:
                await asyncio.sleep(self._replicas.next_try_s())
        return self._identity

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Result]:
        """One result a request, in order. ServiceError at the deadline, or when a service refuses the whole call."""
        deadline = time.monotonic() + self._config.deadline_s
        chunks = _chunks(requests, self._config.chunk_tokens, self.identity.tokenizer.vocabulary)
        scored = await asyncio.gather(*(self._score_chunk([requests[i] for i in chunk], deadline) for chunk in chunks))
        results: dict[int, Result] = {}
        for chunk, part in zip(chunks, scored, strict=True):
            results.update(zip(chunk, part, strict=True))
        return [results[place] for place in range(len(requests))]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _score_chunk(self, requests: Sequence[ScoreRequest], deadline: float) -> list[Result]:
        body = encode_requests(
            requests, vocabulary=self.identity.tokenizer.vocabulary, precision=self._config.precision
        )
        headers = {
            "Content-Type": MEDIA_TYPE,
            FINGERPRINT_HEADER: self.identity.fingerprint,
            DIGEST_HEADER: body_digest(body),
        }
        tokens = sum(len(request.prompt_ids) + len(request.response_ids_T) for request in requests)
        async with self._slots:
            while True:
                replica = await self._free_replica(deadline)
                replica.load += tokens
                try:
                    answer = await self._post(replica, "/v1/score", body, headers, deadline)
                    if answer is not None and answer.status_code == 200:
                        if answer.headers.get(DIGEST_HEADER) != body_digest(answer.content):
                            raise CodecError("other bytes than the service sent")
                        results = decode_results(
                            answer.content,
                            requests,
                            temperature=self.identity.temperature,
                            teacher=self._config.teacher,
                        )
                        replica.answered()
                        return results
                except CodecError as error:
                    replica.failed(f"a damaged answer ({error})")
                    continue
                finally:
                    replica.load -= tokens
                if answer is not None and answer.status_code == 413:
                    break
                if answer is not None:
                    raise _refused(replica, answer)
        return await self._in_halves(requests, _message(answer), deadline)

    async def _in_halves(self, requests: Sequence[ScoreRequest], problem: str, deadline: float) -> list[Result]:
        """What was too large for the service: in two calls, and a single request is refused."""
        if len(requests) == 1:
            return [ScoringError(f"{requests[0].uid}: {problem}")]
        middle = len(requests) // 2
        first = await self._score_chunk(requests[:middle], deadline)
        return first + await self._score_chunk(requests[middle:], deadline)

    async def _free_replica(self, deadline: float) -> Replica:
        while (replica := self._replicas.pick()) is None:
            pause = self._replicas.next_try_s()
            if time.monotonic() + pause >= deadline:
                raise self._gave_up()
            await asyncio.sleep(pause)
        if time.monotonic() >= deadline:
            raise self._gave_up()
        return replica

    async def _post(
        self, replica: Replica, path: str, body: bytes, headers: dict[str, str], deadline: float
    ) -> httpx.Response | None:
        """The answer, or None for what may succeed another time; the replica is marked."""
        limit = max(0.001, min(self._config.attempt_s, deadline - time.monotonic()))
        try:
            async with asyncio.timeout(limit):
                answer = await self._http.post(replica.url + path, content=body, headers=headers)
        except (httpx.TransportError, TimeoutError) as error:
            replica.failed(repr(error))
            return None
        if answer.status_code == 429:
            replica.asked_to_wait(_retry_after_s(answer))
            return None
        if answer.status_code in _PASSING:
            replica.failed(f"status {answer.status_code}, {_message(answer)}")
            return None
        return answer

    async def _shake(self, replica: Replica, deadline: float) -> TeacherIdentity | None:
        body = expectation_body(self._expected)
        answer = await self._post(replica, "/v1/handshake", body, {"Content-Type": "application/json"}, deadline)
        if answer is None:
            return None
        if answer.status_code == 409:
            raise HandshakeError(f"{replica.url}: {'; '.join(map(str, _values(answer).get('differences', [])))}")
        if answer.status_code != 200:
            raise _refused(replica, answer)
        replica.answered()
        return TeacherIdentity.from_dict(_values(answer))

    def _require_same(self, one: TeacherIdentity, other: TeacherIdentity) -> None:
        found = Expectation(
            tokenizer=one.tokenizer, temperature=one.temperature, fingerprint=one.fingerprint
        ).differences(other)
        if found:
            raise HandshakeError(f"two replicas are different teachers: {'; '.join(found)}")

    def _gave_up(self) -> ServiceError:
        return ServiceError(
            f"no teacher service answered within {self._config.deadline_s:g} s ({self._replicas.problems()}); "
            "start one with `teacher-cache serve`, or raise the deadline"
        )


class TeacherClient:
    """A Scorer over services; safe from several threads. Connects at once.

    Its event loop has a thread of its own, so that it works inside another one (a notebook's) as well.

    while_waiting   called in the caller's thread about once a second until the answer is there: whoever watches over
                    the caller can tell that it waits, and will until its deadline, from that it hangs
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        expected: Expectation | None = None,
        config: ClientConfig | None = None,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        self._while_waiting = while_waiting or _nothing
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="teacher-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._wait(_made(urls, expected, config))
        except (ServiceError, HandshakeError):
            self._end_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def max_context(self) -> int:
        """Longest prompt plus response, in tokens."""
        return self.identity.max_context

    @property
    def identity(self) -> TeacherIdentity:
        """The teacher behind the services."""
        return self._client.identity

    def score(self, requests: Sequence[ScoreRequest]) -> list[Result]:
        """One result a request, in order. ServiceError at the deadline, or when a service refuses the whole call."""
        return self._wait(self._client.score(requests))

    def close(self) -> None:
        """Close the connections."""
        self._wait(self._client.aclose())
        self._end_loop()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        pending = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not wait([pending], timeout=_TELL_S).done:
            self._while_waiting()
        return pending.result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _nothing() -> None:
    """Nobody watches."""


async def _made(urls: Sequence[str], expected: Expectation | None, config: ClientConfig | None) -> AsyncTeacherClient:
    """A connected client, made in the loop that it will be used in."""
    client = AsyncTeacherClient(urls, expected=expected, config=config)
    try:
        await client.connect()
    except (ServiceError, HandshakeError):
        await client.aclose()
        raise
    return client


def _chunks(requests: Sequence[ScoreRequest], most_tokens: int, vocabulary: int) -> list[list[int]]:
    """Requests that go together: up to so many tokens and ``_ANSWER_BYTES`` of scores, or one alone."""
    chunks: list[list[int]] = []
    tokens_left = bytes_left = 0
    for place, request in enumerate(requests):
        tokens = len(request.prompt_ids) + len(request.response_ids_T)
        size = len(request.response_ids_T) * candidates_of(request, vocabulary) * 4
        if not chunks or tokens > tokens_left or size > bytes_left:
            chunks.append([])
            tokens_left, bytes_left = most_tokens, _ANSWER_BYTES
        chunks[-1].append(place)
        tokens_left -= tokens
        bytes_left -= size
    return chunks


def _require_url(url: str) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ServiceError(f"{url!r} is no URL ({error}); expected one such as http://127.0.0.1:8471") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServiceError(f"{url!r} is no HTTP URL; expected one such as http://127.0.0.1:8471")


def _values(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer; ServiceError where another kind of server answers."""
    try:
        values = answer.json()
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ServiceError(f"{answer.url} answers with no JSON object; is it a teacher service?")
    return values


def _retry_after_s(answer: httpx.Response) -> float:
    stated = answer.headers.get("Retry-After", "")
    return min(60.0, float(stated)) if stated.isdecimal() else 1.0


def _refused(replica: Replica, answer: httpx.Response) -> ServiceError:
    return ServiceError(f"{replica.url} refuses the call ({answer.status_code}): {_message(answer)}")


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
