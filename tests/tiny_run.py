"""Whole runs with tiny models: real processes, real text, seconds."""

import json
import threading
from collections.abc import Callable, Sequence
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
from asyncopd.run_folder import RunFolder
from asyncopd.scoring import TeacherConfig
from asyncopd.stage import Stage
from asyncopd.supervisor import SupervisionConfig, WorkerSpec
from asyncopd.tracking.trackers import TrackingConfig
from asyncopd.tracking.wandb_run import WandbConfig
from asyncopd.worker import open_stage
from asyncopd.workers import build_worker

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


class ThreadedWorkers:
    """Stands in for the supervisor: the same workers as threads of this process, so that a run costs a second."""

    restarts = 0

    def __init__(
        self,
        run_dir: Path,
        workers: Sequence[WorkerSpec],
        config: SupervisionConfig,
        *,
        on_death: Callable[[], None],
        **_: object,
    ) -> None:
        self._folder, self._on_death = RunFolder(run_dir), on_death
        self._threads = [threading.Thread(target=self._work, args=(spec,)) for spec in workers]
        self._stages: list[Stage] = []
        self._error: Exception | None = None
        # transformers cannot load two models at the same time in one process, and the scorer loads more as it goes on.
        self._loading = threading.Lock()
        self._loaded = threading.Barrier(len(self._threads))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        for stage in self._stages:
            stage.stop()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def kill(self) -> None:
        raise AssertionError("threads cannot be killed")

    def _work(self, spec: WorkerSpec) -> None:
        try:
            with open_stage(self._folder, spec.kind, spec.index) as stage:
                self._stages.append(stage)
                with self._loading:
                    worker = build_worker(spec.kind, stage, self._folder)
                self._loaded.wait(60)
                worker.run()
        except threading.BrokenBarrierError:
            return
        except Exception as error:  # noqa: BLE001  whatever a stage raises is the run's to report
            self._error = error
            self._loaded.abort()
            self._on_death()
