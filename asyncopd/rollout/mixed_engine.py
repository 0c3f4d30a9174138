"""Some answers by the teacher: the off-policy part of generalised knowledge distillation (Agarwal et al., 2024).

requests ──by uid──┬──> student's engine ──> answers with versions
                   └──> teacher's engine ──> answers of NO_VERSION, without behaviour logprobs
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from asyncopd.errors import AsyncOPDError, ConfigError
from asyncopd.objectives import Objective
from asyncopd.rollout.engine import RolloutEngine
from asyncopd.types import NO_VERSION, Rollout, RolloutRequest

_SCHEDULE = re.compile(r"(?P<first>[\d.]+)(?:->(?P<last>[\d.]+) over (?P<steps>\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherFraction:
    """The share of answers that the teacher writes: from ``first`` to ``last`` linearly over ``steps`` versions."""

    first: float
    last: float
    steps: int

    @classmethod
    def parse(cls, text: str) -> "TeacherFraction":
        """From ``0.5`` or ``0.5->0 over 100``; ConfigError for anything else."""
        found = _SCHEDULE.fullmatch(text.strip())
        try:
            first = float(found["first"]) if found else -1.0
            last = float(found["last"]) if found and found["last"] else first
        except ValueError:
            first = last = -1.0
        if not (0 <= first <= 1 and 0 <= last <= 1):
            raise ConfigError(
                f"rollout.teacher_fraction is {text!r}; expected a share such as 0.5, or a schedule such as "
                '"0.5->0 over 100", which goes from one share to the other in so many optimizer steps'
            )
        return cls(first=first, last=last, steps=int(found["steps"]) if found and found["steps"] else 0)

    def at(self, version: int) -> float:
        """The share at a policy version."""
        done = min(1.0, version / self.steps) if self.steps else 1.0
        return self.first + (self.last - self.first) * done

    def takes(self, uid: str, version: int, seed: int) -> bool:
        """Whether the teacher writes the sample ``uid``, leased at ``version``: the same whenever it is asked."""
        digest = hashlib.blake2b(f"{seed}/{uid}".encode(), digest_size=8, person=b"teacher-wrote").digest()
        return int.from_bytes(digest, "big") < self.at(version) * 2**64

    @property
    def never(self) -> bool:
        """Whether the teacher writes nothing at all."""
        return self.first == self.last == 0


def check_fraction(fraction: TeacherFraction, objective: Objective, *, teachers: int, loadable: bool) -> None:
    """ConfigError where teacher-written answers cannot be trained on, or nothing here can write them.

    teachers    how many teachers there are
    loadable    whether the teacher's weights are here
    """
    if fraction.never:
        return
    if set(objective.draws) != {"teacher"}:
        raise ConfigError(
            f"rollout.teacher_fraction is set and {objective.config.name} reads what the student drew or sampled, "
            "which a teacher-written answer has not: choose an objective of teacher-drawn candidates, such as "
            "forward_kl or jsd with objective.origin teacher, or the design full"
        )
    if teachers > 1 or not loadable:
        raise ConfigError(
            "rollout.teacher_fraction is set; the rollout workers load teacher.model to write answers, so it must be "
            "here and the only teacher: leave teacher.named out, or set the fraction to 0"
        )


class MixedEngine:
    """A RolloutEngine of which the teacher writes a share; everything about weights concerns the student's alone."""

    def __init__(
        self, student: RolloutEngine, teacher: RolloutEngine, fraction: TeacherFraction, *, run_seed: int
    ) -> None:
        self._student = student
        self._teacher = teacher
        self._fraction = fraction
        self._run_seed = run_seed

    @property
    def policy_version(self) -> int:
        """The student's."""
        return self._student.policy_version

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned, of both."""
        return self._student.in_flight + self._teacher.in_flight

    def load_weights(self, directory: Path, version: int) -> None:
        """For the student."""
        self._student.load_weights(directory, version)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Each to whom it belongs; as for any engine, none is taken if one is refused."""
        theirs = [request for request in requests if self._taken(request)]
        self._teacher.submit([replace(request, min_version=0, exact_version=None) for request in theirs])
        try:
            self._student.submit([request for request in requests if request not in theirs])
        except AsyncOPDError:
            self._teacher.abandon([request.uid for request in theirs])
            raise

    def step(self) -> list[Rollout]:
        """One token for every answer of either."""
        return [*self._student.step(), *(_unversioned(rollout) for rollout in self._teacher.step())]

    def abandon(self, uids: Sequence[str]) -> None:
        """Forget requests whose lease was lost."""
        self._student.abandon(uids)
        self._teacher.abandon(uids)

    def restart(self, keep_tokens: bool) -> None:
        """For the student: the teacher's weights never change."""
        self._student.restart(keep_tokens)

    def logprobs(self, ids: Sequence[int]) -> Tensor | None:
        """The student's."""
        return self._student.logprobs(ids)

    def _taken(self, request: RolloutRequest) -> bool:
        version = request.min_version if request.exact_version is None else request.exact_version
        return self._fraction.takes(request.uid, version, self._run_seed)


def _unversioned(rollout: Rollout) -> Rollout:
    """The teacher's answer as one that no student sampled."""
    return replace(
        rollout,
        versions_T=torch.full_like(rollout.versions_T, NO_VERSION),
        log_b_T=torch.full_like(rollout.log_b_T, torch.nan),
        candidates=None,
    )
