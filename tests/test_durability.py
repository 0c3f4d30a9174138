"""What must be on disk, not only written, before a checkpoint counts."""

import os
from pathlib import Path

import pytest

from asyncopd import pipeline
from asyncopd.learner.checkpoint import CheckpointConfig
from asyncopd.pipeline import run
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import ThreadedWorkers, tiny_config


def test_a_checkpoint_counts_only_once_its_files_and_the_weights_that_a_resume_needs_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    counted: dict[int, set[str]] = {}
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}").partition("/runs/tiny/")[2])

    def seen_replace(source: Path, target: Path) -> None:
        if Path(target).name == "manifest.json":
            counted[int(Path(target).parent.name[1:])] = set(synced)
        replace(source, target)

    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    teacher = save_checkpoint(make_tiny_llama(0), tmp_path / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    checkpoint = CheckpointConfig(every=2, keep=2)
    run(tiny_config(tmp_path, teacher, student, mode="lagged:2", steps=4, checkpoint=checkpoint))
    assert set(counted) == {2, 4}
    for version, on_disk in counted.items():
        wanted = {f"weights/v{needed:08d}/model.safetensors" for needed in range(version - 2, version + 1)}
        checkpoint_files = ("rank-00000.pt", "state", "state/.metadata", "state/__0_0.distcp")
        wanted |= {f"checkpoints/v{version:08d}/{name}" for name in checkpoint_files}
        assert wanted - on_disk == set()
