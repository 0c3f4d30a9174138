"""What teacher_cache raises on purpose; each message gives the value, the expectation and the remedy."""


class TeacherCacheError(Exception):
    """Root of the tree."""


class RecordError(TeacherCacheError, ValueError):
    """A record whose shapes, dtypes or provenance do not fit together."""


class DesignError(TeacherCacheError, ValueError):
    """A support design that does not exist or cannot work as asked."""


class ScoringError(TeacherCacheError):
    """A request that the teacher cannot score; only that request is refused."""
