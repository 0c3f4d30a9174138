"""The small worlds that a loss is enumerated on.

Shape suffixes: T positions, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class State:
    """Logits of student, teacher and behaviour policy at two positions of one sequence, float64 [2, V]."""

    student_TV: Tensor
    teacher_TV: Tensor
    behaviour_TV: Tensor


def random_state(vocabulary: int, *, stale: bool, seed: int = 0) -> State:
    """Peaked distributions, about a nat apart; a stale behaviour policy is half a nat from the student."""
    generator = torch.Generator().manual_seed(1000 * vocabulary + seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(2, vocabulary, generator=generator, dtype=torch.float64)

    student_TV, teacher_TV, drift_TV = normal(1.2), normal(1.0), normal(0.5)
    return State(
        student_TV=student_TV, teacher_TV=teacher_TV, behaviour_TV=student_TV + drift_TV if stale else student_TV
    )


def same_model(vocabulary: int) -> State:
    """Student, teacher and behaviour policy are one model."""
    state = random_state(vocabulary, stale=False)
    return State(student_TV=state.student_TV, teacher_TV=state.student_TV, behaviour_TV=state.student_TV)


def disjoint(vocabulary: int) -> State:
    """Student and teacher have their mass on different tokens, 8 nats apart; the behaviour policy is the student."""
    half_V = torch.where(torch.arange(vocabulary) < vocabulary // 2, 4.0, -4.0).double()
    state = random_state(vocabulary, stale=False)
    student_TV = half_V + 0.3 * state.student_TV
    return State(student_TV=student_TV, teacher_TV=-half_V + 0.3 * state.teacher_TV, behaviour_TV=student_TV)


def near(vocabulary: int) -> State:
    """Student and teacher a few hundredths of a nat apart, where rounding shows."""
    state = random_state(vocabulary, stale=False)
    return State(
        student_TV=state.student_TV, teacher_TV=state.student_TV + 0.1 * state.teacher_TV, behaviour_TV=state.student_TV
    )
