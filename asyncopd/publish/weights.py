"""Versioned student weights: one folder a policy version, visible only when whole.

    run folder/weights/v00000012/model.safetensors     or, of adapters alone, as ``publish.adapters`` says

Versions may skip numbers; a reader takes the newest whole one or the one it was told to take.
"""

import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from asyncopd.errors import CheckpointError
from asyncopd.publish.adapters import write_adapters
from asyncopd.publish.probe import Probe
from asyncopd.publish.stream import Weights, write_safetensors
from asyncopd.storage import sync_file


class WeightPublisher(Protocol):
    """Makes policy versions available to the rollout pool."""

    @property
    def dtype(self) -> torch.dtype | None:
        """What floating-point weights are stored as; None keeps theirs."""

    def publish(self, version: int, weights: Weights, probe: Probe | None = None) -> Path | None:
        """Make ``version`` visible to the workers; returns the folder of its file, if it has one. Idempotent."""

    def probe(self, version: int) -> Probe | None:
        """What an engine must give under ``version``, if that is to be checked."""

    def directory(self, version: int) -> Path:
        """The folder of ``version``; CheckpointError if it is not there."""

    def versions(self) -> list[int]:
        """Whole versions, ascending."""

    def settle(self, oldest: int) -> None:
        """Make the versions from ``oldest`` on survive a loss of power: a checkpoint is about to count on them."""

    def keep_from(self, version: int, besides: Collection[int] = ()) -> None:
        """Delete versions older than ``version`` and not among ``besides``; the newest is always kept."""

    def forget_after(self, version: int) -> None:
        """Delete versions newer than ``version``: they belong to a timeline that was lost."""


class LoadsFiles(Protocol):
    """What a rollout engine must be able to do to follow published files."""

    def load_weights(self, directory: Path, version: int) -> None:
        """Take the weights published as ``version``."""


class WeightSource(Protocol):
    """Brings policy versions to the engine of a rollout worker."""

    def move_to(self, version: int) -> Probe | None:
        """Move the engine to ``version``, or to a newer one where that is all the same.

        What the engine must give from then on, if that is to be checked. After an error it must not answer.
        """


class WeightStore:
    """Weights as safetensors files in the run folder: works everywhere, survives every process."""

    def __init__(self, run_dir: Path, dtype: torch.dtype | None = None, adapter_config: str | None = None) -> None:
        """``dtype`` is what floating-point weights are stored as; None keeps theirs.

        With ``adapter_config``, the text of peft's file, the weights that are published are adapters.
        """
        self.root = run_dir / "weights"
        self.dtype = dtype
        self._adapter_config = adapter_config

    def publish(self, version: int, weights: Weights, probe: Probe | None = None) -> Path:
        """Write beside, then rename: a reader never sees half a version."""
        target = self._path(version)
        if target.exists():
            return target
        staging = self.root / f".writing-{version}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        if self._adapter_config is None:
            write_safetensors(staging / "model.safetensors", weights, self.dtype)
        else:
            write_adapters(staging, weights, self._adapter_config)
        if probe is not None:
            probe.write(staging)
        os.replace(staging, target)
        return target

    def probe(self, version: int) -> Probe | None:
        """What an engine must give under ``version``, if that is to be checked."""
        return Probe.read(self.directory(version))

    def directory(self, version: int) -> Path:
        """The folder of a whole version."""
        path = self._path(version)
        if not path.exists():
            raise CheckpointError(
                f"weights of policy version {version} are not in {self.root}; present: {self.versions()}. "
                "Resume from a checkpoint to publish them again."
            )
        return path

    def versions(self) -> list[int]:
        """Whole versions, ascending."""
        return sorted(int(path.name[1:]) for path in self.root.glob("v*"))

    def settle(self, oldest: int) -> None:
        """One fsync a version: too slow for every step, and only a checkpoint needs it."""
        for version in self.versions():
            if version >= oldest:
                for path in (*self._path(version).iterdir(), self._path(version)):
                    sync_file(path)
        sync_file(self.root)

    def keep_from(self, version: int, besides: Collection[int] = ()) -> None:
        """Delete what is older than ``version``, the newest and ``besides`` excepted."""
        for old in self.versions()[:-1]:
            if old < version and old not in besides:
                self._delete(old)

    def forget_after(self, version: int) -> None:
        """Delete what is newer than ``version``."""
        for lost in self.versions():
            if lost > version:
                self._delete(lost)
        for left_over in self.root.glob(".*ing-*"):
            # Of a process that was killed in the middle.
            shutil.rmtree(left_over, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self.root / f"v{version:08d}"

    def _delete(self, version: int) -> None:
        # Renamed first, so that a version is never visible with half its files gone.
        doomed = self.root / f".deleting-{version}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(self._path(version), doomed)
        shutil.rmtree(doomed, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class FileSource:
    """A WeightSource for any engine: it reads the files of ``store``.

    newest    the newest published version, where a newer one than was asked for will do; None takes the very one
    """

    store: WeightStore
    engine: LoadsFiles
    newest: Callable[[], int] | None = None

    def move_to(self, version: int) -> Probe | None:
        """To ``version``, or to the newest one if it was deleted meanwhile; CheckpointError if it is not there."""
        while True:
            try:
                directory = self.store.directory(version)
                probe = Probe.read(directory)
                self.engine.load_weights(directory, version)
                return probe
            except (CheckpointError, FileNotFoundError):
                newer = version if self.newest is None else self.newest()
                if newer == version:
                    raise
                version = newer
