"""Workers forked from a process that has imported everything: a run starts in a fraction of a second.

A fork copies one thread and every lock, open file and connection. So the workers are forked first, while the process
has one thread and nothing open, and wait for their run; one that must be started again becomes a new interpreter.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NoReturn

from asyncopd import worker
from asyncopd.worker_start import Interpreters, WorkerProcess, WorkerSpec

_POLL_S = 0.02


class ForkedProcess:
    """A child of this process, with as much of ``subprocess.Popen`` as a supervisor needs."""

    def __init__(self, pid: int, stdin: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb", buffering=0)
        self._code: int | None = None
        # The supervisor's thread and the learner's may ask at the same time, and a child can be asked for only once.
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives."""
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once there is one; subprocess.TimeoutExpired after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([f"worker {self.pid}"], timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        # A process that was waited for is gone, and its id may be another's.
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkedWorkers:
    """Starts each worker once by waking a process that was forked here, and as a new interpreter after that."""

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        """Fork; the caller has one thread and nothing open that a copy could harm."""
        self._waiting = {spec.name: _fork(spec) for spec in specs}
        self._interpreters = Interpreters()

    def start(self, spec: WorkerSpec, run_dir: Path, log: Path) -> tuple[WorkerProcess, int]:
        """The process of a worker, and the descriptor of its signs of progress."""
        forked = self._waiting.pop(spec.name, None)
        if forked is None:
            return self._interpreters.start(spec, run_dir, log)
        process, beats = forked
        if process.stdin is not None:
            process.stdin.write(json.dumps([str(run_dir), str(log)]).encode() + b"\n")
        return process, beats


def _fork(spec: WorkerSpec) -> tuple[ForkedProcess, int]:
    stdin_reader, stdin_writer = os.pipe()
    beats_reader, beats_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_worker(spec, stdin_reader, beats_writer)
    os.close(stdin_reader)
    os.close(beats_writer)
    os.set_blocking(beats_reader, False)
    return ForkedProcess(pid, stdin_writer), beats_reader


def _be_worker(spec: WorkerSpec, stdin: int, beats: int) -> NoReturn:
    """Wait for the run, work for it, and end without running anything of the process that was copied."""
    code = 1
    try:
        os.setsid()
        os.dup2(stdin, 0)
        close_all_but(beats)
        started = _first_line(0)
        if started:
            run_dir, log = json.loads(started)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            environment = spec.environment(os.environ)
            os.environ.clear()
            os.environ.update(environment)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115  lives as long as the process
            code = worker.main([spec.kind, str(spec.index), run_dir, str(beats)])
        else:
            code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
    finally:
        # Nothing of the process that was copied runs, whatever happened here.
        os._exit(code)


def close_all_but(*kept: int) -> None:
    """Close what a fork copied: above all the ends of other processes' pipes, which must close with their owners."""
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _first_line(descriptor: int) -> bytes:
    """One line, and not a byte of what follows; empty when the other end has closed."""
    line = b""
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return line if byte else b""
