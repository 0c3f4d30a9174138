"""What client and service send each other: bundles of packed requests, and of packed records or errors.

Shape suffixes: P prompt and T response tokens of one request, C candidates a position, B bytes an id.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from teacher_cache.bundle import PackedRecord, bundle, unbundle
from teacher_cache.codec import PRECISIONS, id_bytes, pack_ids, pack_record, unpack_ids, unpack_record
from teacher_cache.designs import ThinningDesign, parse_design
from teacher_cache.errors import CodecError, ScoringError
from teacher_cache.key import thins
from teacher_cache.record import CandidateSet, TeacherRecord
from teacher_cache.scorer import ScoreRequest

MEDIA_TYPE = "application/x-safetensors"
FINGERPRINT_HEADER = "X-Teacher-Fingerprint"
DIGEST_HEADER = "X-Body-Digest"
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, RuntimeError, OverflowError)


def body_digest(body: bytes) -> str:
    """What DIGEST_HEADER carries: TCP's own checksum is too weak for numbers that nobody looks at."""
    return blake2b(body, digest_size=16).hexdigest()


def encode_requests(requests: Sequence[ScoreRequest], *, vocabulary: int, precision: str) -> bytes:
    """A request body; ``precision`` is that of the scores in the answer."""
    return bundle([_pack_request(request, vocabulary) for request in requests], {"precision": precision})


def decode_requests(data: bytes, *, vocabulary: int) -> tuple[list[ScoreRequest], str]:
    """The requests of a body and the precision they ask for; CodecError for anything that is no such body."""
    body = unbundle(data)
    try:
        precision = body.told["precision"]
        if precision not in PRECISIONS:
            raise CodecError(f"precision {precision!r}; expected one of {list(PRECISIONS)}")
        return [_unpack_request(each, vocabulary) for each in body.records], precision
    except _MALFORMED as error:
        raise CodecError(f"the request cannot be read: {error}") from error


def encode_results(
    results: Sequence[TeacherRecord | ScoringError],
    requests: Sequence[ScoreRequest],
    *,
    vocabulary: int,
    precision: str,
) -> bytes:
    """An answer's body: one entry a request, in order."""
    packed = [
        PackedRecord(told={"error": str(result)}, tensors={})
        if isinstance(result, ScoringError)
        else pack_record(result, request, vocabulary=vocabulary, precision=precision)
        for result, request in zip(results, requests, strict=True)
    ]
    return bundle(packed, {})


def decode_results(
    data: bytes, requests: Sequence[ScoreRequest], *, temperature: float, teacher: str
) -> list[TeacherRecord | ScoringError]:
    """The results of an answer's body; CodecError if it is not whole or not the answer to these requests."""
    packed = unbundle(data).records
    if len(packed) != len(requests):
        raise CodecError(f"{len(packed)} results for {len(requests)} requests")
    return [
        ScoringError(str(each.told["error"]))
        if "error" in each.told
        else unpack_record(each, request, temperature=temperature, teacher=teacher)
        for each, request in zip(packed, requests, strict=True)
    ]


def _pack_request(request: ScoreRequest, vocabulary: int) -> PackedRecord:
    ids = torch.cat([torch.tensor(request.prompt_ids, dtype=torch.int64), request.response_ids_T.long()])
    tensors = {"ids": pack_ids(ids, _width(ids, vocabulary))}
    told: dict[str, Any] = {
        "uid": request.uid,
        "seed": request.run_seed,
        "prompt": len(request.prompt_ids),
        "draw": request.draw,
        "given": None,
    }
    given = request.candidates
    if given is not None:
        length, width = given.ids_TC.shape
        told["given"] = {
            "origin": given.origin,
            "design": given.design,
            "temperature": given.temperature,
            "version": given.version,
            "width": width,
        }
        if not (length and width == vocabulary and bool((given.ids_TC == torch.arange(width)).all())):
            tensors["given"] = pack_ids(given.ids_TC, _width(given.ids_TC, vocabulary))
        if thins(given) and given.log_g_TC is not None:
            tensors |= {"log_w": given.log_w_TC.float(), "log_g": given.log_g_TC.float()}
    return PackedRecord(told=told, tensors=tensors)


