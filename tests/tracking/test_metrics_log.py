"""Metric rows are never lost, and lost timelines are marked."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncopd.tracking.metrics import (
    MetricsFollower,
    MetricsLog,
    held_out_values,
    last,
    read_evaluations,
    read_metrics,
    series,
)


def held_out(kl: float, answer: str = "an answer") -> SimpleNamespace:
    estimate = SimpleNamespace(mean=kl, ci95=0.1)
    return SimpleNamespace(
        reverse_kl=estimate, forward_kl=estimate, mean_length=estimate, eos_share=0.5, samples=[("a prompt", answer)]
    )


def values_of(run_dir: Path, name: str = "loss") -> list[tuple[int, float]]:
    return [(row.policy_version, value) for row, value in series(read_metrics(run_dir), name)]


def test_a_step_that_goes_backwards_keeps_every_value(tmp_path: Path):
    log = MetricsLog(tmp_path)
    for version in (1, 2, 3, 2, 1, 1):
        log.log(version, {"loss": version / 10})
    assert values_of(tmp_path) == [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.2), (1, 0.1), (1, 0.1)]


def test_a_rewind_hides_the_lost_timeline_and_deletes_nothing(tmp_path: Path):
    log = MetricsLog(tmp_path)
    for version in (1, 2, 3, 4):
        log.log(version, {"loss": float(version)})
        log.evaluation(version, held_out(version))
    log.rewind(2)
    log.log(3, {"loss": 30.0})
    assert values_of(tmp_path) == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [evaluation.policy_version for evaluation in read_evaluations(tmp_path)] == [1, 2]
    assert (tmp_path / "metrics.jsonl").read_text().count('"loss"') == 5


def test_nested_values_are_flattened(tmp_path: Path):
    MetricsLog(tmp_path).log(1, {"staleness": {"training": {"0": 3, "1": 9}}, "loss": 0.5})
    (row,) = read_metrics(tmp_path)
    assert row.values == {"staleness/training/0": 3.0, "staleness/training/1": 9.0, "loss": 0.5}


def test_values_that_are_not_finite_are_kept_in_valid_json(tmp_path: Path):
    MetricsLog(tmp_path).log(1, {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row.values["loss"])
    assert (row.values["grad_norm"], row.values["low"]) == (math.inf, -math.inf)


def test_a_value_that_is_no_number_is_refused_by_name(tmp_path: Path):
    with pytest.raises(TypeError) as error:
        MetricsLog(tmp_path).log(1, {"held_out": {"note": "fine"}})  # type: ignore[dict-item]
    assert "held_out/note" in str(error.value)


def test_a_torn_last_row_is_skipped(tmp_path: Path):
    MetricsLog(tmp_path).log(1, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"policy_version": 2, "lo')
    assert values_of(tmp_path) == [(1, 1.0)]
    MetricsLog(tmp_path).log(2, {"loss": 2.0})
    assert values_of(tmp_path) == [(1, 1.0), (2, 2.0)]


def test_a_follower_sees_each_row_once_and_a_row_in_writing_later(tmp_path: Path):
    follower = MetricsFollower(tmp_path)
    assert follower.read() == []
    MetricsLog(tmp_path).log(1, {"loss": 1.0})
    assert len(follower.read()) == 1
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"policy_version":2,"time":0,"lo')
        file.flush()
        assert len(follower.read()) == 1
        file.write('ss":2.0}\n')
    assert last(follower.read(), "loss") == 2.0


def test_an_evaluation_keeps_its_answers(tmp_path: Path):
    MetricsLog(tmp_path).evaluation(4, held_out(0.7, "zwei\nZeilen – und ein Strich"))
    (evaluation,) = read_evaluations(tmp_path)
    assert evaluation.samples == (("a prompt", "zwei\nZeilen – und ein Strich"),)
    assert (evaluation.reverse_kl.mean, evaluation.reverse_kl.ci95) == (0.7, 0.1)
    assert held_out_values(evaluation)["held_out/reverse_kl/mean"] == 0.7
