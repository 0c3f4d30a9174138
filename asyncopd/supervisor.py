"""Starts the worker processes, restarts those that die or hang, and ends them all.

    worker ends, or is silent for lease_s ──> killed ──> its leases released ──> back-off ──> started again
                                                                        └─ no restart left ──> the run fails

A worker lives as long as the pipe to its standard input: it stops after what it is doing when it reads ``stop``, and at
once when the pipe closes, so no worker outlives a parent that was killed. Through a second pipe it tells of progress.
"""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncopd.errors import AsyncOPDError, ConfigError, WorkerDiedError
from asyncopd.queue.doorbell import ring_all
from asyncopd.queue.ledger import Ledger
from asyncopd.tracking.trace import RESTART, Tracer
from asyncopd.worker_start import Interpreters, WorkerProcess, WorkerSpec, WorkerStarter

LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_KILL_S = 10.0
_TAIL_CHARACTERS = 4000
BEYOND_REPAIR = 3
"""Exit status of a worker that would fail again if it were restarted."""


def check_devices(workers: Sequence[WorkerSpec], learner: Sequence[str]) -> None:
    """ConfigError when two processes are given the same GPU; ``learner`` are the learner's physical ids.

    A warning names those that are given none and will take the learner's first.
    """
    sharing = [worker.name for worker in workers if learner and not worker.devices]
    if sharing:
        LOG.warning(
            "%s will share GPU %s with the learner; give each its own (rollout.devices, teacher.devices), or lower "
            "rollout.vllm.memory_fraction and teacher.vllm.memory_fraction",
            ", ".join(sharing),
            learner[0],
        )
    taken = dict.fromkeys(learner, "the learner")
    for worker in workers:
        for device in filter(None, worker.devices.split(",")):
            if device in taken:
                raise ConfigError(
                    f"GPU {device} is given to {worker.name} and to {taken[device]}; give each process its own: "
                    "rollout.devices, teacher.devices, and the launcher's --gpu-ids for the learner"
                )
            taken[device] = worker.name


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionConfig:
    """What becomes of a rollout worker or scorer that dies or hangs."""

    restarts: int = 3
    """How often each worker is started again before the run fails; 0 fails at the first death. An error at a worker's
    first start fails at once."""
    forgive_s: float = 3600.0
    """Seconds of work after which a worker's earlier deaths do not count any more."""
    backoff_s: float = 1.0
    """Seconds before a worker's first restart; doubled for each further one."""
    start_s: float = 600.0
    """Seconds that a worker may take until it is ready, and to load weights; apart from that, ``queue.lease_s``
    without progress is a hang."""
    stall_s: float = 1800.0
    """Seconds without any movement in the queue after which the run fails; at least twice ``start_s`` and
    ``teacher.deadline_s`` are granted."""

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise ConfigError(f"supervision.restarts is {self.restarts}; expected 0 (fail at the first death) or more")
        if self.backoff_s < 0:
            raise ConfigError(f"supervision.backoff_s is {self.backoff_s}; expected 0 seconds or more")
        for name in ("start_s", "stall_s", "forgive_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"supervision.{name} is {getattr(self, name)}; expected seconds above 0")


@dataclass(kw_only=True, slots=True)
class _Worker:
    """A worker and what is known of it; times are of the monotonic clock, seconds.

    beats       descriptor that its signs of progress come from
    started     when it was started
    heard       when it was started or last made progress
    ready       whether it has made progress at all
    restarts    how often it was started again
    counted     how many of these restarts count against it
    due         when it is to be started again; None while it runs
    """

    spec: WorkerSpec
    process: WorkerProcess
    beats: int
    started: float
    heard: float
    ready: bool = False
    restarts: int = 0
    counted: int = 0
    due: float | None = None

    def listen(self) -> None:
        """Take what it has told of progress."""
        try:
            while os.read(self.beats, 65536):
                self.heard, self.ready = time.monotonic(), True
        except BlockingIOError:
            return

    def close(self) -> None:
        """Let go of both pipes."""
        os.close(self.beats)
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                LOG.debug("the pipe to %s was closed by its end", self.spec.name)


class Supervisor:
    """The worker processes of one run.

    lease_s     seconds without progress after which a worker that was ready is taken to hang
    tracer      the learner's; restarts are traced there
    on_death    called once, from a thread, when a worker is lost for good
    starter     how a worker process comes to be
    """

    def __init__(
        self,
        run_dir: Path,
        specs: Sequence[WorkerSpec],
        config: SupervisionConfig,
        *,
        lease_s: float,
        tracer: Tracer,
        on_death: Callable[[], None],
        starter: WorkerStarter | None = None,
    ) -> None:
        self._starter = starter or Interpreters()
        self._run_dir = run_dir
        self._specs = specs
        self._config = config
        self._lease_s = lease_s
        self._tracer = tracer
        self._on_death = on_death
        self._workers: list[_Worker] = []
        self._death: AsyncOPDError | None = None
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._watch_workers, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start every worker, each in a session of its own so that Ctrl-C reaches only the learner."""
        (self._run_dir / "logs").mkdir(exist_ok=True)
        for spec in self._specs:
            process, beats = self._start(spec)
            now = time.monotonic()
            self._workers.append(_Worker(spec=spec, process=process, beats=beats, started=now, heard=now))
        self._watch.start()

    @property
    def restarts(self) -> int:
        """How often a worker was started again, all together."""
        return sum(worker.restarts for worker in self._workers)

    def check(self) -> None:
        """Raise WorkerDiedError if a worker is lost for good."""
        if self._death is not None:
            raise self._death

    def stop(self, timeout_s: float = 20.0) -> None:
        """Ask every worker to stop, then insist: SIGTERM after ``timeout_s``, SIGKILL two seconds later."""
        self._stopping.set()
        if self._watch.is_alive():
            # First, so that it starts nobody behind this function's back.
            self._watch.join()
        running = [worker for worker in self._workers if worker.due is None]
        for worker in running:
            self._ask_to_stop(worker.process)
        deadline = time.monotonic() + timeout_s
        for worker in running:
            process = worker.process
            if not _ended(process, max(0.1, deadline - time.monotonic())):
                LOG.warning("%s did not stop within %.0f s; terminating it", worker.spec.name, timeout_s)
                process.terminate()
                if not _ended(process, 2.0):
                    process.kill()
                    process.wait()
            worker.close()

    def kill(self) -> None:
        """End every worker at once."""
        self._stopping.set()
        for worker in self._workers:
            worker.process.kill()

    def _start(self, spec: WorkerSpec) -> tuple[WorkerProcess, int]:
        """The process of a worker, and the descriptor of its signs of progress."""
        return self._starter.start(spec, self._run_dir, self._log_path(spec.name))

    @staticmethod
    def _ask_to_stop(process: WorkerProcess) -> None:
        if process.stdin is not None and process.poll() is None:
            try:
                process.stdin.write(b"stop\n")
                process.stdin.flush()
            except BrokenPipeError:
                LOG.debug("process %d ended before it could be asked to", process.pid)

    def _watch_workers(self) -> None:
        try:
            with Ledger.open(self._run_dir / "ledger.sqlite") as ledger:
                while not self._stopping.wait(_POLL_S):
                    for worker in self._workers:
                        self._tend(worker, ledger)
        except (AsyncOPDError, OSError) as error:
            fatal = error if isinstance(error, AsyncOPDError) else WorkerDiedError("supervisor", str(error))
            LOG.error("%s", fatal)
            self._death = fatal
            self._on_death()

    def _tend(self, worker: _Worker, ledger: Ledger) -> None:
        """Start a worker that is due; bury one that died or hangs."""
        if worker.due is not None:
            if time.monotonic() >= worker.due:
                worker.process, worker.beats = self._start(worker.spec)
                worker.started = worker.heard = time.monotonic()
                worker.ready, worker.due = False, None
            return
        cause = self._cause_of_death(worker)
        if cause is None:
            if worker.ready and time.monotonic() - worker.started > self._config.forgive_s:
                worker.counted = 0
            return
        name, limit = worker.spec.name, self._config.restarts
        worker.process.kill()
        if not _ended(worker.process, _KILL_S):
            raise WorkerDiedError(name, f"{cause}, and did not end within {_KILL_S:.0f} s of a SIGKILL")
        back = ledger.release_owner(name)
        ring_all(self._run_dir)
        if worker.process.poll() == BEYOND_REPAIR:
            raise WorkerDiedError(name, f"{cause}\n{self._log_tail(name)}")
        if worker.process.poll() == 1 and not worker.ready and not worker.restarts:
            # Its own exception at the first start: it would only come again.
            raise WorkerDiedError(name, f"{cause} before it was ready\n{self._log_tail(name)}")
        if worker.counted >= limit:
            after = f", after {limit} restarts" if limit else ""
            raise WorkerDiedError(name, f"{cause}{after}\n{self._log_tail(name)}")
        worker.close()
        wait_s = self._config.backoff_s * 2**worker.counted
        worker.restarts += 1
        worker.counted += 1
        worker.due = time.monotonic() + wait_s
        self._tracer.instant(f"{RESTART} {name}", samples=back)
        LOG.warning(
            "%s died: %s; %d samples go back, restart %d of %d in %.1f s (its log: %s)",
            name,
            cause,
            back,
            worker.counted,
            limit,
            wait_s,
            self._log_path(name),
        )

    def _cause_of_death(self, worker: _Worker) -> str | None:
        """Why a worker must be replaced; None while it works, and once it has ended because the run is over."""
        code = worker.process.poll()
        if code is not None:
            return None if code == 0 else f"exit status {code}"
        worker.listen()
        silent = time.monotonic() - worker.heard
        allowed = self._lease_s if worker.ready else self._config.start_s
        if silent <= allowed:
            return None
        return f"no progress for {silent:.1f} s; {'lease_s' if worker.ready else 'start_s'} is {allowed:.1f} s"

    def _log_path(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    def _log_tail(self, name: str) -> str:
        return self._log_path(name).read_text(errors="replace")[-_TAIL_CHARACTERS:]


def _ended(process: WorkerProcess, timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
