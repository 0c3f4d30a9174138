"""The processes of a run as the chaos harness starts them: the real code, forked from a server that has imported it.

A start costs tens of milliseconds instead of seconds, so that hundreds of kills take minutes. With the context
``spawn`` each process is a new interpreter, as in an ordinary run.
"""

import logging
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from asyncopd import pipeline, worker
from asyncopd.config import RunConfig
from asyncopd.supervisor import Supervisor, WorkerSpec
from tests.kill_points import arm

PRELOADED = [
    "asyncopd.pipeline",
    "asyncopd.worker",
    "torch.optim",
    "transformers.models.llama.modeling_llama",
    "tests.chaos_processes",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A process dies the ``count``-th time that it comes to ``point``; then it leaves the file ``mark``."""

    point: str
    count: int
    mark: Path

    def set(self) -> None:
        arm(self.point, self.count, self.mark)


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """One life of a learner: from a start or a resume to its end or its death.

    arms        by process, for its first start in this life
    """

    config: RunConfig
    resume: bool
    start: str
    log: Path
    arms: dict[str, Arm] = field(default_factory=dict)


def context(start: str) -> BaseContext:
    found = multiprocessing.get_context(start)
    if start == "forkserver":
        found.set_forkserver_preload(PRELOADED)
    return found


def start_learner(life: Life) -> BaseProcess:
    process = context(life.start).Process(target=_learner, args=(life,))  # type: ignore[attr-defined]
    process.start()
    return process


def stop_server() -> None:
    """End the fork server of this process, if it has one; the next start has a new one."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def pid_file(run_dir: Path, name: str) -> Path:
    """Where the process id of the newest process of a worker is written."""
    return run_dir / "logs" / f"{name}.pid"


class ForkedProcess:
    """A multiprocessing process with as much of Popen as a supervisor needs."""

    def __init__(self, process: BaseProcess, stdin: int) -> None:
        self._process = process
        self.stdin = os.fdopen(stdin, "wb", buffering=0)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(["worker"], timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


class ForkingSupervisor(Supervisor):
    """Starts workers through multiprocessing; the rest is the supervisor's own."""

    def __init__(self, *arguments: Any, life: Life, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._life, self._arms = life, dict(life.arms)

    def _start(self, spec: WorkerSpec) -> tuple[Any, int]:
        stdin_reader, stdin_writer = os.pipe()
        beats_reader, beats_writer = os.pipe()
        os.set_blocking(beats_reader, False)
        pipes = Connection(stdin_reader, writable=False), Connection(beats_writer, readable=False)
        process = context(self._life.start).Process(  # type: ignore[attr-defined]
            target=_worker, args=(spec, self._run_dir, *pipes, self._arms.pop(spec.name, None))
        )
        process.start()
        for pipe in pipes:
            pipe.close()
        partial = pid_file(self._run_dir, spec.name).with_suffix(".partial")
        partial.write_text(str(process.pid))
        partial.replace(pid_file(self._run_dir, spec.name))
        return ForkedProcess(process, stdin_writer), beats_reader


def _log_to(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _share_the_server() -> None:
    """A child of the fork server would start a server of its own before it starts a process."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined, method-assign]


def _learner(life: Life) -> None:
    _log_to(life.log)
    if life.start == "forkserver":
        _share_the_server()
    logging.basicConfig(format=f"%(asctime)s {os.getpid()} %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    if "learner" in life.arms:
        life.arms["learner"].set()
    pipeline.Supervisor = partial(ForkingSupervisor, life=life)  # type: ignore[misc, assignment]
    pipeline.run(life.config, resume=life.resume)


def _worker(spec: WorkerSpec, run_dir: Path, stdin: Connection, beats: Connection, armed: Arm | None) -> None:
    os.setsid()
    os.environ.update(spec.environment(os.environ))
    _log_to(run_dir / "logs" / f"{spec.name}.log")
    os.dup2(stdin.fileno(), 0)
    stdin.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  lives as long as the process
    if armed is not None:
        armed.set()
    sys.exit(worker.main([spec.kind, str(spec.index), str(run_dir), str(beats.fileno())]))


def wait_until(condition: Any, timeout_s: float) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
