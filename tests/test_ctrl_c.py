"""Ctrl-C in a run of two learner ranks: typed at a terminal, through the launcher that the README recommends."""

import sys
import time
from pathlib import Path

import pytest

from asyncopd.learner.checkpoint import CheckpointStore
from asyncopd.queue.ledger import Ledger
from asyncopd.tracking.metrics import read_metrics
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.terminal import terminal, wait_until_gone
from tests.tiny_run import write_recipe


def steps_done(run: Path) -> int:
    """Optimizer steps in the metrics of a run."""
    return max((row.policy_version for row in read_metrics(run)), default=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_end_in_one_checkpoint_at_ctrl_c_and_at_once_at_a_second(tmp_path: Path) -> None:
    teacher = save_checkpoint(make_tiny_llama(0), tmp_path / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    recipe = [str(write_recipe(tmp_path, teacher, student)), "--mode", "async", "--steps", "5000"]
    command = [sys.executable, "-m", "asyncopd.cli", "launch", "--cpu", "--num-processes", "2", *recipe]
    run = tmp_path / "runs" / "tiny"
    with terminal(*command) as shell:
        shell.until(lambda: steps_done(run) >= 3, timeout_s=120)
        family = shell.family()
        assert len(family) >= 5, "the launcher, two ranks, a rollout worker and the scorer"
        shell.press_ctrl_c()
        assert shell.wait(60) == 0, shell.text()
        wait_until_gone(family, timeout_s=5)
    with Ledger.open(run / "ledger.sqlite") as ledger:
        stopped_at = ledger.policy_version
        assert ledger.verify() == []
    assert CheckpointStore(run).versions()[-1] == stopped_at

    with terminal(*command, "--resume") as shell:
        shell.until(lambda: steps_done(run) > stopped_at + 1, timeout_s=120)
        family = shell.family()
        shell.press_ctrl_c()
        time.sleep(0.05)
        shell.press_ctrl_c()
        pressed = time.monotonic()
        # A step may end between the two keys, and with it the run.
        assert shell.wait(30) in (0, 130), shell.text()
        wait_until_gone(family, timeout_s=5)
        assert time.monotonic() - pressed < 8
