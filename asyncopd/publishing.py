"""Which way weights are published in a run, and whether that way is open."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError
from asyncopd.learner.step import DTYPES
from asyncopd.publish import WeightPublisher, WeightStore
from asyncopd.publish.transfer_publisher import TransferPublisher
from asyncopd.rollout.mixed_engine import TeacherFraction


def check_publishing(config: RunConfig, gpus: bool) -> None:
    """ConfigError where the engines cannot be reached by ``publish.backend``; ``gpus``: whether there are any here."""
    publish, rollout = config.publish, config.rollout
    if publish.backend == "file":
        return
    if rollout.engine != "vllm":
        raise ConfigError(
            f"publish.backend is {publish.backend} and rollout.engine {rollout.engine}, which takes weights from files "
            "alone; set publish.backend to file, or rollout.engine to vllm"
        )
    if not TeacherFraction.parse(rollout.teacher_fraction).never:
        raise ConfigError(
            f"publish.backend is {publish.backend} and rollout.teacher_fraction {rollout.teacher_fraction!r}, whose "
            "engine takes weights from files alone; set publish.backend to file"
        )
    if publish.backend == "nccl" and not gpus:
        raise ConfigError("publish.backend is nccl, and there is no GPU here; set it to gloo or file")
    if publish.backend == "nccl" and not rollout.devices:
        raise ConfigError(
            "publish.backend is nccl and rollout.devices is empty, so that engine and learner share a GPU, which NCCL "
            'does not join; give the engine its own, such as rollout.devices "1", or set publish.backend to gloo'
        )
    if publish.file_every == 1:
        return
    if config.lag:
        raise ConfigError(
            f"publish.file_every is {publish.file_every} and mode {config.mode}, in which a worker may need every one "
            f"of the last {config.lag} versions, of which the learner holds the newest; set publish.file_every to 1"
        )
    if config.teacher.proposal == "pass":
        raise ConfigError(
            f"publish.file_every is {publish.file_every} and teacher.proposal pass, which reads the file of the newest "
            "version; set publish.file_every to 1, or teacher.proposal to rollout"
        )


@contextmanager
def open_publisher(config: RunConfig, run_dir: Path, device: torch.device) -> Iterator[WeightPublisher]:
    """The publisher of rank 0, whose weights are on ``device``."""
    store = WeightStore(run_dir, DTYPES[config.rollout.dtype])
    publish, evaluation, steps = config.publish, config.evaluation, config.steps
    if publish.backend == "file":
        yield store
        return

    def needs_file(version: int) -> bool:
        regular = publish.file_every > 0 and version % publish.file_every == 0
        return regular or evaluation.due(version, steps)

    ranks = config.rollout.vllm.tensor_parallel
    with closing(
        TransferPublisher(store, run_dir, publish, ranks=ranks, device=device, needs_file=needs_file)
    ) as publisher:
        yield publisher
