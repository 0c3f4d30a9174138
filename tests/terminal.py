"""Commands run as a person runs them: in the foreground of a terminal, where Ctrl-C is a key."""

import fcntl
import os
import pty
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CTRL_C = b"\x03"


@contextmanager
def terminal(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a command as the foreground job of a terminal of its own; yields it and the typist's end."""
    typist, screen = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command, stdin=screen, stdout=screen, stderr=screen, start_new_session=True, preexec_fn=take_terminal
    )
    os.close(screen)
    # A terminal whose screen nobody reads blocks its writers.
    threading.Thread(target=_drain, args=(typist,), daemon=True).start()
    try:
        yield process, typist
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(typist)


def _drain(typist: int) -> None:
    try:
        while os.read(typist, 4096):
            pass
    except OSError:
        return


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition; AssertionError where it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