def _unpack_request(packed: PackedRecord, vocabulary: int) -> ScoreRequest:
    told = packed.told
    ids = unpack_ids(packed.tensors["ids"])
    uid, seed, prompt, draw = told["uid"], told["seed"], told["prompt"], told["draw"]
    if ids.ndim != 1 or not isinstance(prompt, int) or not 0 <= prompt <= len(ids):
        raise CodecError(f"a prompt of {prompt!r} tokens among ids of shape {tuple(ids.shape)}")
    if not isinstance(uid, str) or not isinstance(seed, int):
        raise CodecError(f"uid {uid!r} and seed {seed!r}; expected a text and a whole number")
    given = None if told["given"] is None else _unpack_given(packed, told["given"], len(ids) - prompt, vocabulary)
    return ScoreRequest(
        uid=uid,
        prompt_ids=tuple(ids[:prompt].tolist()),
        response_ids_T=ids[prompt:],
        candidates=given,
        draw=None if draw is None else teacher_draw(draw, vocabulary),
        run_seed=seed,
    )


def _unpack_given(packed: PackedRecord, told: dict[str, Any], length: int, vocabulary: int) -> CandidateSet:
    design = parse_design(told["design"])
    if "given" in packed.tensors:
        ids_TC = unpack_ids(packed.tensors["given"])
    elif told["width"] == vocabulary:
        ids_TC = torch.arange(vocabulary, dtype=torch.int32).expand(length, vocabulary)
    else:
        raise CodecError("candidates without ids")
    if told["origin"] not in ("student", "teacher") or not isinstance(told["version"], int | None):
        raise CodecError(f"candidates of origin {told['origin']!r}, version {told['version']!r}")
    log_w_TC, log_g_TC = packed.tensors.get("log_w"), packed.tensors.get("log_g")
    if (log_w_TC is None) != (log_g_TC is None) or (log_g_TC is not None and not isinstance(design, ThinningDesign)):
        raise CodecError("weights and proposal logprobs come together, and only for a design with a second phase")
    return CandidateSet(
        origin=told["origin"],
        design=design.spec,
        temperature=float(told["temperature"]),
        version=told["version"],
        ids_TC=ids_TC,
        # Weights that no second phase reads stay with the client.
        log_w_TC=torch.zeros(1, 1).expand(ids_TC.shape) if log_w_TC is None else log_w_TC.float(),
        log_g_TC=None if log_g_TC is None else log_g_TC.float(),
    )


def teacher_draw(spec: str, vocabulary: int) -> str:
    """The spec of a design that a teacher can draw from; CodecError or DesignError for any other."""
    design = parse_design(spec)
    if isinstance(design, ThinningDesign):
        raise CodecError(f"{spec} keeps what a student drew; a teacher draws in one phase: take systematic(16)")
    if design.budget > vocabulary:
        raise CodecError(f"{spec} draws {design.budget} of {vocabulary} tokens; lower the budget or take full")
    return design.spec


def candidates_of(request: ScoreRequest, vocabulary: int) -> int:
    """How many candidates a position the record of a request will have."""
    given = 0 if request.candidates is None else request.candidates.ids_TC.shape[1]
    return given + (0 if request.draw is None else parse_design(request.draw).budget or vocabulary)


def _width(ids: Tensor, vocabulary: int) -> int:
    """Bytes an id: as the vocabulary needs, more for ids beyond it, which the teacher must see to refuse."""
    if ids.numel() == 0:
        return id_bytes(vocabulary)
    return 4 if int(ids.min()) < 0 else id_bytes(max(vocabulary, int(ids.max()) + 1))
