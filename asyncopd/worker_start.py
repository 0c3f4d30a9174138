"""How a worker process comes to be: what it is, the environment it gets, and the two pipes that tie it to its run."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

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


class WorkerProcess(Protocol):
    """As much of ``subprocess.Popen`` as a supervisor needs; ``stdin`` is the pipe that the worker lives by."""

    stdin: IO[bytes] | None

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...


class WorkerStarter(Protocol):
    """Makes worker processes."""

    def start(self, spec: WorkerSpec, run_dir: Path, log: Path) -> tuple[WorkerProcess, int]:
        """The process of a worker, whose output goes to ``log``, and the descriptor of its signs of progress."""


class Interpreters:
    """Every worker is a new Python interpreter, which takes it some seconds to import what it needs."""

    def start(self, spec: WorkerSpec, run_dir: Path, log: Path) -> tuple[WorkerProcess, int]:
        """``python -m asyncopd.worker``, in a session of its own."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "asyncopd.worker", spec.kind, str(spec.index), str(run_dir), str(writer)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=spec.environment(os.environ),
                    start_new_session=True,
                    pass_fds=(writer,),
                )
        finally:
            os.close(writer)
        return process, reader
