"""Runs the runs of a sweep side by side, each in a process forked from one that has imported everything.

    sweep ──fork──> run (learner) ──fork──> rollout-0, scorer-0
      │               └─ result.json, the row of the table; what else a finished run leaves is deleted
      └─ a pipe that closes with the sweep and ends its runs

A run that is done is skipped, one that was cut short goes on from its newest checkpoint: a sweep that was killed is
started again and ends as if nothing had been.
"""

import gc
import json
import logging
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncopd.errors import ConfigError
from asyncopd.interface import RunResult
from asyncopd.pipeline import run
from asyncopd.recipe import Recipe
from asyncopd.run_folder import RunFolder
from asyncopd.sweep.forked_workers import ForkedWorkers, close_all_but
from asyncopd.sweep.row import result_row
from asyncopd.sweep.spec import SEED, Sweep, SweepRun
from asyncopd.workers import cores, worker_specs

RESULT, FAILURE = "result.json", "failure.json"
_KEPT = {"config.yaml", "metrics.jsonl", "evaluations.jsonl", "summary.json", "logs", RESULT, FAILURE}
_POLL_S = 0.1
_STOPPED = 3
"""Exit status of a run that was asked to stop before its end."""


@dataclass(slots=True)
class Outcome:
    """What became of the runs of a sweep.

    ran         runs that this call brought to their end
    skipped     runs that were done before
    failed      title and reason of each run that failed, now or before
    stopped     whether it was stopped before every run had its turn
    """

    ran: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    stopped: bool = False


def run_sweep(
    sweep: Sweep,
    *,
    jobs: int = 0,
    retry: bool = False,
    on_result: Callable[[SweepRun, dict[str, Any]], None] | None = None,
) -> Outcome:
    """Run what is not done yet, one seed of every point before the next; a run that fails is reported, others go on.

    jobs        runs side by side; 0 takes the sweep's own number
    retry       run those again that failed before
    on_result   called with each run that ends, and its row
    """
    outcome, waiting = Outcome(), []
    for each in sorted(sweep.runs, key=lambda each: each.point[SEED]):
        known = read_result(each)
        if known is None or (retry and known["status"] == "failed"):
            waiting.append(each)
        elif known["status"] == "failed":
            outcome.failed[each.title] = known["error"]
        else:
            outcome.skipped += 1
    if not waiting:
        return outcome
    warm_up(waiting)
    try:
        with _Lifeline() as lifeline:
            _run_all(sweep.recipe, waiting, jobs or sweep.jobs or cores(), lifeline, outcome, on_result)
    finally:
        gc.unfreeze()
    return outcome


def read_result(each: SweepRun) -> dict[str, Any] | None:
    """The row of a run that ended, with its status, ``done`` or ``failed``; None for one that did not end yet."""
    for name in (RESULT, FAILURE):
        path = each.config.runs_dir / each.name / name
        if path.is_file():
            return json.loads(path.read_text())
    return None


