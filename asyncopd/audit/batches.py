"""The batches that enumeration is made of: what can be drawn at each position, laid out as sequences.

Shape suffixes: T positions, V vocabulary, N outcomes of a position, C candidates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncopd.audit.enumeration import Outcomes, outcomes
from asyncopd.audit.states import State
from asyncopd.audit.subject import AuditBatch, Drawn, Subject, logprobs
from teacher_cache.designs import parse_design
from teacher_cache.record import Origin


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Space:
    """Everything that can be drawn at one position.

    A loss that reads one set has one group of rows, an outcome each. One that reads a set of each origin is a sum of
    functions of one set each, so there is a group for each origin: that set varies, the others stay at their first
    outcome. Row 0 has every set at its first outcome.

    sets        outcomes of each origin, [rows]
    token_N     the rollout's own token in each row
    groups      probabilities of the rows of each group, in order
    """

    sets: Mapping[Origin, Outcomes]
    token_N: Tensor
    groups: tuple[Tensor, ...]

    def mean(self, value_N: Tensor) -> Tensor:
        """Expected value of a number (or a vector) given for every row."""
        parts = [torch.tensordot(chance, part, 1) for chance, part in self._split(value_N)]
        return torch.stack(parts).sum(0) - (len(parts) - 1) * value_N[0]

    def variance(self, value_NV: Tensor) -> float:
        """Expected squared distance of a vector from its mean, the sets being drawn independently."""
        total = 0.0
        for chance, part in self._split(value_NV):
            total += float(torch.tensordot(chance, (part - torch.tensordot(chance, part, 1)).square().sum(-1), 1))
        return total

    def _split(self, value_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = value_N.split([len(chance) for chance in self.groups])
        return list(zip(self.groups, parts, strict=True))


def spaces(subject: Subject, state: State) -> list[Space]:
    """The space of each position."""
    vocabulary, design = state.student_TV.shape[1], parse_design(subject.design)
    log_q_TV, log_b_TV = logprobs(state.teacher_TV, vocabulary), logprobs(state.behaviour_TV, vocabulary)
    found = []
    for log_q_V, log_b_V in zip(log_q_TV, log_b_TV, strict=True):
        drawn = {
            origin: outcomes(design, log_b_V if origin == "student" else log_q_V, log_q_V, student=origin == "student")
            for origin in subject.origins
        }
        groups = tuple(outcome.chance_N for outcome in drawn.values())
        sets: dict[Origin, Outcomes] = {}
        for place, (origin, outcome) in enumerate(drawn.items()):
            rows = [torch.zeros(len(chance), dtype=torch.int64) for chance in groups]
            rows[place] = torch.arange(len(groups[place]))
            sets[origin] = outcome.take(torch.cat(rows))
        found.append(Space(sets=sets, token_N=next(iter(sets.values())).token_N, groups=groups))
    return found


def batch_of(state: State, drawn: list[Space], rows: list[Tensor]) -> AuditBatch:
    """Sequences of all positions, one for each entry of ``rows[t]``, the outcome that position t takes."""
    count, positions, vocabulary = len(rows[0]), len(drawn), state.student_TV.shape[1]
    teacher_TV = state.teacher_TV.repeat(count, 1)
    log_q_TV = logprobs(teacher_TV, vocabulary)

    def interleave(per_position: list[Tensor]) -> Tensor:
        picked = [value[row] for value, row in zip(per_position, rows, strict=True)]
        return torch.stack(picked, dim=1).flatten(0, 1)

    sets: dict[Origin, Drawn] = {}
    for origin in drawn[0].sets:
        ids_TC = interleave([space.sets[origin].ids_NC for space in drawn])
        log_w_TC = interleave([space.sets[origin].log_w_NC for space in drawn])
        sets[origin] = Drawn(ids_TC=ids_TC, log_w_TC=log_w_TC, log_q_TC=log_q_TV.gather(1, ids_TC))
    return AuditBatch(
        logits_TV=state.student_TV.repeat(count, 1).requires_grad_(),
        teacher_TV=teacher_TV,
        behaviour_TV=state.behaviour_TV.repeat(count, 1),
        vocabulary=vocabulary,
        token_T=interleave([space.token_N for space in drawn]),
        mask_T=torch.ones(count * positions, dtype=torch.bool),
        sequence_T=torch.arange(count).repeat_interleave(positions),
        sets=sets,
        step_tokens=count * positions,
    )
