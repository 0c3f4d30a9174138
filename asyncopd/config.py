"""RunConfig: one frozen dataclass a component, each validated where it is defined; here, what only shows together."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cattrs
import yaml

from asyncopd.errors import ConfigError
from asyncopd.evaluation import EvaluationConfig
from asyncopd.learner.checkpoint import CheckpointConfig
from asyncopd.learner.step import LearnerConfig
from asyncopd.objectives import ObjectiveConfig
from asyncopd.prompts import DataConfig
from asyncopd.publish.config import PublishConfig
from asyncopd.queue.plan import QueueConfig
from asyncopd.rollout.pool import RolloutConfig
from asyncopd.scoring import TeacherConfig
from asyncopd.supervisor import SupervisionConfig
from asyncopd.tracking.trackers import TrackingConfig

_MODE = re.compile(r"sync|async|lagged:(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run."""

    name: str = ""
    """Name of the run folder; empty takes one from the recipe and the time, never one that is taken."""
    runs_dir: Path = Path("runs")
    """Where run folders are; must be on a local disk."""
    recipe: str = "run"
    """What the run is called when ``name`` is empty."""
    seed: int = 0
    """Seeds prompt order, sampling and candidate draws."""
    mode: str = "async"
    """Mode: ``sync``, ``lagged:k`` (batch i from exactly version max(0, i - k)), or ``async``."""
    steps: int = 100
    """Optimizer steps."""
    student: Path = Path("student")
    """Path of the student's HF checkpoint."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)

    def __post_init__(self) -> None:
        if not _MODE.fullmatch(self.mode):
            raise ConfigError(f"mode is {self.mode!r}; expected sync, async, or lagged:k such as lagged:4")
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}; expected at least 1")
        per_prompt = self.rollout.samples_per_prompt
        if self.queue.batch_size % per_prompt:
            raise ConfigError(
                f"queue.batch_size is {self.queue.batch_size}; expected a multiple of rollout.samples_per_prompt "
                f"({per_prompt})"
            )

    @property
    def lag(self) -> int | None:
        """Policy versions between generation and training in the pinned modes; None in async mode."""
        if self.mode == "async":
            return None
        return 0 if self.mode == "sync" else int(self.mode.partition(":")[2])

    @property
    def max_staleness(self) -> int:
        """Policy versions that a sample may be old when trained; a lagged mode needs at least its lag."""
        return max(self.queue.max_staleness, self.lag or 0)

    @property
    def publishes_adapters(self) -> bool:
        """Whether a published version is adapters alone, and not whole weights."""
        return self.learner.lora.rank > 0 and self.publish.adapters and self.publish.backend == "file"

    @property
    def stall_s(self) -> float:
        """Seconds without any movement in the queue after which the run fails."""
        return max(self.supervision.stall_s, 2 * self.supervision.start_s, 2 * self.teacher.deadline_s)

    @property
    def group_size(self) -> int:
        """Samples generated and scored together in the pinned modes: the most that divide a batch and fit the slots."""
        batch = self.queue.batch_size
        return max(size for size in range(1, min(self.rollout.slots, batch) + 1) if batch % size == 0)

    def threads(self, cores: int) -> tuple[int, int, int]:
        """CPU threads of the learner, of each rollout worker and of the scorer, where they are not set.

        In ``sync`` mode the stages take turns, so each gets every core. Otherwise the learner takes half of them and
        the rollout workers share the rest; the scorer's short bursts fit in between.
        """
        if self.mode == "sync":
            learner, rollout, scorer = cores, max(1, cores // self.rollout.workers), cores
        else:
            learner = max(1, cores // 2)
            rollout = max(1, (cores - learner) // self.rollout.workers)
            scorer = max(1, (cores - learner) // 2)
        return self.learner.threads or learner, self.rollout.threads or rollout, self.teacher.threads or scorer


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(_converter().unstructure(config), sort_keys=False)


def from_yaml(text: str, source: str) -> RunConfig:
    """A configuration from YAML; ConfigError names what does not fit. ``source`` is what the message calls it."""
    try:
        return _converter().structure(yaml.safe_load(text), RunConfig)
    except cattrs.BaseValidationError as error:
        details = "; ".join(cattrs.transform_error(error, path="config", format_exception=_in_words))
        raise ConfigError(f"{source} is not a run configuration: {details}") from error
    except (yaml.YAMLError, TypeError) as error:
        raise ConfigError(f"{source} is not a run configuration: {error}") from error


def plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested dictionaries of plain values."""
    return _converter().unstructure(config)


def flat(config: RunConfig) -> dict[str, Any]:
    """Every option by its dotted name."""

    def walk(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return dict(walk(plain(config), ""))


def _in_words(error: BaseException, kind: type | None) -> str:
    """What a component says of its own values goes before what can be said in general."""
    return str(error) if isinstance(error, ConfigError) else cattrs.v.format_exception(error, kind)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(Path, str)
    converter.register_structure_hook(Path, lambda value, _: Path(value))
    converter.register_unstructure_hook(tuple, list)
    return converter
