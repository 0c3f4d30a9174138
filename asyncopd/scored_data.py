"""Training on a data set whose answers a teacher has scored once, ahead: no rollout, no teacher.

    teacher-cache score --data answers.jsonl --out scored ──> asyncopd offline scored --student models/student ──> runs/

No student sampled these answers. Nothing is known of the distribution that they came from, so only candidates that the
teacher drew, or the whole vocabulary, can be trained on; and the student is trained on states that it does not visit by
itself, which is what on-policy distillation is there to avoid.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError
from asyncopd.interface import RunResult
from asyncopd.learner.step import LearnerConfig
from asyncopd.objectives import ObjectiveConfig, build_objective
from asyncopd.offline import Batch, student_checks, train_offline, unsampled
from asyncopd.preflight import Preflight, outline
from asyncopd.prompts import DataConfig
from asyncopd.queue.order import permuted
from asyncopd.queue.plan import QueueConfig
from asyncopd.scoring import TeacherConfig
from asyncopd.tracking.trackers import TrackingConfig
from asyncopd.types import ScoredRollout
from teacher_cache.errors import TeacherCacheError
from teacher_cache.identity import Expectation, identify_tokenizer
from teacher_cache.scored_set import ScoredFacts, ScoredSet

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offline:
    """Train a student on answers that `teacher-cache score` has scored: no rollout, no teacher."""

    scored: Annotated[Path, tyro.conf.Positional]
    """The folder that `teacher-cache score --out` wrote."""
    student: Path
    """Path of the student's HF checkpoint."""
    name: str = ""
    """Name of the run folder; empty takes one from the time."""
    runs_dir: Path = Path("runs")
    """Where run folders are."""
    seed: int = 0
    """Seeds the order of the answers."""
    steps: int = 0
    """Optimizer steps; 0: once through the data, as far as whole batches go."""
    batch_size: int = 32
    """Answers of an optimizer step."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Must read what the teacher drew. The command line takes forward_kl with the data set's design and temperature."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch_size < 1:
            raise ConfigError(
                f"steps is {self.steps}, batch_size {self.batch_size}; expected 0 or more steps of at least 1 answer"
            )


def offline_main(argv: Sequence[str]) -> int:
    """The command line; the exit status."""
    if argv and not argv[0].startswith("-"):
        with _opened(Path(argv[0])) as scored:
            objective = default_objective(scored.facts)
        default = Offline(scored=Path(argv[0]), student=tyro.MISSING, objective=objective)
        asked = tyro.cli(Offline, args=argv, default=default, prog="asyncopd offline")
    else:
        asked = tyro.cli(Offline, args=argv, prog="asyncopd offline")
    result = offline(asked)
    Console().print(f"trained {result.policy_version} steps into {result.path}", markup=False, highlight=False)
    return 0


def default_objective(facts: ScoredFacts) -> ObjectiveConfig:
    """Forward KL over what the teacher drew; ConfigError where it drew nothing."""
    if facts.draw is None:
        raise ConfigError(
            "the data set was scored without candidates; score it again with a --draw, such as systematic(16)"
        )
    return ObjectiveConfig(
        name="forward_kl", origin="teacher", design=facts.draw, temperature=facts.teacher.temperature
    )


def offline(options: Offline) -> RunResult:
    """Train a student on a scored data set, into a new run folder.

    ConfigError before anything is written if objective, tokenizer or context do not fit the data.
    """
    with _opened(options.scored) as scored:
        require_scored(scored.facts, options.objective)
        config = _run_config(options, scored.facts)
        checks = _checks(config, scored.facts)
        places = _fitting(scored, config.student)
        steps = options.steps or max(1, len(places) // options.batch_size)
        config = replace(config, steps=steps)

        def batch(version: int) -> Batch:
            taken = range(version * options.batch_size, (version + 1) * options.batch_size)
            chosen = [
                places[permuted(turn % len(places), len(places), seed=config.seed, epoch=turn // len(places))]
                for turn in taken
            ]
            try:
                return [
                    ScoredRollout(
                        rollout=unsampled(request.uid, request.prompt_ids, request.response_ids_T, checks.ids),
                        record=record,
                    )
                    for request, record in scored.read(chosen)
                ], {}
            except TeacherCacheError as error:
                raise ConfigError(str(error)) from error

        source = {"offline from": str(options.scored), "teacher": scored.facts.model}
        return train_offline(config, checks, batch, steps=steps, source=source)


def require_scored(facts: ScoredFacts, objective: ObjectiveConfig) -> None:
    """ConfigError unless the objective reads what the teacher drew, and no more."""
    draws = build_objective(objective).draws
    has = f"teacher-drawn {facts.draw}" if facts.draw is not None else "no candidates"
    if set(draws) != {"teacher"}:
        reads = " and ".join(f"{origin}-drawn candidates" for origin in sorted(draws)) or "logprobs of the sampler"
        raise ConfigError(
            f"{objective.name} reads {reads}; no student sampled these answers, and the data set has {has}: "
            "choose an objective for teacher-drawn candidates, such as forward_kl or jsd with objective.origin teacher"
        )
    design = draws["teacher"].spec
    if design != facts.draw:
        raise ConfigError(
            f'objective.design is {design}; the data set has {has}: give --objective.design "{facts.draw}", or score '
            f'it again with --draw "{design}"'
        )
    if objective.temperature != facts.teacher.temperature:
        raise ConfigError(
            f"objective.temperature is {objective.temperature}; the data set is scored at {facts.teacher.temperature}: "
            f"give --objective.temperature {facts.teacher.temperature}"
        )


def _opened(folder: Path) -> ScoredSet:
    try:
        return ScoredSet(folder)
    except TeacherCacheError as error:
        raise ConfigError(str(error)) from error


def _run_config(options: Offline, facts: ScoredFacts) -> RunConfig:
    """The options as a run's configuration, which the learner is made from."""
    config = RunConfig(
        name=options.name,
        runs_dir=options.runs_dir,
        recipe="offline",
        seed=options.seed,
        mode="sync",
        student=options.student,
        teacher=TeacherConfig(model=Path(facts.model)),
        data=DataConfig(prompts=str(options.scored)),
        objective=options.objective,
        learner=options.learner,
        tracking=options.tracking,
    )
    return replace(
        config,
        queue=QueueConfig(batch_size=options.batch_size, max_staleness=0),
        rollout=replace(config.rollout, samples_per_prompt=1),
    )


def _checks(config: RunConfig, facts: ScoredFacts) -> Preflight:
    """What a run's preflight finds out, without prompts."""
    checks = student_checks(config)
    differs = Expectation(tokenizer=identify_tokenizer(checks.tokenizer)).differences(facts.teacher)
    if differs:
        raise ConfigError(f"the data set was scored for another tokenizer than the student's: {'; '.join(differs)}")
    return checks


def _fitting(scored: ScoredSet, student: Path) -> list[int]:
    """The answers that can be trained on: not empty, and within the student's context."""
    context = outline(student, "student").get_text_config(decoder=True).max_position_embeddings
    fitting = [
        place
        for place, answer in enumerate(scored.answers)
        if answer.response and answer.prompt + answer.response <= context
    ]
    if not fitting:
        raise ConfigError(f"none of {len(scored.answers)} answers can be trained on: each is empty or over {context}")
    if len(fitting) < len(scored.answers):
        LOG.warning(
            "%d of %d answers are left out: empty, or longer with their prompt than the student's context of %d",
            len(scored.answers) - len(fitting),
            len(scored.answers),
            context,
        )
    return fitting
