"""Atomic checkpoints: a folder counts only once its manifest has been renamed into place.

run folder/checkpoints/v00000020/manifest.json, model, optimizer, schedule and random state
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from asyncopd.errors import CheckpointError, ConfigError
from asyncopd.storage import sync_file

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to checkpoint."""

    every: int = 20
    """Optimizer steps between checkpoints; 0 checkpoints only at the end and when stopped."""
    keep: int = 2
    """How many to keep, the newest."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"checkpoint.every is {self.every}; expected 0 (only at the end) or a number of steps")
        if self.keep < 1:
            raise ConfigError(f"checkpoint.keep is {self.keep}; expected at least 1")


class CheckpointStore:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / "checkpoints"

    def versions(self) -> list[int]:
        """Policy versions of the whole checkpoints, ascending."""
        return sorted(int(path.parent.name[1:]) for path in self.root.glob(f"v*/{MANIFEST}"))

    def save(self, version: int, accelerator: Accelerator, trackers: Mapping[str, str]) -> Path:
        """Write a checkpoint of ``version``; every rank calls this. ``trackers`` names the trackers' runs."""
        target = self._path(version)
        if accelerator.is_main_process:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        accelerator.wait_for_everyone()
        with _tied_weights_expected():
            accelerator.save_state(str(target))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            for path in target.rglob("*"):
                if path.is_file():
                    sync_file(path)
            staging = target / f"{MANIFEST}.writing"
            staging.write_text(json.dumps({"policy_version": version, "trackers": dict(trackers)}, indent=1))
            sync_file(staging)
            os.replace(staging, target / MANIFEST)
            sync_file(target)
            sync_file(self.root)
        accelerator.wait_for_everyone()
        return target

    def load(self, version: int, accelerator: Accelerator) -> dict[str, str]:
        """Restore model, optimizer, schedule and random state; returns the trackers' runs. Every rank calls this."""
        if version not in self.versions():
            raise CheckpointError(
                f"no whole checkpoint of policy version {version} in {self.root}; present: {self.versions()}"
            )
        target = self._path(version)
        accelerator.load_state(str(target))
        return json.loads((target / MANIFEST).read_text())["trackers"]

    def prune(self, keep: int) -> None:
        """Delete all but the newest ``keep``, and what was never finished."""
        whole = self.versions()
        kept = {self._path(version) for version in whole[-keep:]}
        for path in self.root.glob("v*"):
            if path not in kept:
                # Without its manifest a half-deleted checkpoint is not taken for a whole one.
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    def forget_after(self, version: int) -> None:
        """Delete checkpoints newer than ``version``: they belong to a timeline that was lost."""
        for lost in self.versions():
            if lost > version:
                (self._path(lost) / MANIFEST).unlink()
                shutil.rmtree(self._path(lost), ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self.root / f"v{version:08d}"


@contextmanager
def _tied_weights_expected() -> Iterator[None]:
    """accelerate warns each time that it writes a tied head once, which is what a checkpoint should do."""
    log = logging.getLogger("accelerate.utils.other")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
