"""The ``asyncopd`` command, and the command line of a recipe: thin, everything is a call into the library."""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from asyncopd.errors import AsyncOPDError


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Run a resolved configuration (runs/<name>/config.yaml) again, under a new name."""

    config: Annotated[Path, tyro.conf.Positional]
    """The config.yaml of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Show a running or finished run."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder, runs/<name>."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Make report.html, trace.json and summary.json of a run again."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder, runs/<name>."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """Check losses by exact enumeration; every combination of the registry, or one loss of any library."""

    loss: Annotated[str | None, tyro.conf.Positional] = None
    """Import path of a loss, package.module:function; nothing audits the whole registry."""
    json: bool = False
    """Print the table as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerView:
    """Look into the sample queue of a run, also of one that is running."""

    action: Annotated[Literal["show", "verify"], tyro.conf.Positional]
    """show: counts, ages, leases, reasons for drops. verify: recount everything, read every payload; the exit status is
    1 if something is wrong."""
    run: Annotated[Path, tyro.conf.Positional]
    """The run folder, runs/<name>."""


_USAGE = """usage: asyncopd {launch,train,sweep,status,report,ledger,replay,offline,sft,audit} ...

  launch [options] recipe.py [recipe options]   start a recipe; Ctrl-C stops it with a checkpoint
  train CONFIG                                  run a resolved configuration again
  sweep SPEC [axis=value ...]                   run a grid of runs side by side, and gather them in one table
  status RUN                                    show a running or finished run
  report RUN                                    make report.html, trace.json and summary.json again
  ledger {show,verify} RUN                      look into the sample queue of a run; check it in full
  replay RUN [--objective.name ...]             train a recorded run again, offline, with another objective
  offline SCORED --student MODEL                train on answers that `teacher-cache score` has scored
  sft --data.prompts DATA --student MODEL       train on the answers of a data set, before a distillation
  audit [LOSS] [--json]                         check losses by exact enumeration

`asyncopd COMMAND --help` says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The ``asyncopd`` command; its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "launch": _launch,
        "train": _train,
        "sweep": _sweep,
        "status": _status,
        "report": _report,
        "ledger": _ledger,
        "replay": _replay,
        "offline": _offline,
        "sft": _sft,
        "audit": _audit,
    }
    if not words or words[0] not in commands:
        asked_for_help = bool(words) and words[0] in ("-h", "--help")
        print(_USAGE, file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    return _guarded(lambda: commands[words[0]](words[1:]))


def _guarded(command: Callable[[], int]) -> int:
    """Run a command; what asyncopd raises on purpose is a message, not a traceback."""
    try:
        return command()
    except AsyncOPDError as error:
        print(f"asyncopd: {error}", file=sys.stderr)
        return 1


def _launch(words: list[str]) -> int:
    from asyncopd.launch import launch  # imports nothing heavy, so the launcher starts at once

    return launch(words)


def _train(words: list[str]) -> int:
    from asyncopd.recipe import train_again

    return train_again(tyro.cli(Train, args=words, prog="asyncopd train").config)


def _sweep(words: list[str]) -> int:
    from asyncopd.sweep.cli import sweep_main

    return sweep_main(words)


def _sft(words: list[str]) -> int:
    from asyncopd.sft import sft_main

    return sft_main(words)


def _status(words: list[str]) -> int:
    from asyncopd.tracking.dashboard import status

    status(tyro.cli(Status, args=words, prog="asyncopd status").run, Console())
    return 0


def _report(words: list[str]) -> int:
    from asyncopd.tracking.chrome_trace import write_chrome_trace
    from asyncopd.tracking.report import write_report
    from asyncopd.tracking.summary import write_summary

    run = tyro.cli(Report, args=words, prog="asyncopd report").run
    write_summary(run)
    write_chrome_trace(run)
    print(write_report(run))
    return 0


def _ledger(words: list[str]) -> int:
    from asyncopd.queue.describe import describe
    from asyncopd.queue.ledger import Ledger
    from asyncopd.run_folder import RunFolder

    asked = tyro.cli(LedgerView, args=words, prog="asyncopd ledger")
    with Ledger.open(RunFolder(asked.run).ledger_path) as ledger:
        if asked.action == "show":
            Console().out(describe(ledger), highlight=False)
            return 0
        found = ledger.verify()
        if found:
            # A run that goes on may delete a payload between the look at the ledger and the look at the file.
            still = set(ledger.verify())
            found = [violation for violation in found if violation in still]
        if not found:
            print(f"the ledger is sound: {ledger.counts().admitted} samples, every payload that is kept is whole")
            return 0
    more = f"\nand {len(found) - 1} more" if len(found) > 1 else ""
    print(f"asyncopd: {found[0]}{more}", file=sys.stderr)
    return 1


def _replay(words: list[str]) -> int:
    from asyncopd.replay import replay_main

    return replay_main(words)


def _offline(words: list[str]) -> int:
    from asyncopd.scored_data import offline_main

    return offline_main(words)


def _audit(words: list[str]) -> int:
    from asyncopd.audit import HELP, audit

    options = tyro.cli(Audit, args=words, prog="asyncopd audit", description=HELP)
    # Unlike ``python -m``, the installed command does not look into the current folder, where a loss of one's own is.
    sys.path.insert(0, "")
    return audit(options.loss, options.json)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(main())
