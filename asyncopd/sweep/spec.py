"""What a sweep runs: a YAML file that names a recipe, what every run sets, and grids over what varies.

    name: directions
    base: lab.py                          # a recipe with a function ``recipe``, or a config.yaml; relative to this file
    set: {steps: 200}                     # fields of every run
    grid:                                 # one grid, or a list of grids whose runs are all run
      mode: [sync, "lagged:4"]            # a field and its values
      method:                             # a name of your own: each value sets several fields
        dense: {objective.design: full}
        sparse: {objective.design: systematic(4), objective.centring: hajek}
    seeds: [0, 1, 2]

A run is known by what it computes, so that sweeps that share runs run them once.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import cattrs
import yaml

from asyncopd.config import RunConfig, from_yaml, plain
from asyncopd.errors import ConfigError
from asyncopd.recipe import Recipe, load_recipe

SEED = "seed"
_WITHOUT_EFFECT = ("name", "runs_dir", "recipe", "tracking")
_FILES = (("student",), ("teacher", "model"), ("data", "prompts"), ("data", "held_out"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """The file of a sweep, as it is written."""

    name: str
    """Names the table, and the group of the runs in wandb."""
    base: str
    """Path of a recipe or of a config.yaml, relative to the file."""
    runs_dir: str = "runs/sweep"
    """Where the run folders are; sweeps may share one."""
    set: dict[str, Any]
    """Fields of every run."""
    grid: list[dict[str, Any]]
    """Grids; an axis is a field with a list of values, or a name with a mapping from labels to fields."""
    seeds: list[int]
    """Seeds of each point of a grid."""
    jobs: int = 0
    """Runs side by side; 0: one for each core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRun:
    """One run of a sweep.

    point   its value on every axis, and its seed: what the table shows of it
    config  the whole configuration; its name is made of what the run computes
    """

    point: Mapping[str, Any]
    config: RunConfig

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.config.name

    @property
    def title(self) -> str:
        """The point in words."""
        return ", ".join(f"{axis} {value}" for axis, value in self.point.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A sweep that was read: every run is a valid configuration."""

    name: str
    path: Path
    jobs: int
    recipe: Recipe
    axes: Sequence[Mapping[str, list[Any]]]
    runs: list[SweepRun]

    def only(self, wanted: Mapping[str, str]) -> "Sweep":
        """The part of it at some values of some axes; ConfigError where there is no such run."""
        chosen = [run for run in self.runs if all(str(run.point.get(axis)) == value for axis, value in wanted.items())]
        if not chosen:
            known = {axis: sorted({str(run.point.get(axis)) for run in self.runs}) for axis in wanted}
            raise ConfigError(f"no run of sweep {self.name!r} has {dict(wanted)}; the values there are: {known}")
        return replace(self, runs=chosen)


def read_sweep(path: Path, changes: Mapping[str, Any] | None = None) -> Sweep:
    """The sweep of a YAML file, every run of it checked; ConfigError says what does not fit.

    changes   fields set in every run after all others, for example a short form's ``steps``
    """
    config = _read(path)
    recipe = load_recipe(path.parent / config.base)
    base = replace(recipe.config, runs_dir=Path(config.runs_dir))
    runs: dict[str, SweepRun] = {}
    for block in config.grid:
        for point, fields_of_point in _points(block, path):
            for seed in config.seeds:
                values = {**config.set, **fields_of_point, SEED: seed, **(changes or {})}
                run = _run({**point, SEED: seed}, _with_fields(base, values, path), config.name)
                runs.setdefault(run.name, run)
    axes = [{**{axis: list(values) for axis, values in block.items()}, SEED: config.seeds} for block in config.grid]
    return Sweep(name=config.name, path=path, jobs=config.jobs, recipe=recipe, axes=axes, runs=list(runs.values()))


def _read(path: Path) -> SweepConfig:
    if not path.is_file():
        raise ConfigError(f"there is no sweep {str(path)!r}; give a YAML file")
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; expected a mapping with {_named(SweepConfig)}")
    grid = values.get("grid") or {}
    values = {"set": {}, "seeds": [0], **values, "grid": grid if isinstance(grid, list) else [grid]}
    try:
        return cattrs.Converter(forbid_extra_keys=True).structure(values, SweepConfig)
    except cattrs.BaseValidationError as error:
        details = "; ".join(cattrs.transform_error(error, path="sweep"))
        raise ConfigError(f"{path} is not a sweep: {details}; it knows {_named(SweepConfig)}") from error


def _named(kind: type) -> str:
    return ", ".join(field.name for field in fields(kind))


def _points(block: Mapping[str, Any], path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every point of a grid: its value on each axis, and the fields that it sets."""
    choices = []
    for axis, values in block.items():
        if isinstance(values, list):
            choices.append([((axis, value), {axis: value}) for value in values])
        elif isinstance(values, dict) and all(isinstance(each, dict) for each in values.values()):
            choices.append([((axis, label), named) for label, named in values.items()])
        else:
            raise ConfigError(
                f"axis {axis!r} in {path} is {values!r}; expected a list of values of that field, or a mapping from "
                "labels to the fields that each sets"
            )
    for chosen in itertools.product(*choices):
        yield dict(point for point, _ in chosen), {name: v for _, named in chosen for name, v in named.items()}


def _with_fields(base: RunConfig, values: Mapping[str, Any], path: Path) -> RunConfig:
    """The configuration with some fields, given by dotted names, set to other values."""
    found = plain(base)
    for dotted, value in values.items():
        inside: Any = found
        *parents, last = dotted.split(".")
        for name in parents:
            inside = inside.get(name) if isinstance(inside, dict) else None
        if not isinstance(inside, dict) or last not in inside:
            near = get_close_matches(dotted, _dotted(plain(base)), n=1, cutoff=0.0)[0]
            raise ConfigError(f"{path} sets {dotted!r}, which no run has; did you mean {near}?")
        inside[last] = value
    return from_yaml(yaml.safe_dump(found), str(path))


def _dotted(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    return [
        name
        for key, value in values.items()
        for name in (_dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]


def _run(point: Mapping[str, Any], config: RunConfig, group: str) -> SweepRun:
    named = replace(config, name=identity(config))
    run = SweepRun(point=point, config=named)
    wandb = replace(config.tracking.wandb, group=group, name=run.title)
    tracking = replace(config.tracking, live_view=False, report=False, wandb=wandb)
    return replace(run, config=replace(named, tracking=tracking))


def identity(config: RunConfig) -> str:
    """A name made of everything that changes what a run computes; files count by what is in them."""
    values = {name: value for name, value in plain(config).items() if name not in _WITHOUT_EFFECT}
    for place in _FILES:
        inside = values
        for name in place[:-1]:
            inside = inside[name]
        inside[place[-1]] = _contents(inside[place[-1]])
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _contents(path: str | None) -> str | None:
    """What stands for a file or a checkpoint's folder: a digest of its bytes; what is no file stands as it is."""
    if path is None or not Path(path).exists():
        return path
    at = Path(path)
    files = [at] if at.is_file() else sorted((*at.glob("*.safetensors"), *at.glob("config.json")))
    return _digest(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Of some files, which are read once for all runs of a sweep."""
    digest = hashlib.sha256()
    for file, _, _ in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
