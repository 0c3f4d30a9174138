"""Held-out evaluation as part of a run: by the scoring stage, between its leases, while everything else goes on.

    learner ──weights/v──> scoring stage ──evaluations/v.json──> learner ──> trackers

Which versions are due follows from the configuration and from what is on disk alone, so a kill loses none of it.
"""

import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace

import cattrs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncopd.evaluation import AskedTeacher, HeldOut, held_out_steps
from asyncopd.learner.step import DTYPES
from asyncopd.prompts import read_prompts
from asyncopd.publish import WeightPublisher
from asyncopd.queue.files import write_whole
from asyncopd.rollout.weights import load_weights_into
from asyncopd.run_folder import RunFolder
from asyncopd.stage import Stage
from asyncopd.teachers import device
from asyncopd.tracking.trackers import RunTracking
from asyncopd.types import Prompt
from teacher_cache.causal_scorer import CausalModel
from teacher_cache.errors import ScoringError

MOST_ASKED_GB = 8
"""Gigabytes that an evaluation may ask of a teacher behind services, at most."""
_BYTES = 4
SLICE_S = 0.2
"""Seconds of evaluation before the stage looks for answers to score again."""


class HeldOutFiles:
    """The figures of a run that have been found, one file a policy version, and which are still to be found."""

    def __init__(self, folder: RunFolder) -> None:
        self._run_dir = folder.path
        self._config = folder.config()
        prompts = read_prompts(folder.held_out_path)
        self._prompts = len(prompts)
        self._refused = folder.path / "evaluations" / "refused.txt"
        self._none_because = _none_because(folder, prompts)

    @property
    def none_because(self) -> str | None:
        """Why there will be none although there are held-out prompts, and what to do; else None."""
        # Asked of the file each time, since another process may have given up.
        if self._none_because is None and self._refused.exists():
            self._none_because = self._refused.read_text()
        return self._none_because

    def give_up(self, reason: str) -> None:
        """No figures from now on, by any process of the run."""
        write_whole(self._run_dir, str(self._refused.relative_to(self._run_dir)), reason.encode())

    def waiting(self, published: Iterable[int]) -> list[int]:
        """Those of the published versions that are to be evaluated and have no figures yet."""
        due, steps = self._config.evaluation.due, self._config.steps
        if not self._prompts or self.none_because is not None:
            return []
        return [v for v in published if due(v, steps) and not (self._run_dir / _path(v)).exists()]

    def versions(self) -> list[int]:
        """Versions that have figures, ascending."""
        return sorted(int(path.stem[1:]) for path in self._run_dir.glob("evaluations/v*.json"))

    def write(self, version: int, found: HeldOut) -> None:
        """Keep the figures of ``version``, whole or not at all."""
        write_whole(self._run_dir, _path(version), json.dumps(asdict(found), ensure_ascii=False).encode())

    def read(self, version: int) -> HeldOut:
        """What ``write`` wrote."""
        return cattrs.structure(json.loads((self._run_dir / _path(version)).read_bytes()), HeldOut)

    def forget_after(self, version: int) -> None:
        """Delete the figures of newer versions: they belong to a timeline that was lost."""
        for lost in self.versions():
            if lost > version:
                (self._run_dir / _path(lost)).unlink()
        # Whoever resumes may have mended what was refused.
        self._refused.unlink(missing_ok=True)


