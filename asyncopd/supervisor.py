"""Starts the worker processes, notices at once when one ends, and ends them all.

A worker lives as long as the pipe to its standard input: it stops after what it is doing when it reads ``stop``, and at
once when the pipe closes, so no worker outlives a parent that was killed.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncopd.errors import ConfigError, WorkerDiedError

LOG = logging.getLogger(__name__)
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_LAUNCHER_PREFIXES = ("ACCELERATE_", "TORCHELASTIC_", "FSDP_")
_POLL_S = 0.2
_TAIL_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """One worker process: ``rollout`` or ``scorer``, its index, threads, and GPUs as physical ids."""

    kind: str
    index: int
    threads: int
    devices: str = ""

    @property
    def name(self) -> str:
        """Process name, for example ``rollout-0``."""
        return f"{self.kind}-{self.index}"

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The worker's environment: the launcher's rank and master variables would make it join the learner."""
        kept = {
            name: value
            for name, value in inherited.items()
            if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
        }
        kept |= {"OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        if self.devices:
            kept["CUDA_VISIBLE_DEVICES"] = self.devices
        return kept


def check_devices(workers: Sequence[WorkerSpec], learner: Sequence[str]) -> None:
    """ConfigError when two processes are given the same GPU; ``learner`` are the learner's physical ids."""
    taken = dict.fromkeys(learner, "the learner")
    for worker in workers:
        for device in filter(None, worker.devices.split(",")):
            if device in taken:
                raise ConfigError(
                    f"GPU {device} is given to {worker.name} and to {taken[device]}; give each process its own: "
                    "rollout.devices, teacher.devices, and the launcher's --gpu-ids for the learner"
                )
            taken[device] = worker.name


class Supervisor:
    """The worker processes of one run. ``on_death`` is called once, from a thread, when a worker dies."""

    def __init__(self, run_dir: Path, workers: Sequence[WorkerSpec], on_death: Callable[[], None]) -> None:
        self._run_dir = run_dir
        self._workers = workers
        self._on_death = on_death
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._death: WorkerDiedError | None = None
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._watch_workers, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start every worker, each in a session of its own so that Ctrl-C reaches only the learner."""
        (self._run_dir / "logs").mkdir(exist_ok=True)
        for worker in self._workers:
            with self._log_path(worker.name).open("ab") as log:
                self._processes[worker.name] = subprocess.Popen(
                    [sys.executable, "-m", "asyncopd.worker", worker.kind, str(worker.index), str(self._run_dir)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=worker.environment(os.environ),
                    start_new_session=True,
                )
        self._watch.start()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker name."""
        return {name: process.pid for name, process in self._processes.items()}

    def check(self) -> None:
        """Raise WorkerDiedError if a worker has died."""
        if self._death is not None:
            raise self._death

    def stop(self, timeout_s: float = 20.0) -> None:
        """Ask every worker to stop, then insist: SIGTERM after ``timeout_s``, SIGKILL two seconds later."""
        self._stopping.set()
        for process in self._processes.values():
            if process.stdin is not None and process.poll() is None:
                try:
                    process.stdin.write(b"stop\n")
                    process.stdin.flush()
                except BrokenPipeError:
                    LOG.debug("process %d ended before it could be asked to", process.pid)
        deadline = time.monotonic() + timeout_s
        for name, process in self._processes.items():
            if not _ended(process, max(0.1, deadline - time.monotonic())):
                LOG.warning("%s did not stop within %.0f s; terminating it", name, timeout_s)
                process.terminate()
                if not _ended(process, 2.0):
                    process.kill()
                    process.wait()
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except BrokenPipeError:
                    LOG.debug("the pipe to %s was closed by its end", name)
        if self._watch.is_alive():
            self._watch.join()

    def kill(self) -> None:
        """End every worker at once."""
        self._stopping.set()
        for process in self._processes.values():
            process.kill()

    def _watch_workers(self) -> None:
        while not self._stopping.wait(_POLL_S):
            for name, process in self._processes.items():
                code = process.poll()
                if code is not None and code != 0:
                    self._death = WorkerDiedError(name, f"exit status {code}\n{self._log_tail(name)}")
                    LOG.error("%s", self._death)
                    self._on_death()
                    return

    def _log_path(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    def _log_tail(self, name: str) -> str:
        return self._log_path(name).read_text(errors="replace")[-_TAIL_CHARACTERS:]


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
