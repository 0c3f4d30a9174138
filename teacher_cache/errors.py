"""What teacher_cache raises on purpose; each message gives the value, the expectation and the remedy."""


class TeacherCacheError(Exception):
    """Root of the tree."""


class RecordError(TeacherCacheError, ValueError):
    """A record whose shapes, dtypes or provenance do not fit together."""


class DesignError(TeacherCacheError, ValueError):
    """A support design that does not exist or cannot work as asked."""


class ScoringError(TeacherCacheError):
    """A request that the teacher cannot score; only that request is refused."""


class CodecError(TeacherCacheError, ValueError):
    """Bytes that are no bundle of records or requests, or not the one that was expected."""


class StoreError(TeacherCacheError):
    """The store cannot be used: its folder, its disk or its index."""


class HandshakeError(TeacherCacheError):
    """The teacher is not the one that is asked for; the message names each difference."""


class ServiceError(TeacherCacheError):
    """A teacher service refused a call, or none answered before the deadline."""
