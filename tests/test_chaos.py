"""Short seeded parts of the chaos harness; the long run is ``python -m tests.chaos --kills 200 --seed 0 --json``."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import Chaos
from tests.chaos_processes import stop_server


@pytest.fixture(autouse=True)
def _no_server_is_left() -> Iterator[None]:
    yield
    stop_server()


def test_a_run_whose_processes_are_killed_loses_nothing_and_trains_nothing_twice(tmp_path: Path) -> None:
    figures = Chaos(tmp_path, seed=0).session(10, a_round=10, modes=("async",))
    assert figures.sound, figures
    assert figures.kills.total() >= 10
    assert figures.trained == 96 * figures.rounds


def test_a_sync_run_killed_and_resumed_six_times_ends_with_bit_identical_weights(tmp_path: Path) -> None:
    points = ("ledger_tables", "publish_rename", "checkpoint_rename", "resume_commit", "step_commit", "stepped")
    chaos = Chaos(tmp_path, seed=0)
    chaos.round("sync", kills=0, script=[("learner", point) for point in points])
    assert chaos.figures.sound, chaos.figures
    assert set(chaos.figures.kills) == {f"learner at {point}" for point in points}
    assert (chaos.figures.lives, chaos.figures.identical) == (7, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_kills_lose_nothing(tmp_path: Path) -> None:
    figures = Chaos(tmp_path, seed=2).session(100)
    assert figures.sound, figures
