"""Runs that are stopped, killed or torn apart: what is on disk afterwards, and what a resume makes of it."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from asyncopd.errors import ConfigError
from asyncopd.learner.checkpoint import CheckpointConfig, CheckpointStore
from asyncopd.pipeline import run
from asyncopd.queue.ledger import Ledger
from asyncopd.run_folder import RunFolder
from asyncopd.tracking.metrics import read_metrics
from asyncopd.tracking.trace import read_trace
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.terminal import Terminal, terminal, wait_until_gone
from tests.tiny_run import final_weights, tiny_config, write_recipe


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return save_checkpoint(make_tiny_llama(0), folder / "teacher"), save_checkpoint(
        make_tiny_llama(1, layers=2), folder / "student"
    )


@pytest.fixture(scope="module")
def undisturbed(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbed."""
    return run(tiny_config(tmp_path_factory.mktemp("undisturbed"), *models)).path


LOOK_AT_EXIT = """import atexit, torch.distributed
atexit.register(lambda: print("group left open:", torch.distributed.is_initialized()))
"""


@contextmanager
def launch(folder: Path, models: tuple[Path, Path], *words: str, ranks: int = 1) -> Iterator[Terminal]:
    """The tiny run under the launcher, at a terminal of its own; each rank says at exit if its group is still there."""
    options = ["--cpu", "--num-processes", str(ranks)]
    recipe = write_recipe(folder, *models)
    recipe.write_text(LOOK_AT_EXIT + recipe.read_text())
    with terminal(sys.executable, "-m", "asyncopd.cli", "launch", *options, str(recipe), *words) as shown:
        yield shown


def _reached(run_dir: Path, version: int) -> bool:
    return max((row.policy_version for row in read_metrics(run_dir)), default=0) >= version


def _assert_same_weights(one: Path, other: Path) -> None:
    first, second = final_weights(one), final_weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_learner_killed_mid_run_leaves_no_orphan_and_resumes_to_bit_identical_weights(
    tmp_path: Path, models: tuple[Path, Path], undisturbed: Path
) -> None:
    with launch(tmp_path, models) as shown:
        shown.until(lambda: _reached(tmp_path / "runs" / "tiny", 3), timeout_s=90)
        everyone = shown.family()
        assert len(everyone) >= 4
        (learner,) = psutil.Process(shown.process.pid).children()
        learner.send_signal(signal.SIGKILL)
        assert shown.wait(30) == 128 + signal.SIGKILL
    wait_until_gone(everyone, timeout_s=5)
    result = run(tiny_config(tmp_path, *models), resume=True)
    assert not result.stopped
    _assert_same_weights(result.path, undisturbed)
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        assert (ledger.counts().trained, ledger.counts().dropped) == (48, 0)
    assert [row.policy_version for row in read_metrics(result.path) if "loss" in row.values] == [1, 2, 3, 4, 5, 6]


def test_a_run_stopped_by_ctrl_c_and_resumed_with_one_more_worker_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path, models: tuple[Path, Path], undisturbed: Path
) -> None:
    config = tiny_config(tmp_path, *models, checkpoint=CheckpointConfig(every=0))
    run_dir = tmp_path / "runs" / "tiny"
    with launch(tmp_path, models, "--checkpoint.every", "0") as shown:
        shown.until(lambda: _reached(run_dir, 2), timeout_s=90)
        everyone = shown.family()
        shown.press_ctrl_c()
        assert shown.wait(60) == 0
    wait_until_gone(everyone, timeout_s=5)
    (saved,) = CheckpointStore(run_dir).versions()
    assert 2 <= saved <= 6
    result = run(replace(config, rollout=replace(config.rollout, workers=2)), resume=True)
    assert result.policy_version == 6
    assert RunFolder(result.path).config().rollout.workers == 2
    _assert_same_weights(result.path, undisturbed)


def test_two_learner_ranks_train_as_one(tmp_path: Path, models: tuple[Path, Path], undisturbed: Path) -> None:
    run_dir = tmp_path / "runs" / "tiny"
    with launch(tmp_path, models, ranks=2) as shown:
        assert shown.wait(150) == 0, shown.text()
        assert shown.text().count("group left open: False") == 2
    spans = read_trace(run_dir).spans
    for rank in ("learner", "learner-1"):
        assert sum(span.process == rank and span.name == "step" for span in spans) == 6
    two, one = (
        [row.values["loss"] for row in read_metrics(path) if "loss" in row.values] for path in (run_dir, undisturbed)
    )
    assert two == pytest.approx(one, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--learner.lora.rank", "4")], ids=["weights", "adapters"])
def test_two_sharded_ranks_publish_checkpoint_and_end_as_two_whole_ones(
    tmp_path: Path, models: tuple[Path, Path], options: tuple[str, ...]
) -> None:
    for sharding in ("fsdp2", "none"):
        words = (*options, "--name", sharding, "--learner.sharding", sharding)
        with launch(tmp_path, models, *words, ranks=2) as shown:
            assert shown.wait(150) == 0, shown.text()
    sharded, whole = tmp_path / "runs" / "fsdp2", tmp_path / "runs" / "none"
    ours, theirs = final_weights(sharded), final_weights(whole)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-4, rtol=2e-4)
    adapters = sharded / "final" / "adapter" / "adapter_model.safetensors"
    assert adapters.exists() == bool(options)
    assert CheckpointStore(sharded).versions() == [4, 6]


def test_resume_refuses_other_options_and_says_which(undisturbed: Path, models: tuple[Path, Path]) -> None:
    config = tiny_config(undisturbed.parent.parent, *models, seed=4)
    with pytest.raises(ConfigError, match="seed: 3 -> 4"):
        run(config, resume=True)
