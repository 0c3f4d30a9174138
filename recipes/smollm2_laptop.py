"""SmolLM2-135M-Instruct teaches itself without its eight middle layers, on a laptop CPU.

    asyncopd launch recipes/smollm2_laptop.py                     # asynchronous, what `make demo` runs
    asyncopd launch recipes/smollm2_laptop.py --mode sync         # strictly in turn
    asyncopd launch recipes/smollm2_laptop.py --mode lagged:4     # each batch from exactly four versions ago

The student is the teacher with 8 of its 30 layers left out (106M parameters; why 8: ``prepare_smollm2.py``). It writes
answers of at most 48 tokens; the teacher scores 16 candidates at every token; the learner minimises the reverse KL,
recomputed under its current weights. What came of it is in ``recipes/README.md``.
"""

import sys
from pathlib import Path

from prepare_smollm2 import student_path, teacher_path

from asyncopd import RunConfig, recipe_main
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

DATA = Path(__file__).parent / "data"


def recipe() -> Recipe:
    """The demo's run; the models are made where they are not there yet."""
    config = RunConfig(
        recipe="smollm2-laptop",
        steps=80,
        student=student_path(),
        teacher=TeacherConfig(model=teacher_path(), samples=12),
        data=DataConfig(prompts=str(DATA / "prompts.jsonl"), held_out=str(DATA / "held_out.jsonl")),
        rollout=RolloutConfig(slots=24, refill=6, sampling=SamplingConfig(max_new_tokens=48)),
        queue=QueueConfig(batch_size=12, max_staleness=2),
        objective=ObjectiveConfig(name="reverse_kl", design="systematic(16)"),
        learner=LearnerConfig(lr=2e-4, schedule="linear", warmup_steps=5),
        checkpoint=CheckpointConfig(every=20),
        evaluation=EvaluationConfig(prompts=40),
    )
    return Recipe(config=config)


if __name__ == "__main__":
    sys.exit(recipe_main(recipe(), description=__doc__))
