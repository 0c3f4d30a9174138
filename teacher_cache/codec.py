"""Teacher records in few bytes, the same on the wire and on disk.

Shape suffixes: T response positions, C candidates a position, S = 2 + all sets' C score columns, B bytes an id.

A packed record is one tensor of scores, ``[own log q, entropy, log q of the candidates...]``, and of each candidate
set only what the request does not say already: nothing for candidates that the request gave, ids and weights for those
that the scorer drew or kept.
"""

from typing import Any

import torch
from torch import Tensor

from teacher_cache.bundle import PackedRecord
from teacher_cache.errors import CodecError, RecordError
from teacher_cache.record import CandidateSet, TeacherRecord
from teacher_cache.scorer import ScoreRequest

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Dtypes of stored logprobs and entropies; weights are float32 in each."""

RELATIVE_ERROR = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""A stored score differs from the teacher's by at most this times its size (nats), plus 2^-25 in fp16."""


def id_bytes(vocabulary: int) -> int:
    """Fewest whole bytes that hold every id below ``vocabulary``."""
    return max(1, ((vocabulary - 1).bit_length() + 7) // 8)


def pack_ids(ids: Tensor, width: int) -> Tensor:
    """Ids as uint8 [..., B], little-endian."""
    as_bytes = ids.to(torch.int32).contiguous().view(-1).view(torch.uint8).reshape(*ids.shape, 4)
    return as_bytes[..., :width].contiguous()


def unpack_ids(packed: Tensor) -> Tensor:
    """Int32 ids from uint8 [..., B]; CodecError for anything else."""
    if packed.dtype != torch.uint8 or packed.ndim < 2 or not 1 <= packed.shape[-1] <= 4:
        raise CodecError(f"packed ids are {packed.dtype} {tuple(packed.shape)}; expected uint8 [..., 1 to 4]")
    whole = torch.nn.functional.pad(packed, (0, 4 - packed.shape[-1]))
    return whole.reshape(-1).view(torch.int32).reshape(packed.shape[:-1])


def pack_record(
    record: TeacherRecord, request: ScoreRequest, *, vocabulary: int, precision: str = "fp32"
) -> PackedRecord:
    """The record of ``request``; scores beyond the range of ``precision`` keep float32."""
    columns = [record.log_q_T[:, None], record.entropy_T[:, None]]
    sets: list[dict[str, Any] | None] = []
    tensors: dict[str, Tensor] = {}
    for place, scored in enumerate(record.sets):
        if scored.log_q_TC is None:
            raise RecordError(f"the {scored.origin}-drawn set has no teacher scores; score it first")
        columns.append(scored.log_q_TC)
        if _is_given(scored, request.candidates):
            sets.append(None)
            continue
        told: dict[str, Any] = {"origin": scored.origin, "design": scored.design, "width": scored.ids_TC.shape[1]}
        if not _is_whole_vocabulary(scored.ids_TC):
            tensors[f"ids{place}"] = pack_ids(scored.ids_TC, id_bytes(vocabulary))
        rows = _distinct_rows(scored.log_w_TC.float())
        if rows.numel() == 1:
            told["log_w"] = rows.item()
        else:
            tensors[f"log_w{place}"] = rows
        sets.append(told)
    scores_TS = torch.cat([column.float() for column in columns], dim=1)
    stored_TS = scores_TS.to(PRECISIONS[precision])
    if bool((scores_TS.isfinite() & ~stored_TS.isfinite()).any()):
        stored_TS = scores_TS
    return PackedRecord(told={"sets": sets}, tensors={"scores": stored_TS.contiguous(), **tensors})


def unpack_record(packed: PackedRecord, request: ScoreRequest, *, temperature: float, teacher: str) -> TeacherRecord:
    """The record of ``request``; CodecError where the packed one does not fit it."""
    try:
        scores_TS = packed.tensors["scores"].float()
        length, columns = scores_TS.shape
        if length != len(request.response_ids_T):
            raise CodecError(f"scores of {length} positions; the response has {len(request.response_ids_T)}")
        sets, used = [], 2
        for place, told in enumerate(packed.told["sets"]):
            bare = _bare_set(packed, request, told, place, length, temperature)
            width = bare.ids_TC.shape[1]
            sets.append(bare.scored(scores_TS[:, used : used + width].contiguous()))
            used += width
        if used != columns:
            raise CodecError(f"{columns} score columns; the sets and the own token take {used}")
        return TeacherRecord(
            temperature=temperature,
            teacher=teacher,
            log_q_T=scores_TS[:, 0].contiguous(),
            entropy_T=scores_TS[:, 1].contiguous(),
            sets=tuple(sets),
        )
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CodecError(f"{request.uid}: no record of this request: {error}") from error


def _bare_set(
    packed: PackedRecord, request: ScoreRequest, told: Any, place: int, length: int, temperature: float
) -> CandidateSet:
    """A candidate set without its scores."""
    given = request.candidates
    if told is None:
        if given is None:
            raise CodecError("the record leaves its candidates to the request, which has none")
        return given
    width = told["width"]
    if f"ids{place}" in packed.tensors:
        ids_TC = unpack_ids(packed.tensors[f"ids{place}"])
    else:
        ids_TC = torch.arange(width, dtype=torch.int32).expand(length, width)
    rows = torch.tensor([[told["log_w"]]]) if "log_w" in told else packed.tensors[f"log_w{place}"]
    student = told["origin"] == "student"
    return CandidateSet(
        origin="student" if student else "teacher",
        design=told["design"],
        temperature=temperature,
        version=given.version if student and given is not None else None,
        ids_TC=ids_TC,
        log_w_TC=rows.float().expand(length, width),
    )


def _is_given(scored: CandidateSet, given: CandidateSet | None) -> bool:
    """Whether these are the very candidates of the request."""
    return (
        given is not None
        and scored.origin == given.origin
        and torch.equal(scored.ids_TC, given.ids_TC)
        and torch.equal(scored.log_w_TC, given.log_w_TC)
    )


def _is_whole_vocabulary(ids_TC: Tensor) -> bool:
    return bool((ids_TC == torch.arange(ids_TC.shape[1], dtype=ids_TC.dtype)).all())


def _distinct_rows(log_w_TC: Tensor) -> Tensor:
    """One number, or one row, where that is all there is; a view that ``expand`` undoes."""
    if log_w_TC.numel() and bool((log_w_TC == log_w_TC[:1, :1]).all()):
        return log_w_TC[:1, :1].contiguous()
    if len(log_w_TC) and bool((log_w_TC == log_w_TC[:1]).all()):
        return log_w_TC[:1].contiguous()
    return log_w_TC.contiguous()
