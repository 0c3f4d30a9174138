"""A scorer that remembers."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from teacher_cache.bundle import PackedRecord
from teacher_cache.codec import pack_record, unpack_record
from teacher_cache.errors import CodecError, ScoringError
from teacher_cache.identity import TeacherIdentity
from teacher_cache.key import record_key
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import Scorer, ScoreRequest
from teacher_cache.store import RecordStore

LOG = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class CacheCounts:
    """What one cache has done so far, or several that count together.

    hits, misses   requests that the store had, and that a teacher was asked for
    read_bytes     of the records that were found
    kept_bytes     of the records that were handed to the store
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    kept_bytes: int = 0


class CachedScorer:
    """A Scorer over another one and a store; what the store has needs no forward pass.

    load        makes the scorer at the first miss, so that a warm cache loads no teacher
    identity    of the teacher that ``load`` makes
    precision   of stored scores; with ``fp32`` a hit gives bit for bit what was scored
    teacher     name written into the records
    counts      where hits and misses are counted; several scorers may share one

    Errors are not remembered: a request that could not be scored is asked again.
    """

    def __init__(
        self,
        load: Callable[[], Scorer],
        store: RecordStore,
        *,
        identity: TeacherIdentity,
        precision: str = "fp32",
        teacher: str = "default",
        counts: CacheCounts | None = None,
    ) -> None:
        self._load = load
        self._store = store
        self._identity = identity
        self._precision = precision
        self._teacher = teacher
        self._scorer: Scorer | None = None
        self.counts = counts or CacheCounts()

    @property
    def max_context(self) -> int:
        """Longest prompt plus response, in tokens."""
        return self._identity.max_context

    @property
    def identity(self) -> TeacherIdentity:
        """The teacher behind the cache."""
        return self._identity

    def behind(self) -> Scorer:
        """The scorer behind the cache, made if it was not needed before."""
        if self._scorer is None:
            self._scorer = self._load()
        return self._scorer

    def score(self, requests: Sequence[ScoreRequest]) -> list[TeacherRecord | ScoringError]:
        """One result a request, in order: its record, or the error of a request that cannot be scored."""
        keys = [record_key(self._identity.fingerprint, request, self._precision) for request in requests]
        packed = self._store.get(keys)
        results: list[TeacherRecord | ScoringError | None] = [
            self._unpacked(packed.get(key), request) for key, request in zip(keys, requests, strict=True)
        ]
        missing = [place for place, result in enumerate(results) if result is None]
        self.counts.hits += len(results) - len(missing)
        self.counts.misses += len(missing)
        self.counts.read_bytes += sum(record.nbytes for record in packed.values())
        if missing:
            for place, result in zip(missing, self.behind().score([requests[p] for p in missing]), strict=True):
                results[place] = result
            self._keep({keys[place]: (requests[place], results[place]) for place in missing})
        return [result for result in results if result is not None]

    def _unpacked(self, packed: PackedRecord | None, request: ScoreRequest) -> TeacherRecord | None:
        if packed is None:
            return None
        try:
            return unpack_record(packed, request, temperature=self._identity.temperature, teacher=self._teacher)
        except CodecError as error:
            LOG.warning("%s; it is scored again", error)
            return None

    def _keep(self, scored: dict[bytes, tuple[ScoreRequest, TeacherRecord | ScoringError | None]]) -> None:
        vocabulary = self._identity.tokenizer.vocabulary
        packed = {
            key: pack_record(result, request, vocabulary=vocabulary, precision=self._precision)
            for key, (request, result) in scored.items()
            if isinstance(result, TeacherRecord)
        }
        self.counts.kept_bytes += sum(record.nbytes for record in packed.values())
        self._store.put(packed)
