"""Trains a tiny student for a few steps in this process, or as one of several gloo ranks; see `test_scale`.

python -m tests.learner.ranks FOLDER        with RANK, WORLD_SIZE, ... as torch.distributed wants them
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from transformers import PreTrainedModel

from asyncopd.launch import rank_environments
from asyncopd.learner.adapters import LoraConfig
from asyncopd.learner.batching import collate
from asyncopd.learner.checkpoint import CheckpointStore
from asyncopd.learner.head import HeadShape
from asyncopd.learner.load import leave_group_at_exit
from asyncopd.learner.step import Learner, LearnerConfig
from asyncopd.learner.student import prepare_student
from asyncopd.publish import WeightStore, take_part
from asyncopd.publish.config import PublishConfig
from asyncopd.publish.transfer_publisher import TransferPublisher
from tests.conftest import VOCABULARY, make_tiny_llama, make_tiny_qwen3
from tests.learner.test_step import OBJECTIVE, SAMPLES

STEPS = 3
SAVED = 2
"""Policy version of the checkpoint."""
HELD = "held"
"""Where in a run's folder the weights are that were handed to engines."""
ADAPTERS = "adapters"
"""Where the adapters are that were published alone."""
LORA = LoraConfig(rank=4, alpha=8.0)
CONFIG = LearnerConfig(lr=3e-3, dtype="fp32", warmup_steps=2, weight_decay=0.1, clip=0.05, micro_batch_tokens=25)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: make_tiny_llama(1, layers=2),
    "untied": lambda: make_tiny_qwen3(1, layers=2),
}


def open_accelerator(config: LearnerConfig) -> Accelerator:
    """As a run opens it."""
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, mixed_precision="bf16" if config.dtype == "bf16" else "no")


def shard_by_config(accelerator: Accelerator) -> None:
    """The state in which an accelerate config with FSDP2 leaves the accelerator on GPUs; on a CPU it is ignored."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def make_learner(accelerator: Accelerator, model: str = "tied", config: LearnerConfig = CONFIG) -> Learner:
    """A learner in float64 (bf16 autocast over float32 where the config says bf16), the same in every process."""
    student = MODELS[model]()
    exact = config.dtype == "fp32"
    torch.manual_seed(5)
    prepare_student(student, config)
    learner = Learner(
        student.double() if exact else student,
        OBJECTIVE,
        config,
        accelerator=accelerator,
        steps=10,
        shape=HeadShape(vocabulary=VOCABULARY),
        pad_id=0,
    )
    if exact:
        module = accelerator.unwrap_model(learner.module)
        module.shape = replace(module.shape, compute_dtype=torch.float64)
    return learner


def train(learner: Learner, start: int, stop: int) -> list[dict[str, float]]:
    """Metrics of the steps after version ``start``; the first of several ranks has most of the samples."""
    rank, ranks = learner.accelerator.process_index, learner.accelerator.num_processes
    metrics = []
    for version in range(start, stop):
        samples = SAMPLES[version:] + SAMPLES[:version]
        if ranks > 1:
            samples = samples[:5] if rank == 0 else samples[4 + rank :: ranks - 1]
        metrics.append(learner.step(samples, version))
    return metrics


def publish(learner: Learner, folder: Path, version: int) -> None:
    """As a run does by files, and again as one does that hands them to engines; its first version has a file too.

    And adapters alone, where there are any.
    """
    if not learner.accelerator.is_main_process:
        take_part(learner.weights())
        take_part(learner.weights())
        take_part(learner.adapters())
        return
    WeightStore(folder).publish(version, learner.weights())
    way = {"ranks": 1, "device": torch.device("cpu"), "needs_file": lambda _: False}
    with closing(TransferPublisher(WeightStore(folder / HELD), folder, PublishConfig(backend="gloo"), **way)) as held:
        held.publish(version, learner.weights())
    if learner.config.lora.rank:
        WeightStore(folder / ADAPTERS, None, learner.adapter_config()).publish(version, learner.adapters())


def whole_run(folder: Path, accelerator: Accelerator, model: str, config: LearnerConfig) -> list[dict[str, float]]:
    """``STEPS`` steps with a checkpoint on the way and published weights at the end."""
    learner = make_learner(accelerator, model, config)
    metrics = train(learner, 0, SAVED)
    CheckpointStore(folder).save(SAVED, learner, {"own": "id"})
    metrics += train(learner, SAVED, STEPS)
    publish(learner, folder, STEPS)
    probe = learner.published_logprobs(range(1, 12), torch.float32)
    assert probe is not None
    metrics[-1]["probe"] = float(probe.mean())
    metrics[-1]["sharded"] = float(learner.sharded)
    metrics[-1]["candidates"] = float(candidate_logprobs(learner).mean())
    return metrics


def candidate_logprobs(learner: Learner) -> Tensor:
    """What an objective that reads the whole step asks before the first gradient; the same samples on every rank."""
    micro = collate(SAMPLES, version=0, origins=["student"], pad_id=0, device=torch.device("cpu"))
    with learner.accelerator.autocast():
        return learner.accelerator.unwrap_model(learner.module).logprobs(micro)


def resumed_run(
    folder: Path, saved: Path, accelerator: Accelerator, model: str, config: LearnerConfig
) -> list[dict[str, float]]:
    """The last step, from the checkpoint of the run in ``saved``."""
    learner = make_learner(accelerator, model, config)
    assert CheckpointStore(saved).load(SAVED, learner) == {"own": "id"}
    metrics = train(learner, SAVED, STEPS)
    publish(learner, folder, STEPS)
    return metrics


RUNS = {
    "fsdp2": ("tied", replace(CONFIG, sharding="fsdp2")),
    "fsdp2_untied": ("untied", replace(CONFIG, sharding="fsdp2", gradient_checkpointing=True)),
    "fsdp2_lora": ("untied", replace(CONFIG, sharding="fsdp2", lora=LORA)),
    "fsdp2_bf16": ("tied", replace(CONFIG, sharding="fsdp2", dtype="bf16")),
    "replicated": ("tied", CONFIG),
    "replicated_bf16": ("tied", replace(CONFIG, dtype="bf16")),
    # The last, since the changed state stays.
    "configured": ("tied", CONFIG),
}
"""Runs by name: the student and the configuration. ``configured`` is sharded by an accelerate config."""


def start_ranks(module: str, ranks: int, path: Path) -> None:
    """A module with one argument as ``ranks`` processes; fails the test where one of them fails."""
    command = [sys.executable, "-m", module, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    processes = [
        subprocess.Popen(command, env=each, stderr=subprocess.PIPE) for each in rank_environments(environment, ranks)
    ]
    errors = [process.communicate(timeout=150)[1].decode()[-4000:] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)


def main() -> None:
    """All runs whole, and resumed from the checkpoints of the runs in FOLDER/alone."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name, (model, config) in RUNS.items():
        accelerator = open_accelerator(config)
        if name == "configured":
            shard_by_config(accelerator)
        assert accelerator.num_processes == int(os.environ["WORLD_SIZE"])
        whole = whole_run(folder / name, accelerator, model, config)
        resumed = resumed_run(folder / f"{name}_resumed", folder / "alone" / name, accelerator, model, config)
        if accelerator.is_main_process:
            torch.save({"whole": whole, "resumed": resumed}, folder / f"{name}.pt")
    leave_group_at_exit()


if __name__ == "__main__":
    main()
