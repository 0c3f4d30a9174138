"""Sweeps: which runs a file asks for, what becomes of them, and the table at the end."""

import csv
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from asyncopd.config import to_yaml
from asyncopd.errors import ConfigError
from asyncopd.sweep.runner import read_result
from asyncopd.sweep.spec import Sweep, read_sweep
from asyncopd.sweep.wandb_sweep import wandb_yaml
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import ROOT, tiny_config

STAGES = ("rollout", "teacher", "learner")
TIMES = {"wall_s", "cpu_s", "tokens_per_s", "overlap", "restarts"}
TIMES |= {f"{what}_{stage}" for what in ("busy", "cpu") for stage in STAGES}
"""Columns of the table that no two runs have alike."""
RECIPE = """
from pathlib import Path
from asyncopd import Callbacks
from asyncopd.config import from_yaml
from asyncopd.recipe import Recipe

def recipe():
    config = from_yaml((Path(__file__).parent / "base.yaml").read_text(), "base.yaml")
    return Recipe(config=config, callbacks=lambda config: Callbacks(evaluate=lambda student, version: {
        "held_out/answer": float(version)}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base configuration of two steps, and a recipe that has it."""
    made = tmp_path_factory.mktemp("sweep")
    teacher = save_checkpoint(make_tiny_llama(0), made / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), made / "student")
    config = tiny_config(made, teacher, student, name="", steps=2)
    (made / "base.yaml").write_text(to_yaml(replace(config, data=replace(config.data, held_out_from_end=4))))
    (made / "recipe.py").write_text(RECIPE)
    return made


def write(folder: Path, name: str = "tried", **values: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump(
            {"name": name, "base": "base.yaml", "runs_dir": str(folder / "store"), **values}, sort_keys=False
        )
    )
    return path


def points(sweep: Sweep) -> list[tuple[Any, ...]]:
    return [tuple(run.point.values()) for run in sweep.runs]


def command(path: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "asyncopd.cli", "sweep", str(path), *words]


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [{name: value for name, value in row.items() if name not in TIMES} for row in csv.DictReader(file)]


def test_a_grid_is_every_combination_of_its_axes_and_seeds(folder: Path) -> None:
    method = {"few": {"objective.design": "systematic(4)"}, "all": {"objective.design": "full", "learner.lr": 0.01}}
    sweep = read_sweep(
        write(folder, grid={"mode": ["sync", "lagged:1"], "method": method}, seeds=[0, 1], set={"steps": 3})
    )
    assert points(sweep) == list(itertools.product(["sync", "lagged:1"], ["few", "all"], [0, 1]))
    last = sweep.runs[-1].config
    assert (last.mode, last.objective.design, last.learner.lr, last.seed, last.steps) == (
        "lagged:1",
        "full",
        0.01,
        1,
        3,
    )


def test_several_grids_are_all_run_and_what_two_of_them_ask_for_is_run_once(folder: Path) -> None:
    sweep = read_sweep(write(folder, grid=[{"mode": ["sync", "async"]}, {"mode": ["sync", "lagged:2"]}], seeds=[0]))
    assert points(sweep) == [("sync", 0), ("async", 0), ("lagged:2", 0)]


def test_a_run_is_known_by_what_it_computes(folder: Path) -> None:
    first = read_sweep(write(folder, "first", grid={"steps": [2]})).runs[0]
    other = read_sweep(write(folder, "other", grid={"objective.design": ["systematic(8)"]}, set={"steps": 2})).runs[0]
    assert first.name == other.name
    assert first.config.tracking != other.config.tracking
    changed = folder / "student" / "config.json"
    before = changed.read_text()
    changed.write_text(before.replace("0.2", "0.3"))
    assert read_sweep(folder / "first.yaml").runs[0].name != first.name
    changed.write_text(before)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"grid": {"learner.rate": [1]}}, "did you mean learner.lr"),
        ({"grid": {"mode": "sync"}}, "expected a list of values"),
        ({"grid": {"mode": ["later"]}}, "expected sync, async"),
        ({"gird": {}}, "it knows name, base"),
        ({"base": "nothing.py", "grid": {}}, "there is no recipe"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_with_what_to_write_instead(
    folder: Path, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sweep(write(folder, "wrong", **values))
    assert said in str(caught.value)


def test_agents_of_wandb_get_the_same_runs(folder: Path) -> None:
    method = {"few": {"objective.design": "systematic(4)"}, "all": {"objective.design": "full"}}
    grids = [{"mode": ["sync", "lagged:1"], "method": method}, {"learner.lr": [0.1, 0.2]}]
    sweep = read_sweep(write(folder, grid=grids, seeds=[0, 1]))
    asked = []
    for document in yaml.safe_load_all(wandb_yaml(sweep, "lab")):
        assert document["method"] == "grid"
        assert document["command"][:2] == ["asyncopd", "sweep"]
        axes = {axis: parameter["values"] for axis, parameter in document["parameters"].items()}
        asked += [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    assert asked == [run.point for run in sweep.runs]
    for point, run in zip(asked, sweep.runs, strict=True):
        assert sweep.only({axis: str(value) for axis, value in point.items()}).runs == [run]


def test_runs_are_grouped_and_named_in_wandb(folder: Path) -> None:
    run = read_sweep(write(folder, grid={"mode": ["lagged:1"]}, seeds=[4])).runs[0]
    assert (run.config.tracking.wandb.group, run.config.tracking.wandb.name) == ("tried", "mode lagged:1, seed 4")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_fails_is_reported_and_the_others_go_on(folder: Path) -> None:
    path = write(
        folder, "failing", base="recipe.py", runs_dir=str(folder / "failing"),
        grid=[{"data.prompts": [str(folder / "none.jsonl")]}, {"mode": ["sync"]}], jobs=1,
    )  # fmt: skip
    told = subprocess.run(command(path), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert told.returncode == 1
    assert "1 runs done, 0 were done before, 1 failed" in told.stdout
    assert "there is no prompts file" in told.stdout
    failed, done = table(folder / "failing" / "failing.csv")
    assert (failed["status"], done["status"]) == ("failed", "done")
    assert (done["answer_before"], done["answer_after"]) == ("0.0", "2.0")
    again = subprocess.run(command(path), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "0 runs done, 1 were done before, 1 failed" in again.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_that_was_killed_goes_on_and_ends_with_the_table_of_one_that_was_not(folder: Path) -> None:
    grid = {"mode": ["sync", "lagged:1"], "objective.design": ["systematic(4)", "full"]}
    options: dict[str, Any] = {"base": "recipe.py", "grid": grid, "seeds": [0], "jobs": 2, "set": {"steps": 6}}
    left_alone = write(folder, "alone", runs_dir=str(folder / "alone"), **options)
    assert subprocess.run(command(left_alone), cwd=ROOT, timeout=300).returncode == 0

    killed = write(folder, "killed", runs_dir=str(folder / "killed"), **options)
    runs = read_sweep(killed).runs
    sweep = subprocess.Popen(command(killed), cwd=ROOT)
    deadline = time.monotonic() + 200
    while not any(read_result(run) for run in runs):
        assert time.monotonic() < deadline
        assert sweep.poll() is None
        time.sleep(0.02)
    family = psutil.Process(sweep.pid).children(recursive=True)
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert not all(read_result(run) for run in runs)
    assert subprocess.run(command(killed), cwd=ROOT, timeout=300).returncode == 0
    assert table(folder / "killed" / "killed.csv") == table(folder / "alone" / "alone.csv")
