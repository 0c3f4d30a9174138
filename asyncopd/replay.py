"""Training again, offline, from what a recorded run has kept: no rollout, no teacher, the same batches in their order.

    runs/x, recorded with queue.record=true ──payloads──> learner with another objective ──> runs/x-replay-...

A replay starts from the student that the run started from. With the run's own objective it repeats the run's steps bit
for bit wherever the learner is deterministic; with another one it answers what that objective would have made of the
same answers. The answers are those of the *recorded* student, so a replay drifts off-policy as its student changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from transformers import AutoTokenizer

from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError
from asyncopd.interface import RunResult
from asyncopd.learner.loop import batch_ages
from asyncopd.learner.read_ahead import read_samples
from asyncopd.objectives import ObjectiveConfig, build_objective
from asyncopd.offline import Batch, train_offline
from asyncopd.preflight import Preflight, generation_config, outline
from asyncopd.prompts import PromptSet, read_prompts
from asyncopd.queue.ledger import Ledger
from asyncopd.rollout.mixed_engine import TeacherFraction, check_fraction
from asyncopd.run_folder import RunFolder, TokenIds


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A run that can be replayed.

    steps       policy versions whose batches are kept, from 1 on
    """

    folder: RunFolder
    config: RunConfig
    ids: TokenIds
    steps: int

    @classmethod
    def read(cls, run_dir: Path) -> "Recorded":
        """Look at a run folder; ConfigError if it was not recorded, or has trained nothing."""
        folder = RunFolder(run_dir.resolve())
        if not folder.ledger_path.is_file():
            raise ConfigError(f"{run_dir} holds no ledger.sqlite; give the folder of a run, such as runs/<name>")
        config = folder.config()
        with Ledger.open(folder.ledger_path) as ledger:
            steps = ledger.policy_version
        if not config.queue.record:
            raise ConfigError(
                f"run {config.name!r} kept no payloads; only a run started with --queue.record can be replayed"
            )
        if steps < 1:
            raise ConfigError(f"run {config.name!r} has trained no step yet; let it train first")
        return cls(folder=folder, config=config, ids=folder.token_ids(), steps=steps)


def replay(run_dir: Path, objective: ObjectiveConfig, *, name: str = "") -> RunResult:
    """Train a recorded run again with ``objective``, into a new run folder beside it.

    name        of the new run folder; empty takes one from the run's name and the time

    ConfigError before anything is written if the objective needs candidates that the run did not record.
    """
    recorded = Recorded.read(run_dir)
    config = replace(
        recorded.config,
        name=name,
        recipe=f"{recorded.config.name}-replay",
        runs_dir=recorded.folder.path.parent,
        objective=objective,
    )
    require_recorded(recorded.config, objective)
    checks = _checks(recorded, config)
    source = {"replay of": recorded.config.name, "teacher": str(config.teacher.model)}
    with Ledger.open(recorded.folder.ledger_path) as ledger:

        def batch(version: int) -> Batch:
            trained = ledger.trained_batch(version + 1)
            return read_samples(recorded.folder.path, trained.samples), batch_ages(trained, version)

        return train_offline(config, checks, batch, steps=recorded.steps, source=source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Train a recorded run (queue.record true) again from its payloads: no rollout, no teacher, the same batches."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder, runs/<name>."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """What is not given is as in the recorded run."""
    name: str = ""
    """Name of the new run folder, beside the recorded one; empty takes one from the run's name and the time."""


def replay_main(argv: Sequence[str]) -> int:
    """The command line of a replay; the exit status."""
    if argv and not argv[0].startswith("-"):
        # What is not given is as in the run, so the run must be read before the rest of the command line.
        run = Path(argv[0])
        asked = tyro.cli(
            Replay,
            args=argv,
            default=Replay(run=run, objective=Recorded.read(run).config.objective),
            prog="asyncopd replay",
        )
    else:
        asked = tyro.cli(Replay, args=argv, prog="asyncopd replay")
    result = replay(asked.run, asked.objective, name=asked.name)
    Console().print(f"replayed {result.policy_version} steps into {result.path}", markup=False, highlight=False)
    return 0


def require_recorded(recorded: RunConfig, objective: ObjectiveConfig) -> None:
    """ConfigError naming what is recorded, unless the objective reads that and no more."""
    # What the teacher wrote has no logprobs of a sampler, which no list of candidates would show.
    fraction = TeacherFraction.parse(recorded.rollout.teacher_fraction)
    check_fraction(fraction, build_objective(objective), teachers=1, loadable=True)
    kept = {origin: design.spec for origin, design in build_objective(recorded.objective).draws.items()}
    present = " and ".join(f"{origin}-drawn {design}" for origin, design in sorted(kept.items())) or "no candidates"
    for origin, design in sorted(build_objective(objective).draws.items()):
        if origin not in kept:
            raise ConfigError(
                f"{objective.name} reads {origin}-drawn candidates; run {recorded.name!r} recorded {present}: "
                "choose an objective that reads those, or set objective.origin"
            )
        if design.spec != kept[origin]:
            raise ConfigError(
                f"objective.design is {design.spec}; run {recorded.name!r} recorded {present}: give --objective.design "
                f'"{kept[origin]}"'
            )
    at = recorded.objective.temperature
    if objective.temperature != at:
        raise ConfigError(
            f"objective.temperature is {objective.temperature}; the teacher's scores of run {recorded.name!r} are "
            f"recorded at {at}: give --objective.temperature {at}"
        )


def _checks(recorded: Recorded, config: RunConfig) -> Preflight:
    """What a run's preflight finds out, from what the recorded run has written down."""
    sampling = config.rollout.sampling
    config.objective.validate_with_sampling(
        temperature=sampling.temperature,
        truncated=sampling.truncated,
        vocabulary=recorded.ids.vocabulary,
    )
    return Preflight(
        tokenizer=AutoTokenizer.from_pretrained(config.student),
        generation=generation_config(config.student, outline(config.student, "student")),
        ids=recorded.ids,
        objective=build_objective(config.objective),
        prompts=PromptSet(prompts=read_prompts(recorded.folder.prompts_path), held_out=(), skipped=()),
    )
