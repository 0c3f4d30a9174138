"""The command line of a recipe: every field of its configuration, and what to do with it."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.logging import RichHandler
from transformers.utils.logging import disable_progress_bar

from asyncopd.config import RunConfig, from_yaml, to_yaml
from asyncopd.errors import AsyncOPDError, ConfigError
from asyncopd.interface import Inputs, RunResult
from asyncopd.pipeline import run
from asyncopd.preflight import preflight
from asyncopd.tracking.before_after import before_after_table
from teacher_cache.errors import TeacherCacheError


@dataclass(frozen=True, kw_only=True, slots=True)
class Invocation:
    """What a recipe's command line says beside the configuration."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    resume: bool = False
    """Go on with the run of this --name (without one: the newest of this recipe) from its newest checkpoint."""
    resume_version: int | None = None
    """Go on from the checkpoint of this policy version instead of the newest."""
    print_config: bool = False
    """Print the resolved configuration and stop."""
    dry_run: bool = False
    """Check all that can be checked without loading weights, and stop."""


def main(config: RunConfig, argv: Sequence[str] | None = None, *, description: str | None = None) -> int:
    """Run a recipe with the command line's overrides; the exit status.

    description     what --help says first, such as the recipe's docstring
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(show_path=False)])
    logging.getLogger("asyncopd").setLevel(logging.INFO)
    disable_progress_bar()
    console = Console()
    try:
        asked = tyro.cli(Invocation, default=Invocation(config=config), args=argv, description=description)
        return _obey(asked, console)
    except (AsyncOPDError, TeacherCacheError) as error:
        Console(stderr=True).print(f"asyncopd: {error}", style="red", markup=False, highlight=False)
        return 1


def _obey(asked: Invocation, console: Console) -> int:
    if asked.print_config:
        console.out(to_yaml(asked.config), end="", highlight=False)
        return 0
    if asked.dry_run:
        checks = preflight(asked.config, Inputs())
        counts = f"{len(checks.prompts.prompts)} prompts, {len(checks.prompts.held_out)} held out"
        console.print(f"everything that can be checked without weights is in order: {counts}")
        return 0
    if asked.resume_version is not None and not asked.resume:
        raise ConfigError("--resume-version needs --resume")
    result = run(asked.config, resume=asked.resume, resume_version=asked.resume_version)
    show(result, console)
    return 0


def show(result: RunResult, console: Console) -> None:
    """The table before / after, and where everything is."""
    if result.before is not None and result.after is not None:
        console.print(before_after_table(result.before, result.after, report=result.path / "report.html"))
    if result.stopped:
        console.print(f"stopped at policy version {result.policy_version}; --resume --name {result.path.name} goes on")


def train_again(path: Path) -> int:
    """Run a resolved configuration again, under a new automatic name."""
    if not path.is_file():
        raise ConfigError(f"there is no configuration {str(path)!r}; give the config.yaml of a run folder")
    config = from_yaml(path.read_text(), str(path))
    return main(replace(config, name=""), [])


if __name__ == "__main__":
    sys.exit(train_again(Path(sys.argv[1])))
