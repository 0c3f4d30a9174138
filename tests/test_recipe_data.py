"""The prompts that the recipes ship: enough of them, no repeats, and none held out that training has nearly seen."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "recipes" / "data"


def questions(name: str) -> list[str]:
    rows = [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
    for row in rows:
        assert list(row) == ["messages", "longest"]
        assert 4 <= row["longest"] <= 256
        assert [message["role"] for message in row["messages"]] == ["user"]
    return [row["messages"][0]["content"] for row in rows]


def words(question: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", question.lower()))


def test_the_counts_are_those_the_recipe_promises() -> None:
    assert len(questions("prompts.jsonl")) >= 220
    assert len(questions("held_out.jsonl")) == 40


def test_the_bounds_of_the_answers_are_lognormal() -> None:
    rows = [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    logs = [math.log(row["longest"]) for row in rows]
    assert statistics.mean(logs) == pytest.approx(math.log(32), abs=3 * 0.8 / len(logs) ** 0.5)
    assert statistics.stdev(logs) == pytest.approx(0.8, abs=0.12)


def test_no_prompt_is_repeated_and_all_are_short_plain_english() -> None:
    everything = questions("prompts.jsonl") + questions("held_out.jsonl")
    assert len({words(question) for question in everything}) == len(everything)
    for question in everything:
        assert question.isascii()
        assert question == question.strip()
        assert 10 < len(question) < 120


def test_no_held_out_prompt_is_near_a_training_one() -> None:
    training = [words(question) for question in questions("prompts.jsonl")]
    for question in questions("held_out.jsonl"):
        asked = words(question)
        nearest = max(len(asked & other) / len(asked | other) for other in training)
        assert nearest < 0.5, f"{question!r} shares {nearest:.0%} of its words with a training prompt"
