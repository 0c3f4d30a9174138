"""Continuous micro-batching: whatever waits when the teacher is free goes through it together.

submit ──> bounded queue ──> gather up to a token budget ──> scorer, in its one thread ──> futures
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from teacher_cache.errors import ScoringError, ServiceError
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import Scorer, ScoreRequest

LOG = logging.getLogger(__name__)
Result = TeacherRecord | ScoringError


class QueueFullError(ServiceError):
    """More waits than the queue holds; ``retry_after_s`` says when there should be room."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the scoring queue is full; ask again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: ScoreRequest
    tokens: int
    result: asyncio.Future[Result]


class Batcher:
    """Scores what many callers submit; must be used in one event loop.

    gather_tokens   tokens that are handed to the scorer at a time, which makes its own batches of like length
    queue_tokens    tokens that may wait; a single call that is larger is taken when nothing else waits
    teacher         what ``scorer`` asks, past any cache; None: the scorer itself
    """

    def __init__(self, scorer: Scorer, *, gather_tokens: int, queue_tokens: int, teacher: Scorer | None = None) -> None:
        self._scorer = scorer
        self._teacher = teacher or scorer
        self._proven: ScoreRequest | None = None
        self._gather_tokens = gather_tokens
        self._queue_tokens = queue_tokens
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="teacher")
        self._rate = 0.0
        self._task: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        """What ended the scoring although nobody closed it."""
        self.queued_tokens = 0
        self.scored_tokens = 0

    def start(self, on_failure: Callable[[], None]) -> None:
        """Begin to score; ``on_failure`` is called where scoring ends although nobody closed it."""

        def ended(task: asyncio.Task[None]) -> None:
            self.failure = None if task.cancelled() else task.exception()
            if self.failure is not None:
                LOG.error("scoring has ended", exc_info=self.failure)
                on_failure()

        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(ended)

    @property
    def alive(self) -> bool:
        """Whether the scoring loop runs."""
        return self._task is not None and not self._task.done()

    @property
    def full(self) -> bool:
        """Whether a new call would be turned away."""
        return self.queued_tokens >= self._queue_tokens

    async def submit(self, requests: Sequence[ScoreRequest]) -> list[Result]:
        """Results in order. QueueFullError if there is no room; ServiceError if scoring has ended."""
        if self._closing or not self.alive:
            raise ServiceError("the service is stopping")
        lengths = [len(request.prompt_ids) + len(request.response_ids_T) for request in requests]
        if self.queued_tokens and self.queued_tokens + sum(lengths) > self._queue_tokens:
            raise QueueFullError(self._expected_wait_s())
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(*pair, loop.create_future()) for pair in zip(requests, lengths, strict=True)]
        self._waiting.extend(waiting)
        self.queued_tokens += sum(lengths)
        self._arrived.set()
        return list(await asyncio.gather(*(each.result for each in waiting)))

    async def close(self) -> None:
        """Score what was accepted, then end."""
        self._closing = True
        self._arrived.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._thread.shutdown()

    def _expected_wait_s(self) -> int:
        return max(1, min(60, math.ceil(self.queued_tokens / self._rate))) if self._rate else 1

    async def _run(self) -> None:
        batch: list[_Waiting] = []
        try:
            while await self._something_waits():
                batch = self._gather()
                await self._score_batch(batch)
        finally:
            # Only after an error is anything left: its callers must not wait for ever.
            for each in (*batch, *self._waiting):
                if not each.result.done():
                    each.result.set_exception(ServiceError("scoring has ended; see the service's log"))

    async def _something_waits(self) -> bool:
        """Wait for work; False once the batcher is closing and nothing is left."""
        while not self._waiting:
            if self._closing:
                return False
            self._arrived.clear()
            await self._arrived.wait()
        return True

    async def _score_batch(self, batch: list[_Waiting]) -> None:
        tokens = sum(each.tokens for each in batch)
        started = time.monotonic()
        requests = [each.request for each in batch]
        results = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, requests)
        self._rate = tokens / max(time.monotonic() - started, 1e-3)
        self.queued_tokens -= tokens
        self.scored_tokens += tokens
        for each, result in zip(batch, results, strict=True):
            if not each.result.done():
                each.result.set_result(result)

    def _gather(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        tokens = 0
        while self._waiting and (not batch or tokens + self._waiting[0].tokens <= self._gather_tokens):
            batch.append(self._waiting.popleft())
            tokens += batch[-1].tokens
        return batch

    def _score(self, requests: list[ScoreRequest]) -> list[Result]:
        """Score; where the teacher fails on a batch, each request alone, so that one cannot cost the others.

        A teacher that fails on what it has scored before is broken, as after an error of its GPU, and that error ends
        the scoring: everything would be refused from then on.
        """
        try:
            results = self._scorer.score(requests)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            # Asked again only after this block: until then the error holds what the failed forward took.
            problem = repr(error)
        else:
            scored = zip(requests, results, strict=False)
            good = (request for request, result in scored if isinstance(result, TeacherRecord))
            self._proven = self._proven or next(good, None)
            return results
        if len(requests) > 1:
            return [self._score([request])[0] for request in requests]
        if self._proven is not None:
            self._teacher.score([self._proven])
        LOG.warning("the teacher failed on %s: %s", requests[0].uid, problem)
        return [ScoringError(f"{requests[0].uid}: the teacher failed on it ({problem})")]
