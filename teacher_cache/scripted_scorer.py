"""A scorer without a model, for tests and simulations."""

import time
from collections.abc import Sequence

from teacher_cache.errors import ScoringError
from teacher_cache.logit_rows import normalised
from teacher_cache.record import TeacherRecord
from teacher_cache.record_builder import RecordBuilder, refusal
from teacher_cache.scorer import ScoreRequest
from teacher_cache.scripted import teacher_logits


class ScriptedScorer:
    """A Scorer whose distributions depend on (uid, position) only: a retry, or another worker, scores the same.

    delay_s   seconds a token that scoring takes
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        temperature: float = 1.0,
        teacher: str = "default",
        max_context: int = 4096,
        delay_s: float = 0.0,
    ) -> None:
        self._vocabulary = vocabulary
        self._temperature = temperature
        self._teacher = teacher
        self._max_context = max_context
        self._delay_s = delay_s

    @property
    def max_context(self) -> int:
        """Longest prompt plus response, in tokens."""
        return self._max_context

    def score(self, requests: Sequence[ScoreRequest]) -> list[TeacherRecord | ScoringError]:
        """One result a request, in order: its record, or the error of a request that cannot be scored."""
        time.sleep(self._delay_s * sum(len(request.response_ids_T) for request in requests))
        return [self._score(request) for request in requests]

    def _score(self, request: ScoreRequest) -> TeacherRecord | ScoringError:
        refused = refusal(
            request, vocabulary=self._vocabulary, max_context=self._max_context, temperature=self._temperature
        )
        if refused is not None:
            return refused
        builder = RecordBuilder(request, self._temperature, self._teacher, self._vocabulary)
        if length := len(request.response_ids_T):
            builder.add(normalised(teacher_logits(self._vocabulary, request.uid, range(length)), self._temperature))
        return builder.record()
