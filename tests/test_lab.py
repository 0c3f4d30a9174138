"""The staleness lab: the task, the models that are shipped, and its smoke form."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncopd.prompts import load_prompts
from asyncopd.recipe import load_recipe
from asyncopd.sweep.spec import read_sweep
from tests.tiny_run import ROOT

LAB = ROOT / "recipes" / "lab"
sys.path.insert(0, str(LAB))

import addition  # noqa: E402  the recipe's neighbour
import findings  # noqa: E402
import run_lab  # noqa: E402


def test_the_scratchpad_adds_column_by_column_and_ends_with_the_sum() -> None:
    assert addition.solution("471+285=") == "15006 78015 42107 0756."
    for question in addition.draw_prompts(200, seed=3):
        *columns, total = addition.solution(question).rstrip(".").split(" ")
        a, b = question.rstrip("=").split("+")
        assert int(total) == int(a) + int(b)
        assert [word[0] for word in columns] == list(reversed(a))
        assert all(int(word[0]) + int(word[1]) + int(word[2]) == int(word[3:]) for word in columns)
        assert [word[2] for word in columns] == ["0", *(word[3] for word in columns[:-1])]


def test_every_text_of_the_task_survives_the_tokenizer() -> None:
    tokenizer = addition.make_tokenizer()
    for text in ("471+285=", addition.solution("999+999=")):
        ids = tokenizer(text)["input_ids"]
        assert (len(ids), tokenizer.decode(ids)) == (len(text), text)


def test_no_held_out_sum_is_trained_on_and_all_prompts_can_be_used() -> None:
    config = load_recipe(LAB / "lab.py").config
    found = load_prompts(config.data, addition.make_tokenizer(), 128)
    assert (len(found.prompts), len(found.held_out), found.skipped) == (4096, 256, ())
    assert {p.text for p in found.prompts}.isdisjoint({p.text for p in found.held_out})


@pytest.mark.parametrize(("name", "least", "most"), [("teacher", 0.97, 1.0), ("student", 0.08, 0.25)])
def test_the_shipped_teacher_is_nearly_always_right_and_the_student_mostly_wrong(
    name: str, least: float, most: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(LAB / "models" / name, dtype=torch.float32)
    (accuracy,) = addition.greedy_accuracy(model, addition.draw_prompts(400, seed=777)).values()
    assert least <= accuracy <= most


def test_the_shipped_models_are_small() -> None:
    assert sum(path.stat().st_size for path in (LAB / "models").rglob("*") if path.is_file()) < 4 * 2**20


def test_every_sweep_of_the_lab_can_be_run() -> None:
    assert {path.stem for path in (LAB / "sweeps").glob("*.yaml")} == {*run_lab.SWEEPS, *run_lab.SMOLLM2}
    assert all(len(read_sweep(LAB / "sweeps" / f"{name}.yaml").runs) >= 9 for name in run_lab.SWEEPS)


@pytest.mark.slow
def test_every_sweep_of_smollm2_can_be_run() -> None:
    assert all(len(read_sweep(LAB / "sweeps" / f"{name}.yaml").runs) >= 12 for name in run_lab.SMOLLM2)


def test_an_interval_over_seeds_is_students_t() -> None:
    found = findings.interval([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds) == (2.0, 3)
    assert found.half == pytest.approx(4.303 / 3**0.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_that_made_the_models_makes_a_pair_that_can_be_run(tmp_path: Path) -> None:
    command = [sys.executable, str(LAB / "make_models.py"), "--steps", "60"]
    made = subprocess.run([*command, "--models", str(tmp_path), "--data", str(tmp_path)], cwd=ROOT, timeout=800)
    assert made.returncode == 0
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (tmp_path / name).read_text() == (LAB / "data" / name).read_text()
    for name in ("teacher", "student"):
        shipped = AutoModelForCausalLM.from_pretrained(LAB / "models" / name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert (model.dtype, model.config.to_diff_dict()) == (shipped.dtype, shipped.config.to_diff_dict())
        # The format comes first: nothing is right yet, but no answer is far from one in length.
        assert 0.0 <= next(iter(addition.greedy_accuracy(model, addition.draw_prompts(50, seed=5)).values())) < 0.5