@dataclass(kw_only=True, slots=True)
class HeldOutWorker:
    """Evaluates published versions in slices of ``SLICE_S``, in the scoring stage's process and thread.

    teacher     gives a teacher by its name; asked once something is due
    """

    stage: Stage
    folder: RunFolder
    files: HeldOutFiles
    weights: WeightPublisher
    teacher: Callable[[str], CausalModel | AskedTeacher]
    _steps: Generator[None, None, HeldOut] | None = None
    _version: int = -1
    _compiles: bool = False

    def work(self) -> bool:
        """A slice of the oldest version that is due; False where none is."""
        if self._steps is None:
            due = self.files.waiting(self.weights.versions())
            if not due:
                return False
            self._version = due[0]
        alone = self.stage.ledger.finished and not self.folder.config().teacher.threads
        cores = _every_core() if alone else nullcontext()
        with cores, self.stage.tracer.span("evaluate", version=self._version):
            self._slice()
        return True

    def _slice(self) -> None:
        until = time.monotonic() + SLICE_S
        if self._steps is None:
            self._steps = self._begin()
        try:
            # A teacher that compiles may do so here first.
            with self.stage.loading() if self._compiles else nullcontext():
                while time.monotonic() < until:
                    self.stage.beat()
                    next(self._steps)
        except StopIteration as end:
            self._steps = None
            self.files.write(self._version, end.value)
            self.stage.hand_on()
        except ScoringError as error:
            # Figures are worth less than the run, and what a service refuses now it would refuse again.
            self._steps = None
            self.files.give_up(f"the teacher refuses whole distributions: {error}")
            self.stage.log.warning("no held-out figures from now on: %s", self.files.none_because)
            self.stage.hand_on()

    def _begin(self) -> Generator[None, None, HeldOut]:
        config, ids = self.folder.config(), self.folder.token_ids()
        self._compiles = config.teacher.compile
        prompts = read_prompts(self.folder.held_out_path)
        with self.stage.loading():
            student = AutoModelForCausalLM.from_pretrained(config.student, dtype=DTYPES[config.rollout.dtype])
            load_weights_into(student, self.weights.directory(self._version))
            student.to(device())
            teachers = {name: self.teacher(name) for name in dict.fromkeys(prompt.teacher for prompt in prompts)}
        longest = config.evaluation.max_new_tokens
        sampling = config.rollout.sampling
        return held_out_steps(
            student,
            teachers,
            prompts,
            sampling if longest is None else replace(sampling, max_new_tokens=longest),
            tokenizer=AutoTokenizer.from_pretrained(config.student),
            eos_token_ids=ids.eos_ids,
            temperature=config.objective.temperature,
            batch=config.evaluation.batch,
        )


@dataclass(kw_only=True, slots=True)
class HeldOutCollector:
    """What the learner's process does with the figures: each is logged once, in order, and told to the caller.

    logged      versions whose figures an earlier life of the run has logged
    """

    files: HeldOutFiles
    tracking: RunTracking
    told: Callable[[int, HeldOut], None] | None
    logged: set[int]

    def collect(self) -> None:
        """Log what is new."""
        for version in self.files.versions():
            if version not in self.logged:
                self.logged.add(version)
                found = self.files.read(version)
                self.tracking.evaluation(version, found)
                if self.told is not None:
                    self.told(version, found)


@contextmanager
def _every_core() -> Iterator[None]:
    """After the last step no other stage works any more, so this one takes all, unless ``teacher.threads`` is set."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _none_because(folder: RunFolder, prompts: Sequence[Prompt]) -> str | None:
    config = folder.config()
    teacher = config.teacher
    asked = [prompt.teacher for prompt in prompts if teacher.weights_of(prompt.teacher) is None]
    if not asked:
        return None
    if teacher.scorer in ("openai", "scripted"):
        return (
            f"teacher.scorer {teacher.scorer} gives no whole distributions, and the weights of the teacher "
            f"{asked[0]!r} are not here; set teacher.model, or the named teacher, to their folder"
        )
    longest = config.evaluation.max_new_tokens or config.rollout.sampling.max_new_tokens
    asked_gb = len(asked) * longest * folder.token_ids().vocabulary * _BYTES / 1e9
    if asked_gb > MOST_ASKED_GB:
        return (
            f"an evaluation would ask up to {asked_gb:.1f} GB of distributions of the teacher's services, more than "
            f"{MOST_ASKED_GB}; lower evaluation.prompts or evaluation.max_new_tokens, or set teacher.model to the "
            "folder of the teacher's weights"
        )
    return None


def _path(version: int) -> str:
    return f"evaluations/v{version:08d}.json"
