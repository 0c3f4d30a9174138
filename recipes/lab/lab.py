"""The staleness lab: addition with a written scratchpad, a teacher and a student of a few hundred kilobytes.

    asyncopd launch recipes/lab/lab.py --mode lagged:4      # one run
    asyncopd sweep recipes/lab/sweeps/directions.yaml       # many, as the notebooks read them

A run takes about a minute of one core. What the lab found is in ``docs/findings.md``.
"""

import sys
from pathlib import Path

from addition import DATA, answer_tokens, greedy_accuracy, read_prompts

from asyncopd import Callbacks, RunConfig, recipe_main
from asyncopd.evaluation import EvaluationConfig
from asyncopd.learner.checkpoint import CheckpointConfig
from asyncopd.learner.step import LearnerConfig
from asyncopd.objectives import ObjectiveConfig
from asyncopd.prompts import DataConfig
from asyncopd.queue.plan import QueueConfig
from asyncopd.recipe import Recipe
from asyncopd.rollout.pool import RolloutConfig
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.scoring import TeacherConfig
from asyncopd.tracking.trackers import TrackingConfig
from asyncopd.tracking.wandb_run import WandbConfig

LAB = Path(__file__).parent
BATCH = 32


def recipe() -> Recipe:
    """The lab's run, and its own evaluation: the share of held-out sums that are answered right."""
    config = RunConfig(
        recipe="lab",
        mode="sync",
        steps=480,
        student=LAB / "models" / "student",
        teacher=TeacherConfig(
            model=LAB / "models" / "teacher", dtype="fp32", threads=1, samples=BATCH, batch_tokens=8192
        ),
        data=DataConfig(
            prompts=str(DATA / "train.jsonl"),
            column="prompt",
            text_as_message=False,
            held_out=str(DATA / "held_out.jsonl"),
        ),
        rollout=RolloutConfig(
            slots=BATCH,
            refill=8,
            dtype="fp32",
            threads=1,
            sampling=SamplingConfig(max_new_tokens=answer_tokens() + 2),
        ),
        queue=QueueConfig(batch_size=BATCH, max_staleness=1),
        objective=ObjectiveConfig(name="reverse_kl", design="systematic(4)"),
        learner=LearnerConfig(
            lr=2e-3, schedule="linear", warmup_steps=20, dtype="fp32", threads=1, micro_batch_tokens=8192
        ),
        checkpoint=CheckpointConfig(every=100),
        evaluation=EvaluationConfig(prompts=128, batch=128),
        tracking=TrackingConfig(wandb=WandbConfig(enabled="off")),
    )
    return Recipe(config=config, callbacks=callbacks)


def callbacks(config: RunConfig) -> Callbacks:
    """What a run of the lab measures besides its held-out KL."""
    prompts = read_prompts(Path(str(config.data.held_out)))
    return Callbacks(evaluate=lambda student, _: greedy_accuracy(student, prompts))


if __name__ == "__main__":
    sys.exit(recipe_main(recipe(), description=__doc__))
