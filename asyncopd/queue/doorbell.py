"""Waking a process that waits, without spinning: one FIFO a waiter in the run folder.

A ring that comes before the wait is kept, so that looking at the ledger first and waiting after loses nothing. A bell
is a hint, not a promise: whoever waits looks again after a timeout of about half a second.
"""

import errno
import os
import select
from pathlib import Path
from types import TracebackType

from asyncopd.errors import LedgerError

FOLDER = "doorbells"
_SUFFIX = ".bell"


class Doorbell:
    """The bell of one waiter; ``name`` is its own among the processes of the run."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._path = _path(run_dir, name)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # One left by a waiter that was killed may hold old rings; they would only cost one look at the ledger.
            if not self._path.is_fifo():
                os.mkfifo(self._path)
            # Opened for writing as well: a FIFO whose last writer closes it would otherwise be readable for ever.
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise LedgerError(f"{self._path} cannot be made a FIFO ({error.strerror}); check the run folder") from error

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the bell is rung or ``timeout_s`` seconds have passed; whether it was rung."""
        # Not select(), which refuses descriptors from 1024 on.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        try:
            while len(os.read(self._descriptor, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass
        return True

    def close(self) -> None:
        """Take the bell down."""
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> "Doorbell":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ring(run_dir: Path, name: str) -> bool:
    """Wake one waiter; whether there is one. Never blocks."""
    return _ring(_path(run_dir, name))


def ring_all(run_dir: Path) -> int:
    """Wake every waiter of the run; how many there are. Never blocks."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return 0
    return sum(_ring(folder / entry) for entry in os.listdir(folder) if entry.endswith(_SUFFIX))


def _ring(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        # No such bell, or nobody behind it.
        if error.errno in (errno.ENOENT, errno.ENXIO):
            return False
        raise LedgerError(f"{path} cannot be rung ({error.strerror}); check the run folder") from error
    try:
        os.write(descriptor, b".")
    except (BlockingIOError, BrokenPipeError):
        # Full: it has been rung thousands of times already. Broken: the waiter has just gone.
        pass
    finally:
        os.close(descriptor)
    return True


def _path(run_dir: Path, name: str) -> Path:
    if not name or "/" in name or name.startswith("."):
        raise LedgerError(f"doorbell name {name!r}; expected a plain file name, for example 'rollout-0'")
    return run_dir / FOLDER / f"{name}{_SUFFIX}"
