"""What is known about the positions of one response: candidate tokens, weights, teacher scores.

Shape suffixes: T response positions of one sample, C candidates a position, V vocabulary.
All logprobs are natural logs (nats), normalised over the full real vocabulary; never over the candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from teacher_cache.errors import RecordError

Origin = Literal["student", "teacher"]
"""Whose distribution proposed the candidates."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CandidateSet:
    """Candidate tokens of every response position, with the weights that make sparse sums unbiased.

    ``E[sum_i w_i 1{a_i = a}] = 1`` for every token ``a`` wherever the design is unbiased
    (OBJECTIVES, section 1), so ``sum_i w_i phi(log p(a_i), log q(a_i))`` estimates the dense sum.

    ids_TC      int32 token ids; duplicates keep their multiplicity
    log_w_TC    float32 log weights, computed in float64; -inf is a weight of zero
    log_q_TC    float32 teacher logprobs (nats) at ``ids_TC``; None until the teacher has scored;
                NaN where the teacher has no score, which masks the whole position
    log_g_TC    float32 proposal logprobs at ``ids_TC``; only carried to a scorer that thins the set
    design      the design's spec, for example ``systematic(16)``
    temperature the temperature at which proposal and teacher are taken
    version     policy version of the student that proposed; None when the teacher proposed
    """

    origin: Origin
    design: str
    temperature: float
    version: int | None
    ids_TC: Tensor
    log_w_TC: Tensor
    log_q_TC: Tensor | None = None
    log_g_TC: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.ids_TC.shape)
        if len(shape) != 2:
            raise RecordError(f"ids_TC has shape {shape}; expected [positions, candidates]")
        for name, tensor in (("log_w_TC", self.log_w_TC), ("log_q_TC", self.log_q_TC), ("log_g_TC", self.log_g_TC)):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise RecordError(f"{name} has shape {tuple(tensor.shape)}; expected that of ids_TC, {shape}")

    def scored(self, log_q_TC: Tensor) -> "CandidateSet":
        """The same candidates with the teacher's logprobs (nats) filled in."""
        return replace(self, log_q_TC=log_q_TC)


def joined(pieces: Sequence[CandidateSet]) -> CandidateSet:
    """Candidate sets of consecutive positions, at least one, as one set on the CPU."""
    scores = [piece.log_q_TC for piece in pieces if piece.log_q_TC is not None]
    proposals = [piece.log_g_TC for piece in pieces if piece.log_g_TC is not None]
    return replace(
        pieces[0],
        ids_TC=torch.cat([piece.ids_TC for piece in pieces]).cpu(),
        log_w_TC=torch.cat([piece.log_w_TC for piece in pieces]).cpu(),
        log_q_TC=torch.cat(scores).cpu() if scores else None,
        log_g_TC=torch.cat(proposals).cpu() if proposals else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherRecord:
    """All that the teacher said about one response.

    log_q_T     float32 [T], teacher logprob (nats) of the response's own tokens at ``temperature``
    entropy_T   float32 [T], teacher entropy (nats) at ``temperature``; NaN where the scorer cannot tell
    sets        one scored candidate set for each origin in use
    teacher     name of the teacher that scored
    """

    temperature: float
    teacher: str
    log_q_T: Tensor
    entropy_T: Tensor
    sets: tuple[CandidateSet, ...]

    def __post_init__(self) -> None:
        length = self.log_q_T.shape[0]
        if tuple(self.entropy_T.shape) != (length,):
            raise RecordError(f"entropy_T has shape {tuple(self.entropy_T.shape)}; expected [{length}]")
        for candidates in self.sets:
            if candidates.ids_TC.shape[0] != length:
                raise RecordError(
                    f"a {candidates.origin}-drawn set covers {candidates.ids_TC.shape[0]} positions; "
                    f"the response has {length}"
                )
            if candidates.log_q_TC is None:
                raise RecordError(f"the {candidates.origin}-drawn set has no teacher scores; score it first")
            if candidates.temperature != self.temperature:
                raise RecordError(
                    f"candidates at temperature {candidates.temperature}, teacher at {self.temperature}: "
                    "draw and score at one temperature"
                )

    def of_origin(self, origin: Origin) -> CandidateSet:
        """The candidate set that ``origin`` proposed; RecordError names the origins present if there is none."""
        for candidates in self.sets:
            if candidates.origin == origin:
                return candidates
        raise RecordError(f"no {origin}-drawn candidates in this record; it has {[s.origin for s in self.sets]}")
