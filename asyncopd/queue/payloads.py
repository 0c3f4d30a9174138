"""What the samples of the queue carry: a rollout and a teacher record, each a safetensors file inside a pack.

Shape suffixes: T response positions, C candidates a position, V vocabulary.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from asyncopd.queue.files import PayloadError, delete_payloads, read_checked, write_packs
from asyncopd.queue.rows import PayloadRef
from asyncopd.types import Rollout
from teacher_cache.record import CandidateSet, TeacherRecord

__all__ = [
    "PayloadError",
    "PayloadRef",
    "delete_payloads",
    "read_record",
    "read_rollout",
    "write_records",
    "write_rollouts",
]


def write_rollouts(run_dir: Path, rollouts: Iterable[Rollout]) -> Iterator[dict[str, PayloadRef]]:
    """Write answers, as ``write_packs`` does; PayloadError if they cannot be written."""
    return write_packs(run_dir, "rollouts", ((rollout.uid, _rollout_bytes(rollout)) for rollout in rollouts))


def _rollout_bytes(rollout: Rollout) -> bytes:
    tensors = {
        "response_ids_T": rollout.response_ids_T.to(torch.int32),
        "versions_T": rollout.versions_T.to(torch.int32),
        "log_b_T": rollout.log_b_T.to(torch.float32),
    }
    told = {
        "uid": rollout.uid,
        "prompt_ids": list(rollout.prompt_ids),
        "finish": rollout.finish,
        "candidates": None if rollout.candidates is None else _flattened(rollout.candidates, "candidates", tensors),
    }
    return _bytes(tensors, told)


def read_rollout(run_dir: Path, ref: PayloadRef, uid: str) -> Rollout:
    """The answer that ``write_rollouts`` wrote. PayloadError if it is missing, damaged or another sample's."""
    tensors, told = _read(run_dir, ref, uid)
    candidates = told["candidates"]
    return Rollout(
        uid=uid,
        prompt_ids=tuple(told["prompt_ids"]),
        response_ids_T=tensors["response_ids_T"],
        versions_T=tensors["versions_T"],
        log_b_T=tensors["log_b_T"],
        finish=told["finish"],
        candidates=None if candidates is None else _restored(candidates, "candidates", tensors),
    )


def write_records(run_dir: Path, records: Mapping[str, TeacherRecord]) -> Iterator[dict[str, PayloadRef]]:
    """Write the teacher's records of samples, by uid, as ``write_packs`` does."""
    return write_packs(run_dir, "records", ((uid, _record_bytes(uid, record)) for uid, record in records.items()))


def _record_bytes(uid: str, record: TeacherRecord) -> bytes:
    tensors = {"log_q_T": record.log_q_T.to(torch.float32), "entropy_T": record.entropy_T.to(torch.float32)}
    sets = [_flattened(candidates, f"set{place}", tensors) for place, candidates in enumerate(record.sets)]
    told = {"uid": uid, "temperature": record.temperature, "teacher": record.teacher, "sets": sets}
    return _bytes(tensors, told)


def read_record(run_dir: Path, ref: PayloadRef, uid: str) -> TeacherRecord:
    """The record that ``write_records`` wrote. PayloadError if it is missing, damaged or another sample's."""
    tensors, told = _read(run_dir, ref, uid)
    return TeacherRecord(
        temperature=told["temperature"],
        teacher=told["teacher"],
        log_q_T=tensors["log_q_T"],
        entropy_T=tensors["entropy_T"],
        sets=tuple(_restored(packed, f"set{place}", tensors) for place, packed in enumerate(told["sets"])),
    )


def _flattened(candidates: CandidateSet, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Add a candidate set's tensors under ``name``; what is left to tell about it."""
    length, width = candidates.ids_TC.shape
    ids_TC, log_w_TC = candidates.ids_TC, candidates.log_w_TC
    stored = {"ids_TC": ids_TC.to(torch.int32), "log_w_TC": log_w_TC.to(torch.float32)}
    if candidates.design == "full" and length > 0:
        # The same at every position: the ids are the vocabulary, the weights one row (padded tokens weigh nothing).
        if bool((ids_TC == torch.arange(width, dtype=ids_TC.dtype)).all()):
            del stored["ids_TC"]
        if bool((log_w_TC == log_w_TC[:1]).all()):
            stored["log_w_TC"] = log_w_TC[:1].to(torch.float32)
    if candidates.log_q_TC is not None:
        stored["log_q_TC"] = candidates.log_q_TC.to(torch.float32)
    if candidates.log_g_TC is not None:
        stored["log_g_TC"] = candidates.log_g_TC.to(torch.float32)
    tensors.update({f"{name}.{part}": tensor for part, tensor in stored.items()})
    return {
        "origin": candidates.origin,
        "design": candidates.design,
        "temperature": candidates.temperature,
        "version": candidates.version,
        "shape": [length, width],
        "parts": sorted(stored),
    }


def _restored(packed: dict[str, Any], name: str, tensors: dict[str, Tensor]) -> CandidateSet:
    parts = {part: tensors[f"{name}.{part}"] for part in packed["parts"]}
    length, width = packed["shape"]
    if "ids_TC" not in parts:
        parts["ids_TC"] = torch.arange(width, dtype=torch.int32).expand(length, width)
    return CandidateSet(
        origin=packed["origin"],
        design=packed["design"],
        temperature=packed["temperature"],
        version=packed["version"],
        ids_TC=parts["ids_TC"],
        log_w_TC=parts["log_w_TC"].expand(length, width),
        log_q_TC=parts.get("log_q_TC"),
        log_g_TC=parts.get("log_g_TC"),
    )


def _bytes(tensors: dict[str, Tensor], told: dict[str, Any]) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"told": json.dumps(told)})


def _read(run_dir: Path, ref: PayloadRef, uid: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    data = read_checked(run_dir, ref)
    # The layout of safetensors: the length of a JSON header as 8 bytes, little-endian, then the header.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    told = json.loads(header["__metadata__"]["told"])
    if told["uid"] != uid:
        raise PayloadError(f"{run_dir / ref.path} belongs to sample {told['uid']}; expected {uid}")
    return load(data), told
