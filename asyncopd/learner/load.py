"""From a configuration to a learner on this process's device: the same for a run and for a replay."""

import atexit
import time
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, set_seed
from transformers import AutoModelForCausalLM

from asyncopd.allocator import keep_freed_memory
from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError
from asyncopd.learner.head import HeadShape
from asyncopd.learner.module import check_head
from asyncopd.learner.step import Learner
from asyncopd.learner.student import prepare_student
from asyncopd.preflight import Preflight
from asyncopd.workers import cores

LET_GO_S = 0.5
"""Seconds that the threads of a process group have, at the end, to let go of what they sent."""


def open_accelerator(config: RunConfig) -> Accelerator:
    """This rank's accelerator; threads, allocator and seeds of the process are set for the learner."""
    atexit.unregister(_leave_group)
    torch.set_num_threads(config.threads(cores())[0])
    keep_freed_memory()
    # The state is global to the process; a notebook may have run with another precision before.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if config.learner.dtype == "bf16" else "no",
        # The other ranks wait for rank 0, which waits for samples and must be the first to give up.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2 * config.stall_s))],
    )
    set_seed(config.seed)
    return accelerator


def leave_group_at_exit() -> None:
    """End this rank's process group when the interpreter ends, before it is torn down; for a rank that succeeded.

    A gloo thread that still holds a tensor when Python is gone ends the process with SIGABRT. A rank that failed must
    not wait for its group, since the others may never answer; so the next ``open_accelerator`` takes this back.
    """
    atexit.register(_leave_group)


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        # Sharded modules hold groups of their own, whose threads live on. They let go of the tensors of the last
        # collective a moment after it is done, and must have the interpreter for that.
        time.sleep(LET_GO_S)


def load_learner(config: RunConfig, checks: Preflight, accelerator: Accelerator) -> Learner:
    """The student as the configuration names it, with optimizer and schedule, before the first step."""
    if config.queue.batch_size < accelerator.num_processes:
        raise ConfigError(
            f"queue.batch_size is {config.queue.batch_size} for {accelerator.num_processes} learner processes; "
            "expected at least one sample a process"
        )
    model = AutoModelForCausalLM.from_pretrained(config.student, dtype=torch.float32)
    shape = HeadShape.of(
        model.config,
        vocabulary=checks.ids.vocabulary,
        temperature=config.objective.temperature,
        chunk_bytes=config.learner.head_chunk_mb * 2**20,
    )
    check_head(model, shape)
    prepare_student(model, config.learner)
    return Learner(
        model,
        checks.objective,
        config.learner,
        accelerator=accelerator,
        steps=config.steps,
        shape=shape,
        pad_id=checks.ids.pad_id,
    )
