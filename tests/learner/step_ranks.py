"""One step's gradient in this process, or as one of several gloo ranks; see ``test_step_over_ranks``.

python -m tests.learner.step_ranks FILE        with RANK, WORLD_SIZE, ... as torch.distributed wants them
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from asyncopd.learner.batching import balanced_shares
from asyncopd.learner.head import HeadShape
from asyncopd.learner.load import leave_group_at_exit
from asyncopd.learner.step import Learner, LearnerConfig
from asyncopd.objectives import ObjectiveConfig, build_objective
from asyncopd.types import ScoredRollout
from tests.conftest import VOCABULARY, make_tiny_llama
from tests.learner.test_step import CANDIDATES, SAMPLES

DRAWN = f"systematic({CANDIDATES})"
OBJECTIVES = {
    "hajek": ObjectiveConfig(design=DRAWN),
    "hajek, sequence_mean": ObjectiveConfig(design=DRAWN, reduction="sequence_mean"),
    "mean": ObjectiveConfig(design=DRAWN, centring="mean"),
    "second_moment": ObjectiveConfig(name="second_moment", budget=3.0),
    "decoupled": ObjectiveConfig(name="decoupled"),
    "sequence_ratio": ObjectiveConfig(name="sequence_ratio"),
}
LAYOUTS = {"padded": ("off", 25), "packed": ("on", 25), "one by one": ("off", 1), "sharded": ("on", 40)}
"""Packing and token budget."""


def step_gradient(
    name: str, samples: Sequence[ScoredRollout], layout: str, dtype: str = "fp32"
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradient and metrics of one step; float64, or bf16 autocast over float32."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if dtype == "bf16" else "no")
    packing, budget = LAYOUTS[layout]
    model = make_tiny_llama(1, layers=2)
    learner = Learner(
        model if dtype == "bf16" else model.double(),
        build_objective(OBJECTIVES[name]),
        LearnerConfig(
            dtype=dtype,
            clip=0,
            packing=packing,
            micro_batch_tokens=budget,
            sharding="fsdp2" if layout == "sharded" else "none",
        ),
        accelerator=accelerator,
        steps=1,
        shape=HeadShape(vocabulary=VOCABULARY),
        pad_id=0,
    )
    if dtype == "fp32":
        module = accelerator.unwrap_model(learner.module)
        module.shape = replace(module.shape, compute_dtype=torch.float64)
    # One step of plain gradient descent at rate 1 takes the gradient off the weights.
    learner.optimizer = torch.optim.SGD(learner.module.parameters(), lr=1.0)
    learner.schedule = torch.optim.lr_scheduler.ConstantLR(learner.optimizer, factor=1.0)
    before = {key: value.clone() for key, value in weights(learner).items()}
    share = balanced_shares([len(s.rollout.response_ids_T) for s in samples], accelerator.num_processes)
    metrics = learner.step([samples[i] for i in share[accelerator.process_index]], 0)
    return {key: before[key] - value for key, value in weights(learner).items()}, metrics


def weights(learner: Learner) -> dict[str, Tensor]:
    """All weights, whole."""
    found = {name: value.detach() for name, value in learner.student.state_dict().items()}
    return {name: value.full_tensor() if learner.sharded else value for name, value in found.items()}


def main() -> None:
    """The gradient of every objective in every layout, and the number of processes that made it."""
    torch.set_num_threads(1)
    found = {(name, layout): step_gradient(name, SAMPLES, layout) for name in OBJECTIVES for layout in LAYOUTS}
    accelerator = Accelerator(cpu=True)
    count = accelerator.reduce(torch.tensor(1), reduction="sum").item()
    if accelerator.is_main_process:
        torch.save({"processes": count, "found": found}, Path(sys.argv[1]))
    leave_group_at_exit()


if __name__ == "__main__":
    main()
