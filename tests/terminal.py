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
from pathlib import Path

import psutil


class Terminal:
    """A command in the foreground of a terminal of its own; ``screen`` is all that it has shown."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.screen = bytearray()
        self._typist, screen = pty.openpty()

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command, stdin=screen, stdout=screen, stderr=screen, start_new_session=True, preexec_fn=take_terminal
        )
        os.close(screen)
        # A terminal whose screen nobody reads blocks its writers.
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while shown := os.read(self._typist, 4096):
                self.screen += shown
        except OSError:
            return

    def press_ctrl_c(self) -> None:
        os.write(self._typist, b"\x03")

    def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait for a condition while the command runs; AssertionError with the screen where it does not come true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = self.process.poll()
            assert ended is None, f"the command ended with {ended}:\n{self.text()}"
            assert time.monotonic() < deadline, f"the condition did not come true in time:\n{self.text()}"
            time.sleep(0.01)

    def wait(self, timeout_s: float) -> int:
        """The exit status; AssertionError with the screen where the command does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the command did not end in {timeout_s:.0f} s:\n{self.text()}") from error

    def text(self) -> str:
        """The end of what was shown."""
        return self.screen[-4000:].decode(errors="replace")

    def family(self) -> list[int]:
        """The processes of the command: itself, and all that it and its children started."""
        return [self.process.pid, *(each.pid for each in psutil.Process(self.process.pid).children(recursive=True))]

    def close(self) -> None:
        if self.process.poll() is None:
            for pid in self.family():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join(5)
        os.close(self._typist)


@contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    """Run a command in a terminal; nothing of it outlives the block."""
    opened = Terminal(command)
    try:
        yield opened
    finally:
        opened.close()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], timeout_s: float) -> None:
    """AssertionError unless every process ends in time."""
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive after {timeout_s:.0f} s: {alive}"
        time.sleep(0.01)
