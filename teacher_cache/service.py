"""The teacher as an HTTP service.

    GET  /health         200 while the scoring loop runs           GET  /v1/teacher     identity and limits, JSON
    GET  /ready          200 while there is room in the queue      POST /v1/handshake   an Expectation, JSON; 409 names
    POST /v1/score       a bundle of requests, binary; a bundle                         what differs
                         of records or errors comes back, in order

Numbers travel in binary only. A request that the teacher cannot score is an error in its place; a body that cannot be
read is 400, one that is too large 413, a full queue 429 with Retry-After.
"""

import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from teacher_cache.batcher import Batcher, QueueFullError, Result
from teacher_cache.designs import parse_design
from teacher_cache.errors import CodecError, DesignError, HandshakeError, ScoringError, ServiceError
from teacher_cache.handshake import expectation_from
from teacher_cache.identity import TeacherIdentity
from teacher_cache.scorer import Scorer, ScoreRequest
from teacher_cache.wire import (
    DIGEST_HEADER,
    FINGERPRINT_HEADER,
    MEDIA_TYPE,
    body_digest,
    candidates_of,
    decode_requests,
    encode_results,
    teacher_draw,
)

_BYTES_A_CANDIDATE = 12
"""Id, weight and score of one candidate, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """Where the service listens and what it accepts."""

    host: str = "127.0.0.1"
    """Address to listen on; one that other machines can reach needs a token."""
    port: int = 8471
    """Port; 0 takes a free one."""
    gather_tokens: int = 16384
    """Tokens handed to the teacher at a time."""
    queue_tokens: int = 262144
    """Tokens that may wait; beyond them the answer is 429."""
    max_body_bytes: int = 64 * 2**20
    """Largest request body."""
    max_record_bytes: int = 2**30
    """Largest record of one request."""

    def __post_init__(self) -> None:
        for name, value in (
            ("gather_tokens", self.gather_tokens),
            ("queue_tokens", self.queue_tokens),
            ("max_body_bytes", self.max_body_bytes),
            ("max_record_bytes", self.max_record_bytes),
        ):
            if value < 1:
                raise ServiceError(f"{name} is {value}; expected at least 1")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TeacherService:
    """The routes over one scorer; ``app`` is the ASGI application.

    token     bearer token that every call but /health must carry; ServiceError where there is none and other machines
              can reach the address
    teacher   what ``scorer`` asks, where that is a cache
    """

    def __init__(
        self,
        scorer: Scorer,
        identity: TeacherIdentity,
        config: ServiceConfig,
        *,
        token: str | None = None,
        teacher: Scorer | None = None,
    ) -> None:
        if not is_loopback(config.host) and not token:
            raise ServiceError(
                f"host is {config.host!r}, which other machines can reach, and there is no token; set one "
                "(TEACHER_CACHE_TOKEN), or listen on 127.0.0.1"
            )
        self._token = token
        self._scorer = scorer
        self._teacher_itself = teacher
        self._identity = identity
        self._config = config
        self._batcher: Batcher | None = None
        self._on_failure: Callable[[], None] = _nothing
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/v1/teacher", self._teacher),
                Route("/v1/handshake", self._handshake, methods=["POST"]),
                Route("/v1/score", self._score, methods=["POST"]),
            ],
            lifespan=self._lifespan,
        )

    def serve(self) -> None:
        """Listen until SIGTERM or Ctrl-C, then finish what was accepted.

        ServiceError where the scorer breaks down: whoever watches over this process can start a new one.
        """
        config = uvicorn.Config(self.app, host=self._config.host, port=self._config.port, access_log=False)
        server = uvicorn.Server(config)

        def end() -> None:
            server.should_exit = True

        self._on_failure = end
        server.run()
        if self._batcher is not None and (failure := self._batcher.failure) is not None:
            raise ServiceError(f"the scorer broke down: {failure!r}; start the service again") from failure

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        config = self._config
        self._batcher = Batcher(
            self._scorer,
            gather_tokens=config.gather_tokens,
            queue_tokens=config.queue_tokens,
            teacher=self._teacher_itself,
        )
        self._batcher.start(self._on_failure)
        yield
        await self._batcher.close()

    async def _health(self, _: Request) -> Response:
        batcher = self._batcher
        if batcher is None or not batcher.alive:
            return _problem(503, "the scoring loop does not run")
        return JSONResponse({"status": "ok", "queued": batcher.queued_tokens, "scored": batcher.scored_tokens})

    async def _ready(self, request: Request) -> Response:
        batcher = self._batcher
        if (refused := self._unauthorised(request)) is not None:
            return refused
        if batcher is None or not batcher.alive or batcher.full:
            return _problem(503, "the queue is full or the service is stopping")
        return JSONResponse({"status": "ready"})

    async def _teacher(self, request: Request) -> Response:
        return self._unauthorised(request) or JSONResponse(self._told())

    async def _handshake(self, request: Request) -> Response:
        if (refused := self._unauthorised(request)) is not None:
            return refused
        try:
            expected = expectation_from(await self._body(request))
        except (HandshakeError, _TooLargeError) as error:
            return _problem(413 if isinstance(error, _TooLargeError) else 400, str(error))
        except ClientDisconnect:
            return _problem(400, "the body was cut off")
        found = expected.differences(self._identity)
        vocabulary = self._identity.tokenizer.vocabulary
        for spec in expected.designs:
            try:
                parse_design(spec)
            except DesignError as error:
                found.append(f"design: {error}")
        if expected.draw is not None:
            try:
                teacher_draw(expected.draw, vocabulary)
            except (DesignError, CodecError) as error:
                found.append(f"design: {error}")
        if found:
            return JSONResponse({"error": "not the teacher that is asked for", "differences": found}, 409)
        return JSONResponse(self._told())

    async def _score(self, request: Request) -> Response:
        batcher, vocabulary = self._batcher, self._identity.tokenizer.vocabulary
        if (refused := self._unauthorised(request)) is not None:
            return refused
        stated = request.headers.get(FINGERPRINT_HEADER)
        if stated is not None and stated != self._identity.fingerprint:
            return _problem(409, f"fingerprint {stated} asked for; this teacher has {self._identity.fingerprint}")
        if batcher is None:
            return _problem(503, "the service is starting")
        try:
            body = await self._body(request)
            if request.headers.get(DIGEST_HEADER) not in (None, body_digest(body)):
                raise ServiceError("the body was damaged on its way; send it again")
            requests, precision = await run_in_threadpool(decode_requests, body, vocabulary=vocabulary)
            results = await self._scored(batcher, requests)
        except _TooLargeError as error:
            return _problem(413, str(error))
        except (CodecError, DesignError) as error:
            return _problem(400, str(error))
        except ClientDisconnect:
            return _problem(400, "the body was cut off")
        except QueueFullError as error:
            return JSONResponse({"error": str(error)}, 429, {"Retry-After": str(error.retry_after_s)})
        except ServiceError as error:
            return JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})
        data = await run_in_threadpool(encode_results, results, requests, vocabulary=vocabulary, precision=precision)
        return Response(data, headers={DIGEST_HEADER: body_digest(data)}, media_type=MEDIA_TYPE)

    async def _scored(self, batcher: Batcher, requests: list[ScoreRequest]) -> list[Result]:
        """Results in order; what would make too large a record is refused before it is scored."""
        refused = [self._too_large(request) for request in requests]
        accepted = [request for request, problem in zip(requests, refused, strict=True) if problem is None]
        scored = iter(await batcher.submit(accepted))
        return [next(scored) if problem is None else problem for problem in refused]

    def _too_large(self, request: ScoreRequest) -> ScoringError | None:
        width = candidates_of(request, self._identity.tokenizer.vocabulary)
        size = len(request.response_ids_T) * width * _BYTES_A_CANDIDATE
        if size <= self._config.max_record_bytes:
            return None
        return ScoringError(
            f"{request.uid}: a record of about {size} bytes; the service makes up to {self._config.max_record_bytes}: "
            "lower the budget"
        )

    def _told(self) -> dict:
        return {
            **self._identity.as_dict(),
            "fingerprint": self._identity.fingerprint,
            "max_body_bytes": self._config.max_body_bytes,
        }

    def _unauthorised(self, request: Request) -> Response | None:
        if self._token is None:
            return None
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode("latin-1", "replace"), self._token.encode()):
            return None
        return JSONResponse({"error": "the call carries no valid bearer token"}, 401, {"WWW-Authenticate": "Bearer"})

    async def _body(self, request: Request) -> bytes:
        limit = self._config.max_body_bytes
        stated = request.headers.get("Content-Length", "")
        if stated.isdecimal() and int(stated) > limit:
            raise _TooLargeError(limit)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise _TooLargeError(limit)
        return bytes(body)


class _TooLargeError(ServiceError):
    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is larger than {limit} bytes; send fewer requests at a time")


def _nothing() -> None:
    """The server is somebody else's to end."""


def _problem(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)
