"""Held-out evaluation as part of a run: before the first step, now and then, and after the last."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncopd.config import RunConfig
from asyncopd.evaluation import HeldOut, held_out_kl
from asyncopd.interface import Callbacks
from asyncopd.preflight import Preflight
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.tracking.trace import Tracer
from asyncopd.tracking.trackers import RunTracking
from asyncopd.workers import cores


class HeldOutEvaluation:
    """Fresh answers of the student to the held-out prompts, against the teacher, on rank 0."""

    def __init__(
        self, config: RunConfig, checks: Preflight, tracking: RunTracking, tracer: Tracer, callbacks: Callbacks
    ) -> None:
        self._config = config
        self._checks = checks
        self._tracking = tracking
        self._tracer = tracer
        self._callbacks = callbacks
        self._prompts = checks.prompts.held_out[: config.evaluation.prompts]
        self._teacher: PreTrainedModel | None = None

    def outermost(self, student: PreTrainedModel, version: int) -> HeldOut | None:
        """Evaluate before the first or after the last step, with every core, since no worker runs then."""
        with _every_core():
            return self._evaluate(student, version)

    def between(self, student: PreTrainedModel, version: int) -> None:
        """Evaluate after a step, where one is due."""
        every = self._config.evaluation.every
        if every and version % every == 0 and version < self._config.steps:
            self._evaluate(student, version)

    def _evaluate(self, student: PreTrainedModel, version: int) -> HeldOut | None:
        with self._tracer.span("evaluate"):
            found = self._held_out(student, version)
            if self._callbacks.evaluate is not None:
                self._tracking.log(version, self._callbacks.evaluate(student, version))
        return found

    def _sampling(self) -> SamplingConfig:
        sampling, longest = self._config.rollout.sampling, self._config.evaluation.max_new_tokens
        return sampling if longest is None else replace(sampling, max_new_tokens=longest)

    def _held_out(self, student: PreTrainedModel, version: int) -> HeldOut | None:
        """The held-out figures; None without held-out prompts, or without the teacher's weights."""
        config = self._config
        if not self._prompts or not config.teacher.weights_are_here:
            return None
        if self._teacher is None:
            self._teacher = AutoModelForCausalLM.from_pretrained(config.teacher.model, dtype=torch.float32)
            self._teacher.to(student.device)
        found = held_out_kl(
            student,
            self._teacher,
            self._prompts,
            self._sampling(),
            tokenizer=self._checks.tokenizer,
            eos_token_ids=self._checks.ids.eos_ids,
            temperature=config.objective.temperature,
            batch=config.evaluation.batch,
        )
        if not config.evaluation.every:
            # Nothing needs it until the run is over.
            self._teacher = None
        self._tracking.evaluation(version, found)
        if self._callbacks.on_evaluation is not None:
            self._callbacks.on_evaluation(version, found)
        return found


@contextmanager
def _every_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        yield
    finally:
        torch.set_num_threads(threads)
