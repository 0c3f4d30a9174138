"""What of the student is published in a run, which way, and whether that way is open."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncopd.config import RunConfig
from asyncopd.errors import CheckpointError, ConfigError
from asyncopd.learner.step import DTYPES, Learner
from asyncopd.publish import WeightPublisher, Weights, WeightStore
from asyncopd.publish.adapters import adapted_layers
from asyncopd.publish.transfer_publisher import TransferPublisher
from asyncopd.rollout.mixed_engine import TeacherFraction
from asyncopd.rollout.vllm_config import LORA_RANKS
from asyncopd.rollout.weights import stored_shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What of the student a version is.

    adapters   the adapters alone, in their own dtype, and not the whole weights
    applied    vLLM in the workers applies them beside its weights, and does not merge them
    dtype      what floating-point weights are stored as; None keeps theirs
    """

    adapters: bool
    applied: bool
    dtype: torch.dtype | None

    @classmethod
    def of(cls, config: RunConfig, gpus: bool) -> "Published":
        """As a run's configuration says; ``gpus``: whether there are any here."""
        rollout, adapters = config.rollout, config.publishes_adapters
        return cls(
            adapters=adapters,
            applied=adapters and rollout.engine == "vllm" and rollout.vllm.applies(rollout.dtype, gpus),
            dtype=None if adapters else DTYPES[rollout.dtype],
        )

    def weights(self, learner: Learner) -> Weights:
        """Under FSDP2 every rank must read them, in their order: rank 0 as it writes, the others by ``take_part``."""
        return learner.adapters() if self.adapters else learner.weights()


def check_publishing(config: RunConfig, gpus: bool) -> None:
    """ConfigError where the engines cannot be reached by ``publish.backend``; ``gpus``: whether there are any here."""
    publish, rollout = config.publish, config.rollout
    if Published.of(config, gpus).applied:
        _check_applied(config.learner.lora.rank, rollout.dtype, gpus)
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


def _check_applied(rank: int, dtype: str, gpus: bool) -> None:
    if rank > LORA_RANKS[-1]:
        raise ConfigError(
            f"learner.lora.rank is {rank}, and vLLM applies adapters of rank {LORA_RANKS[-1]} at most; set "
            "rollout.vllm.adapters to merge, or lower the rank"
        )
    if gpus and dtype != "bf16":
        raise ConfigError(
            f"rollout.vllm.adapters is apply and rollout.dtype {dtype}, in which vLLM applies none on GPUs; set "
            "rollout.vllm.adapters to merge, or rollout.dtype to bf16"
        )


def check_base(config: RunConfig, learner: Learner) -> None:
    """ConfigError where readers of adapters would not find the weights that these belong to; on every rank alike."""
    try:
        stored = stored_shapes(config.student)
    except CheckpointError:
        stored = {}
    if missing := [layer for layer in adapted_layers(learner.adapters()) if f"{layer}.weight" not in stored]:
        raise ConfigError(
            f"the student has an adapter for {missing[0]}, and no safetensors file in {config.student} has a weight of "
            "that name; set publish.adapters to false, so that whole weights are published, or save the student again "
            "with save_pretrained"
        )


@contextmanager
def open_publisher(
    config: RunConfig, published: Published, run_dir: Path, learner: Learner
) -> Iterator[WeightPublisher]:
    """The publisher of rank 0."""
    store = WeightStore(run_dir, published.dtype, learner.adapter_config() if published.adapters else None)
    publish, evaluation, steps = config.publish, config.evaluation, config.steps
    if publish.backend == "file":
        yield store
        return

    def needs_file(version: int) -> bool:
        regular = publish.file_every > 0 and version % publish.file_every == 0
        return regular or evaluation.due(version, steps)

    ranks = config.rollout.vllm.tensor_parallel
    with closing(
        TransferPublisher(
            store, run_dir, publish, ranks=ranks, device=learner.accelerator.device, needs_file=needs_file
        )
    ) as publisher:
        yield publisher
