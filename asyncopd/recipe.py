"""A recipe, and its command line: every field of its configuration, and what to do with it."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.logging import RichHandler
from transformers.utils.logging import disable_progress_bar

from asyncopd.config import RunConfig, from_yaml, to_yaml
from asyncopd.errors import AsyncOPDError, ConfigError
from asyncopd.interface import Callbacks, Inputs, RunResult
from asyncopd.pipeline import run
from asyncopd.preflight import preflight
from asyncopd.tracking.before_after import before_after_table
from teacher_cache.errors import TeacherCacheError


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a recipe file's function ``recipe`` returns, so that a sweep can take it up.

    callbacks   of a run with a given configuration, such as an evaluation of the recipe's own
    """

    config: RunConfig
    callbacks: Callable[[RunConfig], Callbacks] | None = None

    def callbacks_of(self, config: RunConfig) -> Callbacks:
        """The callbacks of a run."""
        return Callbacks() if self.callbacks is None else self.callbacks(config)


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


def main(recipe: RunConfig | Recipe, argv: Sequence[str] | None = None, *, description: str | None = None) -> int:
    """Run a recipe with the command line's overrides; the exit status.

    description     what --help says first, such as the recipe's docstring
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe(config=recipe)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(show_path=False)])
    logging.getLogger("asyncopd").setLevel(logging.INFO)
    disable_progress_bar()
    console = Console()
    try:
        asked = tyro.cli(Invocation, default=Invocation(config=recipe.config), args=argv, description=description)
        return _obey(asked, recipe, console)
    except (AsyncOPDError, TeacherCacheError) as error:
        Console(stderr=True).print(f"asyncopd: {error}", style="red", markup=False, highlight=False)
        return 1


def _obey(asked: Invocation, recipe: Recipe, console: Console) -> int:
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
    callbacks = recipe.callbacks_of(asked.config)
    result = run(asked.config, callbacks=callbacks, resume=asked.resume, resume_version=asked.resume_version)
    show(result, console)
    return 0


def show(result: RunResult, console: Console) -> None:
    """The table before / after, and where everything is."""
    if result.before is not None and result.after is not None:
        console.print(before_after_table(result.before, result.after, report=result.path / "report.html"))
    if result.stopped:
        console.print(f"stopped at policy version {result.policy_version}; --resume --name {result.path.name} goes on")


def load_recipe(path: Path) -> Recipe:
    """The recipe of a file with a function ``recipe``, or of a config.yaml; ConfigError where it is neither."""
    if not path.is_file():
        raise ConfigError(f"there is no recipe {str(path)!r}; give a recipe's .py file, or the config.yaml of a run")
    if path.suffix in (".yaml", ".yml"):
        return Recipe(config=from_yaml(path.read_text(), str(path)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file; give a recipe's .py file, or the config.yaml of a run")
    # As for a script that is run: its neighbours can be imported.
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if "recipe" not in vars(module):
        raise ConfigError(f"{path} has no function recipe() -> asyncopd.recipe.Recipe; a sweep needs it")
    return module.recipe()


def train_again(path: Path) -> int:
    """Run a resolved configuration again, under a new automatic name."""
    if not path.is_file():
        raise ConfigError(f"there is no configuration {str(path)!r}; give the config.yaml of a run folder")
    config = from_yaml(path.read_text(), str(path))
    return main(replace(config, name=""), [])


if __name__ == "__main__":
    sys.exit(train_again(Path(sys.argv[1])))
