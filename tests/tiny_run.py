"""Whole runs with tiny models: real processes, real text, seconds."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from asyncopd.config import RunConfig
from asyncopd.evaluation import EvaluationConfig
from asyncopd.learner.checkpoint import CheckpointConfig
from asyncopd.learner.step import LearnerConfig
from asyncopd.objectives import ObjectiveConfig
from asyncopd.prompts import DataConfig
from asyncopd.queue.plan import QueueConfig
from asyncopd.rollout.pool import RolloutConfig
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.scoring import TeacherConfig
from asyncopd.tracking.trackers import TrackingConfig
from asyncopd.tracking.wandb_run import WandbConfig

ROOT = Path(__file__).parent.parent
_RECIPE = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
from asyncopd import recipe_main
from tests.tiny_run import tiny_config

sys.exit(recipe_main(tiny_config(Path({folder!r}), Path({teacher!r}), Path({student!r}))))
"""
QUESTIONS = [f"What is {a} plus {b}?" for a in range(6) for b in range(5)]


def write_prompts(folder: Path) -> Path:
    """30 short prompts; the last six are held out by ``tiny_config``."""
    path = folder / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def tiny_config(folder: Path, teacher: Path, student: Path, **changes: object) -> RunConfig:
    """A run of six steps of eight short answers, float32 and one thread a process, so that it repeats exactly."""
    config = RunConfig(
        name="tiny",
        runs_dir=folder / "runs",
        seed=3,
        mode="sync",
        steps=6,
        student=student,
        teacher=TeacherConfig(model=teacher, dtype="fp32", threads=1),
        data=DataConfig(prompts=str(write_prompts(folder)), held_out_from_end=6),
        rollout=RolloutConfig(
            slots=4, refill=1, samples_per_prompt=2, dtype="fp32", threads=1, sampling=SamplingConfig(max_new_tokens=12)
        ),
        queue=QueueConfig(batch_size=8, max_staleness=2, lease_s=20.0),
        objective=ObjectiveConfig(name="reverse_kl", design="systematic(8)"),
        learner=LearnerConfig(lr=3e-3, dtype="fp32", threads=1, micro_batch_tokens=256),
        checkpoint=CheckpointConfig(every=2, keep=2),
        evaluation=EvaluationConfig(prompts=4),
        tracking=TrackingConfig(live_view=False, wandb=WandbConfig(enabled="off")),
    )
    return replace(config, **changes)


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    """Weights of the distilled student."""
    return load_file(run / "final" / "model.safetensors")


def write_recipe(folder: Path, teacher: Path, student: Path) -> Path:
    """The same run as a recipe with a command line, for a launcher."""
    path = folder / "recipe.py"
    path.write_text(_RECIPE.format(root=str(ROOT), folder=str(folder), teacher=str(teacher), student=str(student)))
    return path
