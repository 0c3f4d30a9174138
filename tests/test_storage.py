"""A full disk and a read-only run folder: what is said, and what is left for a resume."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncopd import pipeline
from asyncopd.errors import StorageError
from asyncopd.interface import Callbacks
from asyncopd.pipeline import run
from asyncopd.queue.ledger import Ledger
from asyncopd.tracking.metrics import read_metrics
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import ThreadedWorkers, final_weights, tiny_config


@pytest.fixture(autouse=True)
def _threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB of its own; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root can mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return save_checkpoint(make_tiny_llama(0), folder / "teacher"), save_checkpoint(
        make_tiny_llama(1, layers=2), folder / "student"
    )


def fill(disk: Path, left_bytes: int) -> Path:
    """Take all of the disk but ``left_bytes``."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        try:
            while True:
                file.write(b"\0" * 4096)
                file.flush()
        except OSError:
            pass
    if left_bytes:
        with ballast.open("r+b") as file:
            file.truncate(max(0, ballast.stat().st_size - left_bytes))
    return ballast


def _assert_whole(path: Path, undisturbed: Path) -> None:
    first, second = final_weights(path), final_weights(undisturbed)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with Ledger.open(path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        assert (ledger.counts().trained, ledger.counts().dropped) == (48, 0)
    assert [row.policy_version for row in read_metrics(path) if "loss" in row.values] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("left_bytes", [0, 200_000])
def test_a_disk_that_fills_up_is_named_and_a_resume_loses_nothing(
    left_bytes: int, small_disk: Path, models: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "else").mkdir()
    undisturbed = run(tiny_config(tmp_path / "else", *models)).path
    config = replace(tiny_config(tmp_path, *models), runs_dir=small_disk / "runs")

    def full(version: int, _: object) -> None:
        if version == 3:
            fill(small_disk, left_bytes)

    with pytest.raises(StorageError, match="cannot be written .No space left on device.; free space"):
        run(config, callbacks=Callbacks(on_step=full))
    (small_disk / "ballast").unlink()
    with Ledger.open(config.runs_dir / config.name / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
    _assert_whole(run(config, resume=True).path, undisturbed)


def test_a_read_only_run_folder_is_named_and_a_resume_loses_nothing(
    small_disk: Path, models: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "else").mkdir()
    undisturbed = run(tiny_config(tmp_path / "else", *models)).path
    config = replace(tiny_config(tmp_path, *models), runs_dir=small_disk / "runs")

    def end(version: int, _: object) -> None:
        if version == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, callbacks=Callbacks(on_step=end))
    view = tmp_path / "view"
    view.mkdir()
    subprocess.run(["mount", "--bind", str(small_disk), str(view)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
        closed = replace(config, runs_dir=view / "runs")
        for resume, name in ((True, config.name), (False, "another")):
            with pytest.raises(StorageError, match="cannot be written .Read-only file system.; .* make it writable"):
                run(replace(closed, name=name), resume=resume)
    finally:
        subprocess.run(["umount", "-l", str(view)], check=True)
    _assert_whole(run(config, resume=True).path, undisturbed)
