"""``asyncopd sweep``: runs a sweep, shows how it goes, writes its table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml
from rich.console import Console

from asyncopd.errors import ConfigError
from asyncopd.sweep.runner import run_sweep
from asyncopd.sweep.spec import SweepRun, read_sweep
from asyncopd.sweep.table import write_table
from asyncopd.sweep.wandb_sweep import wandb_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions:
    """Run a sweep; started again, it does only what is not done, and it survives a kill."""

    spec: Annotated[Path, tyro.conf.Positional]
    """The YAML file of the sweep; `asyncopd/sweep/spec.py` shows one."""
    only: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Values of axes, axis=value: only the runs that have them."""
    set: tuple[str, ...] = ()
    """Fields to set in every run, field=value, for example steps=5 for a short form."""
    jobs: int = 0
    """Runs side by side; 0: what the file says, or one for each core."""
    out: Path | None = None
    """Folder of the table; by default the sweep's runs_dir, and no table where only a part is run."""
    retry: bool = False
    """Run those again that failed before."""
    table: bool = False
    """Run nothing, write the table of what is done."""
    wandb: bool = False
    """Print the same sweep for the agents of Weights & Biases, and run nothing."""


def sweep_main(words: list[str]) -> int:
    """The command; 1 if a run failed or is missing."""
    asked = tyro.cli(SweepOptions, args=words, prog="asyncopd sweep")
    changes = {name: yaml.safe_load(value) for name, value in _pairs(asked.set, "--set").items()}
    sweep = read_sweep(asked.spec, changes)
    console = Console(highlight=False)
    if asked.wandb:
        console.out(wandb_yaml(sweep, sweep.recipe.config.tracking.wandb.project), end="")
        return 0
    chosen = sweep.only(_pairs(asked.only, "a run")) if asked.only else sweep
    total, seen = len(chosen.runs), 0

    def show(each: SweepRun, row: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        console.out(f"{seen}/{total}  {each.title}: {_in_words(row)}")

    failed: dict[str, str] = {}
    if not asked.table:
        outcome = run_sweep(chosen, jobs=asked.jobs, retry=asked.retry, on_result=show)
        failed = outcome.failed
        console.out(f"{outcome.ran} runs done, {outcome.skipped} were done before, {len(failed)} failed")
        for title, error in failed.items():
            console.out(f"  {title}: {error}")
        if failed:
            console.out("the table says which; --retry runs them again")
        if outcome.stopped:
            console.out("stopped; the same command goes on")
            return 1
    if not asked.only or asked.out is not None:
        for path in write_table(chosen, asked.out or chosen.runs[0].config.runs_dir):
            console.out(str(path))
    return 1 if failed else 0


def _pairs(words: tuple[str, ...], what: str) -> dict[str, str]:
    if wrong := [word for word in words if "=" not in word]:
        raise ConfigError(f"{what} is given as {wrong[0]!r}; expected name=value")
    return dict(word.split("=", 1) for word in words)


def _in_words(row: dict[str, Any]) -> str:
    if row["status"] != "done":
        return f"failed: {row['error']}"
    parts = [
        f"{name.replace('_', ' ')} {row[f'{name}_before']:.3f} to {row[f'{name}_after']:.3f}"
        for name in [key.removesuffix("_after") for key in row if key.endswith("_after")]
        if name in ("reverse_kl", "accuracy") and None not in (row[f"{name}_before"], row[f"{name}_after"])
    ]
    return ", ".join([*parts, f"{row['wall_s']:.0f} s"])
