"""``python -m asyncopd.worker KIND INDEX RUN_DIR BEAT``: one worker process, started by the supervisor.

BEAT is the descriptor of a pipe into which the worker writes a byte whenever it has made progress.

Everything it needs is in the run folder: the resolved configuration, the tokenised prompts, the ledger, the weights.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from asyncopd.allocator import keep_freed_memory
from asyncopd.errors import WeightsMismatchError
from asyncopd.queue.doorbell import Doorbell
from asyncopd.queue.ledger import Ledger
from asyncopd.run_folder import RunFolder
from asyncopd.stage import Stage
from asyncopd.supervisor import BEYOND_REPAIR
from asyncopd.tracking.trace import Tracer
from asyncopd.workers import build_worker


def main(argv: list[str]) -> int:
    """Run one worker until the run is over, it is told to stop, or its parent is gone."""
    kind, index, run_dir, pipe = argv
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_freed_memory()
    folder = RunFolder(Path(run_dir))
    with open_stage(folder, kind, int(index), beat_into(int(pipe))) as stage:
        threading.Thread(target=_obey_parent, args=(stage,), name="parent", daemon=True).start()
        worker = build_worker(kind, stage, folder)
        stage.tracer.instant("ready")
        stage.beat()
        try:
            worker.run()
        except WeightsMismatchError:
            stage.log.exception("this worker cannot go on, and would not after a restart")
            return BEYOND_REPAIR
    return 0


@contextmanager
def open_stage(folder: RunFolder, kind: str, index: int, beat: Callable[[], None] = lambda: None) -> Iterator[Stage]:
    """The stage of one worker; must be used in the thread that opens it."""
    config = folder.config()
    name = f"{kind}-{index}"
    with (
        Tracer(folder.path, name) as tracer,
        Ledger.open(folder.ledger_path) as ledger,
        Doorbell(folder.path, name) as doorbell,
    ):
        yield Stage(
            name=name,
            run_dir=folder.path,
            ledger=ledger,
            tracer=tracer,
            doorbell=doorbell,
            seed=config.seed,
            lease_s=config.queue.lease_s,
            load_s=config.supervision.start_s,
            wakes=("scorer-0",) if kind == "rollout" else ("learner",),
            beat=beat,
        )


def beat_into(pipe: int) -> Callable[[], None]:
    """A function that tells the supervisor of progress and never waits for it."""
    os.set_blocking(pipe, False)

    def beat() -> None:
        # Full: the supervisor has beats enough to read. Broken: it is gone, and the other pipe ends this process.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(pipe, b".")

    return beat


def _obey_parent(stage: Stage) -> None:
    """Stop when told to; end at once when the pipe closes, because then the parent is gone."""
    # Unbuffered: a daemon thread inside a buffered read holds a lock that the interpreter wants at its end.
    told = False
    while word := os.read(sys.stdin.fileno(), 64):
        if b"stop" in word:
            told = True
            stage.stop()
    if not told:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
