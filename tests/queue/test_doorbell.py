"""A waiting stage sleeps until it is rung, and never holds up who rings."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from asyncopd.errors import LedgerError
from asyncopd.queue.doorbell import Doorbell, ring, ring_all

LONG_S = 20.0


def test_a_ring_wakes_the_waiter_at_once(tmp_path: Path) -> None:
    with Doorbell(tmp_path, "learner") as bell:
        threading.Timer(0.1, ring, (tmp_path, "learner")).start()
        began = time.monotonic()
        assert bell.wait(LONG_S)
        assert time.monotonic() - began < 5


def test_a_ring_before_the_wait_is_kept_and_many_rings_wake_once(tmp_path: Path) -> None:
    with Doorbell(tmp_path, "learner") as bell:
        for _ in range(100_000 if sys.platform == "linux" else 100):
            assert ring(tmp_path, "learner")
        assert bell.wait(LONG_S)
        assert not bell.wait(0.01)


def test_every_waiter_is_rung(tmp_path: Path) -> None:
    assert ring_all(tmp_path) == 0
    with Doorbell(tmp_path, "rollout-0") as one, Doorbell(tmp_path, "rollout-1") as other:
        assert ring_all(tmp_path) == 2
        assert one.wait(LONG_S)
        assert other.wait(LONG_S)


def test_a_dead_waiter_never_blocks_the_ringer(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from asyncopd.queue.doorbell import Doorbell\n"
        "Doorbell(Path(sys.argv[1]), 'dead'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert (tmp_path / "doorbells" / "dead.bell").exists()
    assert not ring(tmp_path, "dead")
    assert ring_all(tmp_path) == 0
    assert not ring(tmp_path, "never-lived")


def test_a_restarted_waiter_takes_over_its_bell(tmp_path: Path) -> None:
    with Doorbell(tmp_path, "rollout-0"):
        pass
    os.mkfifo(tmp_path / "doorbells" / "rollout-0.bell")
    with Doorbell(tmp_path, "rollout-0") as bell:
        assert ring(tmp_path, "rollout-0")
        assert bell.wait(LONG_S)


def test_a_waiting_stage_uses_under_2_percent_of_a_core(tmp_path: Path) -> None:
    with Doorbell(tmp_path, "idle") as bell:
        began, busy = time.monotonic(), time.thread_time()
        while time.monotonic() - began < 1.5:
            assert not bell.wait(0.5)
        assert (time.thread_time() - busy) / (time.monotonic() - began) < 0.02


@pytest.mark.parametrize("name", ["", "a/b", ".hidden"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LedgerError, match="plain file name"):
        Doorbell(tmp_path, name)
