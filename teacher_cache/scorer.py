"""The scoring seam: what turns sequences into teacher records."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from teacher_cache.errors import ScoringError
from teacher_cache.record import CandidateSet, TeacherRecord


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreRequest:
    """One answer to score.

    uid             stable name of the sample; seeds teacher-drawn candidates
    prompt_ids      token ids of the context
    response_ids_T  int32 [T] token ids to score
    candidates      student-drawn candidates that need the teacher's logprobs, or None
    draw            spec of a design to draw from the teacher itself, for example ``systematic(16)``, or None
    run_seed        seed of teacher-drawn candidates
    teacher         name of the teacher that is asked, where there are several (``RoutedScorer``)
    """

    uid: str
    prompt_ids: tuple[int, ...]
    response_ids_T: Tensor
    candidates: CandidateSet | None = None
    draw: str | None = None
    run_seed: int = 0
    teacher: str = "default"


class Scorer(Protocol):
    """A frozen teacher at one temperature."""

    @property
    def max_context(self) -> int:
        """Longest prompt plus response, in tokens."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[TeacherRecord | ScoringError]:
        """One result a request, in order: its record, or the error of a request that cannot be scored.

        The error is returned, not raised, so that one poisoned sample does not cost its batch.
        """
