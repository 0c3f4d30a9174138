"""What a run asks of its disk: to keep what was written, and to say so when it is full or read-only."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncopd.errors import StorageError

_PROBE_BYTES = 65536


@contextmanager
def blaming_storage(folder: Path) -> Iterator[None]:
    """Whatever fails in the block while ``folder`` cannot be written becomes a StorageError that says so.

    Libraries tell of a full disk in many ways, and a worker's log may have no room for its last words.
    """
    try:
        yield
    except Exception as error:
        reason = why_not_writable(folder)
        if reason is None:
            raise
        raise StorageError(
            f"{folder} cannot be written ({reason}); free space or make it writable, then go on with --resume. "
            "Everything up to the newest checkpoint is safe"
        ) from error


def why_not_writable(folder: Path) -> str | None:
    """What the system says when a file of 64 KiB is written there (or where it would be made); None if nothing."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".probe-") as probe:
            probe.write(b"\0" * _PROBE_BYTES)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return None


def sync_file(path: Path) -> None:
    """Make a file's contents, or a folder's entries, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
