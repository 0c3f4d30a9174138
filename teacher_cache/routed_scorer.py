"""Several named teachers behind one scorer."""

from collections.abc import Mapping, Sequence

from teacher_cache.errors import ScoringError
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import Scorer, ScoreRequest


class RoutedScorer:
    """Sends each request to the teacher that it names; one that names none of them is refused."""

    def __init__(self, teachers: Mapping[str, Scorer]) -> None:
        self.teachers = dict(teachers)

    @property
    def max_context(self) -> int:
        """Longest prompt plus response that every teacher takes, in tokens."""
        return min(teacher.max_context for teacher in self.teachers.values())

    def score(self, requests: Sequence[ScoreRequest]) -> list[TeacherRecord | ScoringError]:
        """One result a request, in order: its record, or the error of a request that cannot be scored."""
        results: dict[int, TeacherRecord | ScoringError] = {}
        for name in dict.fromkeys(request.teacher for request in requests):
            places = [place for place, request in enumerate(requests) if request.teacher == name]
            if name in self.teachers:
                scored = self.teachers[name].score([requests[place] for place in places])
                results.update(zip(places, scored, strict=True))
            else:
                known = sorted(self.teachers)
                for place in places:
                    results[place] = ScoringError(f"{requests[place].uid}: no teacher {name!r}; there are {known}")
        return [results[place] for place in range(len(requests))]
