"""Atomic checkpoints: a folder counts only once its manifest has been renamed into place.

run folder/checkpoints/v00000020/state/         what is trained and the optimizer, by torch.distributed.checkpoint
                                 rank-00000.pt  random state of each rank; the schedule
                                 manifest.json

Every rank writes its part, and any number of ranks, sharded or not, can read it. Weights that are not trained are not
written: they are those of the student that the run started from.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from asyncopd.errors import CheckpointError, ConfigError
from asyncopd.learner.step import Learner
from asyncopd.storage import sync_file

MANIFEST = "manifest.json"
_STATE = "state"
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


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

    def save(self, version: int, learner: Learner, trackers: Mapping[str, str]) -> Path:
        """Write a checkpoint of ``version``; every rank calls this. ``trackers`` names the trackers' runs."""
        target, accelerator = self._path(version), learner.accelerator
        if accelerator.is_main_process:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        accelerator.wait_for_everyone()
        with _alone_on_purpose():
            dcp.save(_training_state(learner), checkpoint_id=target / _STATE, no_dist=accelerator.num_processes == 1)
        own = {"schedule": learner.schedule.state_dict(), "random": _random_state(accelerator.device)}
        torch.save(own, target / _rank_file(accelerator.process_index))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            for path in target.rglob("*"):
                sync_file(path)
            staging = target / f"{MANIFEST}.writing"
            staging.write_text(json.dumps({"policy_version": version, "trackers": dict(trackers)}, indent=1))
            sync_file(staging)
            os.replace(staging, target / MANIFEST)
            sync_file(target)
            sync_file(self.root)
        accelerator.wait_for_everyone()
        return target

    def load(self, version: int, learner: Learner) -> dict[str, str]:
        """Restore weights, optimizer, schedule and random state; returns the trackers' runs. Every rank calls this."""
        if version not in self.versions():
            raise CheckpointError(
                f"no whole checkpoint of policy version {version} in {self.root}; present: {self.versions()}"
            )
        target, accelerator = self._path(version), learner.accelerator
        state = _training_state(learner)
        with _alone_on_purpose():
            dcp.load(state, checkpoint_id=target / _STATE, no_dist=accelerator.num_processes == 1)
        set_state_dict(
            learner.student,
            learner.optimizer,
            model_state_dict=state["student"],
            optim_state_dict=state["optimizer"],
            options=_TRAINED,
        )
        mine = target / _rank_file(accelerator.process_index)
        # There may have been fewer ranks; the schedule is the same on all.
        own = torch.load(mine if mine.exists() else target / _rank_file(0))
        learner.schedule.load_state_dict(own["schedule"])
        if mine.exists():
            _restore_random_state(own["random"], accelerator.device)
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


def _training_state(learner: Learner) -> dict[str, Any]:
    student, optimizer = get_state_dict(learner.student, learner.optimizer, options=_TRAINED)
    return {"student": student, "optimizer": optimizer}


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """torch warns each time that a single process writes or reads for itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _random_state(device: torch.device) -> list[torch.Tensor]:
    """Of this process and, on a GPU, of its device."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _restore_random_state(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