def warm_up(runs: Sequence[SweepRun]) -> None:
    """Import what the runs need and do nothing that starts a thread, so that this process can be forked."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    disable_progress_bar()
    torch.set_num_threads(1)
    for path in {path for each in runs for path in (each.config.student, each.config.teacher.model)}:
        if (path / "config.json").is_file():
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    gc.collect()
    # What is there now is never freed, so that a child's collections do not copy its pages.
    gc.freeze()


class _Lifeline:
    """A pipe whose writing end only the sweep holds: it closes when the sweep ends, however it does."""

    def __enter__(self) -> "_Lifeline":
        self.reader, self.writer = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.reader)
        os.close(self.writer)


def _run_all(
    recipe: Recipe,
    waiting: list[SweepRun],
    jobs: int,
    lifeline: _Lifeline,
    outcome: Outcome,
    on_result: Callable[[SweepRun, dict[str, Any]], None] | None,
) -> None:
    if threading.active_count() > 1:
        names = [thread.name for thread in threading.enumerate()]
        raise ConfigError(f"a sweep forks its runs and must be started without other threads; there are {names}")
    running: dict[int, SweepRun] = {}
    stop = threading.Event()
    # Ctrl-C reaches every run by itself; they stop with a checkpoint.
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        while running or (waiting and not stop.is_set()):
            while waiting and len(running) < jobs and not stop.is_set():
                each = waiting.pop(0)
                running[fork_run(recipe, each, lifeline.reader)] = each
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    each = running.pop(pid)
                    _note(each, os.waitstatus_to_exitcode(status), outcome, on_result)
            time.sleep(_POLL_S)
    finally:
        signal.signal(signal.SIGINT, before)
    outcome.stopped = outcome.stopped or bool(waiting)


def _note(
    each: SweepRun, code: int, outcome: Outcome, on_result: Callable[[SweepRun, dict[str, Any]], None] | None
) -> None:
    """What became of one run."""
    if code == _STOPPED:
        outcome.stopped = True
        return
    row = read_result(each)
    if row is None:
        log = _log(each).read_text(errors="replace").strip().splitlines()
        row = {"status": "failed", "error": f"ended with {code}: {log[-1] if log else 'it left no message'}"}
        _write(each, FAILURE, row)
    if row["status"] == "done":
        outcome.ran += 1
    else:
        outcome.failed[each.title] = row["error"]
    if on_result is not None:
        on_result(each, row)


def fork_run(recipe: Recipe, each: SweepRun, lifeline: int) -> int:
    """Start a run in a fork of this process; its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_run(recipe, each, lifeline)
    return pid


def _be_run(recipe: Recipe, each: SweepRun, lifeline: int) -> NoReturn:
    """The run, in its own process; ends without running anything of the process that was copied."""
    code = 1
    try:
        log = _log(each)
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        close_all_but(lifeline)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO, force=True)
        workers = ForkedWorkers(worker_specs(each.config))
        threading.Thread(target=_end_with_the_sweep, args=(lifeline,), name="lifeline", daemon=True).start()
        code = _finish(recipe, each, workers)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        _write(each, FAILURE, {"status": "failed", "error": f"{type(error).__name__}: {error}".splitlines()[0]})
        raise
    finally:
        os._exit(code)


def _finish(recipe: Recipe, each: SweepRun, workers: ForkedWorkers) -> int:
    """Run or resume, write the row, and delete what a finished run has no more use for."""
    folder = each.config.runs_dir / each.name
    (folder / FAILURE).unlink(missing_ok=True)
    config, resume = each.config, (folder / "ledger.sqlite").exists()
    if resume:
        # As it was started, perhaps by another sweep with the same run in it.
        config = RunFolder(folder).config()
    elif folder.exists():
        shutil.rmtree(folder)
    result = run(config, callbacks=recipe.callbacks_of(config), resume=resume, starter=workers)
    if result.stopped:
        return _STOPPED
    _write(each, RESULT, _row(result))
    for path in folder.iterdir():
        if path.name not in _KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return 0


def _row(result: RunResult) -> dict[str, Any]:
    """The figures of a run that ended, with the seconds of all its processes on the cores."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"status": "done", **result_row(result), "cpu_s": sum(each.ru_utime + each.ru_stime for each in used)}


def _end_with_the_sweep(lifeline: int) -> None:
    """The pipe closes when the sweep is gone, killed or not; a run must not outlive it, nor its workers the run."""
    os.read(lifeline, 1)
    os._exit(1)


def _write(each: SweepRun, name: str, row: dict[str, Any]) -> None:
    """A row, whole or not at all."""
    folder = each.config.runs_dir / each.name
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}"
    partial.write_text(json.dumps(row, indent=1) + "\n")
    partial.replace(folder / name)


def _log(each: SweepRun) -> Path:
    return each.config.runs_dir / "logs" / f"{each.name}.log"
