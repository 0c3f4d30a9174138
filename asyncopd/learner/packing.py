"""Whether sequences may follow each other in one row: proved on the student itself before the first step.

Shape suffixes: T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asyncopd.errors import ConfigError
from asyncopd.learner.batching import MicroBatch, collate
from asyncopd.types import NO_VERSION, Rollout, ScoredRollout
from teacher_cache.record import TeacherRecord

PACKINGS = ("auto", "on", "off")
VARIABLE_LENGTH = ("flash_attention", "flex_attention")
"""Attention whose cost is that of the sequences, not that of the square of the row: it pays to pack."""
LEAK = 0.25
"""Of the difference that no isolation at all makes: a student that differs by less keeps its sequences apart."""


def packs(
    packing: str, attention: str, vocabulary: int, device: torch.device, logprobs: Callable[[MicroBatch], Tensor]
) -> bool:
    """Whether to pack; ``attention`` names the student's implementation, ``logprobs`` is the student.

    ``auto`` packs where the cost of attention follows the sequences and the student keeps them apart: with torch's own
    attention a row of many sequences is a square mask, which costs more than padding does. ConfigError where packing is
    asked for and the student mixes sequences up.
    """
    if packing == "off" or (packing == "auto" and not attention.startswith(VARIABLE_LENGTH)):
        return False
    if _isolates(vocabulary, device, logprobs):
        return True
    if packing == "on":
        raise ConfigError(
            f"learner.packing is on, but with attention {attention!r} the student lets sequences of one row see each "
            "other: set it to off, or use an attention that reads position_ids"
        )
    return False


def _isolates(vocabulary: int, device: torch.device, logprobs: Callable[[MicroBatch], Tensor]) -> bool:
    """Compare two sequences in one row with the same two padded, and with a row that nothing keeps apart."""
    generator = torch.Generator().manual_seed(0)
    samples = [_sample(torch.randint(vocabulary, (length,), generator=generator).tolist()) for length in (24, 17)]

    def micro(packed: bool) -> MicroBatch:
        return collate(samples, version=0, origins=(), pad_id=0, device=device, packed=packed)

    together = micro(packed=True)
    mixed = replace(together, position_ids_NL=torch.arange(together.input_ids_NL.shape[1], device=device)[None])
    apart_T, packed_T, mixed_T = (logprobs(each)[:, 0].float() for each in (micro(packed=False), together, mixed))
    return bool((packed_T - apart_T).abs().mean() < LEAK * (mixed_T - apart_T).abs().mean())


def _sample(ids: Sequence[int]) -> ScoredRollout:
    """A sequence of which every token but the first is a response token."""
    response, zero_T = torch.tensor(ids[1:], dtype=torch.int32), torch.zeros(len(ids) - 1)
    rollout = Rollout(
        uid="packing",
        prompt_ids=tuple(ids[:1]),
        response_ids_T=response,
        versions_T=torch.full_like(response, NO_VERSION),
        log_b_T=zero_T,
        finish="length",
        candidates=None,
    )
    record = TeacherRecord(temperature=1.0, teacher="packing", log_q_T=zero_T, entropy_T=zero_T, sets=())
    return ScoredRollout(rollout=rollout, record=record)
