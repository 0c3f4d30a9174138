"""Weights & Biases: every value arrives, the run goes on after a resume, and its absence is said clearly."""

import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncopd.errors import ConfigError
from asyncopd.tracking import wandb_run
from asyncopd.tracking.metrics import read_metrics
from asyncopd.tracking.trackers import RunTracking, TrackingConfig, open_tracking
from asyncopd.tracking.wandb_run import WandbConfig, wandb_mode

OFF = TrackingConfig(wandb=WandbConfig(enabled="off"))


class Collector:
    """A tracker of the caller."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Any]] = []
        self.summary: Mapping[str, Any] | None = None

    def log(self, policy_version: int, values: Any) -> None:
        self.rows.append((policy_version, values))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format, each a protobuf."""
    from wandb.proto import wandb_internal_pb2

    data, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(run_dir: Path) -> list[tuple[int, float]]:
    """Policy version and loss of every history row that wandb has stored, oldest first."""
    rows = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss" in items:
                rows.append((int(items["policy_version"]), float(items["loss"])))
    return rows


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.mark.usefixtures("offline")
def test_wandb_keeps_every_value_and_a_resume_goes_on_in_the_same_run(tmp_path: Path):
    tracking = open_tracking(tmp_path, "a name", TrackingConfig(), {"learner": {"lr": 2e-4}})
    for version in (1, 2, 3, 2, 1):
        tracking.log(version, {"loss": version / 2, "queue": {"SCORED": 4}})
    tracking.finish({"steps": 3})
    time.sleep(1.1)  # wandb names an offline run's folder by the second, and would write over it
    resumed = open_tracking(tmp_path, "a name", TrackingConfig(), {}, resumed_at=2, ids=tracking.ids)
    resumed.log(3, {"loss": 9.0})
    resumed.finish({"steps": 3})
    deadline = time.monotonic() + 20
    while len(stored := history(tmp_path)) < 6 and time.monotonic() < deadline:
        time.sleep(0.05)  # wandb's own process may write the last records a moment after finish returns
    assert stored == [(1, 0.5), (2, 1.0), (3, 1.5), (2, 1.0), (1, 0.5), (3, 9.0)]
    assert resumed.ids == tracking.ids
    paths = [path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]
    assert set(paths) == {f"run-{tracking.ids['wandb']}.wandb"}
    metrics = [record.metric for path in tmp_path.glob("wandb/offline-run-*/*.wandb") for record in records(path)]
    assert any(metric.glob_name == "*" and metric.step_metric == "policy_version" for metric in metrics)


@pytest.mark.usefixtures("offline")
def test_a_run_that_an_earlier_failure_left_open_does_not_get_the_rows_of_the_next(tmp_path: Path):
    left = open_tracking(tmp_path / "left", "a name", TrackingConfig(), {})
    following = open_tracking(tmp_path / "next", "a name", TrackingConfig(), {})
    following.log(1, {"loss": 0.5})
    following.finish({})
    assert following.ids != left.ids
    assert history(tmp_path / "next") == [(1, 0.5)]
    left.finish({})


@pytest.mark.parametrize(
    ("variable", "logged_in", "mode"),
    [
        (None, True, "online"),
        (None, False, "offline"),
        ("", False, "offline"),
        ("offline", True, "offline"),
        ("online", False, "online"),
        ("dryrun", True, "offline"),
        ("disabled", True, "disabled"),
    ],
)
def test_wandb_is_online_if_logged_in_unless_the_variable_says_otherwise(monkeypatch, variable, logged_in, mode):
    wandb = pytest.importorskip("wandb")
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "login", lambda **options: asked.append(options) or logged_in)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    assert wandb_mode() == mode
    assert all(options == {"prompt": False, "verify": False} for options in asked)


def test_an_unknown_mode_is_refused_with_the_known_ones(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(ConfigError) as error:
        wandb_mode()
    assert "ofline" in str(error.value)
    assert "offline" in str(error.value)


def test_wandb_asked_for_and_not_installed_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(wandb_run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        WandbConfig(enabled="on")
    assert "asyncopd[wandb]" in str(error.value)
    assert not WandbConfig(enabled="auto").in_use


def test_every_tracker_gets_every_row_and_the_summary(tmp_path: Path):
    collector = Collector()
    tracking = open_tracking(tmp_path, "x", OFF, {}, further=[collector])
    estimate = SimpleNamespace(mean=0.5, ci95=0.1)
    held_out = SimpleNamespace(
        reverse_kl=estimate, forward_kl=estimate, mean_length=estimate, eos_share=0.5, samples=[("p", "a")]
    )
    tracking.log(2, {"loss": 1.0})
    tracking.evaluation(1, held_out)
    tracking.finish({"steps": 2})
    assert [version for version, _ in collector.rows] == [2, 1]
    assert collector.rows[1][1]["held_out/forward_kl/ci95"] == 0.1
    assert collector.summary == {"steps": 2}
    assert [row.policy_version for row in read_metrics(tmp_path)] == [2, 1]


def test_without_wandb_there_is_no_id_to_keep(tmp_path: Path):
    tracking = open_tracking(tmp_path, "x", OFF, {})
    assert isinstance(tracking, RunTracking)
    assert tracking.ids == {}
    assert not (tmp_path / "wandb").exists()
