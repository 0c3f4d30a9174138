"""Ctrl-C in a whole run: typed at a terminal, through the launcher that the README recommends."""

import json
import sys
import time
from pathlib import Path

import pytest

from asyncopd.learner.checkpoint import CheckpointStore
from asyncopd.queue.ledger import Ledger
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.terminal import terminal, wait_until_gone

ROOT = Path(__file__).parent.parent
RECIPE = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
from asyncopd import recipe_main
from tests.tiny_run import tiny_config

here = Path(__file__).parent
sys.exit(recipe_main(tiny_config(here, here / "teacher", here / "student", mode="async", steps=5000)))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    save_checkpoint(make_tiny_llama(0), tmp_path / "teacher")
    save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    script = tmp_path / "recipe.py"
    script.write_text(RECIPE.format(root=str(ROOT)))
    return script


def steps_done(run: Path) -> int:
    """Optimizer steps in the metrics of a run."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()[:-1] if path.is_file() else []
    return sum("loss" in json.loads(line) for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_in_a_checkpoint_a_second_one_at_once_and_neither_leaves_a_process(
    recipe: Path, ranks: int
) -> None:
    run = recipe.parent / "runs" / "tiny"
    command = [sys.executable, "-m", "asyncopd.cli", "launch", "--cpu", "--num-processes", str(ranks), str(recipe)]
    with terminal(*command) as shell:
        shell.until(lambda: steps_done(run) >= 3, timeout_s=120)
        family = shell.family()
        assert len(family) >= 3 + ranks, "the launcher, the ranks, a rollout worker and the scorer"
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
        assert shell.wait(30) in (0, 130), shell.text()
        wait_until_gone(family, timeout_s=5)
        assert time.monotonic() - pressed < 8
