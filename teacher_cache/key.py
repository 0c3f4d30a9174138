"""The content address of a score: everything that it depends on, and nothing else."""

from hashlib import blake2b

import torch
from torch import Tensor

from teacher_cache.designs import ThinningDesign, parse_design
from teacher_cache.record import CandidateSet
from teacher_cache.scorer import ScoreRequest

DETERMINISTIC = frozenset({"full", "top_k", "top_k_tail"})
"""Designs that draw nothing: their candidates do not depend on a seed."""


def record_key(fingerprint: str, request: ScoreRequest, precision: str = "fp32") -> bytes:
    """16 bytes that name the score of ``request`` by the teacher with ``fingerprint``, stored at ``precision``.

    The sample's uid and the run's seed are part of it only where candidates are drawn or thinned with them: the same
    answer in another run, with the same candidates, is the same score. Weights are not part of it unless a second
    phase uses them; they come back from the request.
    """
    digest = blake2b(digest_size=16)

    def add(name: str, value: bytes) -> None:
        digest.update(f"{name}:{len(value)}:".encode())
        digest.update(value)

    add("teacher", fingerprint.encode())
    add("precision", precision.encode())
    add("prompt", _bytes(torch.tensor(request.prompt_ids, dtype=torch.int32)))
    add("response", _bytes(request.response_ids_T.to(torch.int32)))
    seed = f"{request.run_seed}|{request.uid}".encode()
    given = request.candidates
    if given is not None:
        add("origin", given.origin.encode())
        add("shape", repr(tuple(given.ids_TC.shape)).encode())
        add("ids", _bytes(given.ids_TC.to(torch.int32)))
        if thins(given):
            add("design", given.design.encode())
            add("log_w", _bytes(given.log_w_TC.float()))
            add("log_g", b"" if given.log_g_TC is None else _bytes(given.log_g_TC.float()))
            add("thin seed", seed)
    if request.draw is not None:
        design = parse_design(request.draw)
        add("draw", design.spec.encode())
        add("draw seed", b"" if design.spec.partition("(")[0] in DETERMINISTIC else seed)
    return digest.digest()


def thins(given: CandidateSet) -> bool:
    """Whether the scorer will keep only some of these candidates."""
    return given.log_g_TC is not None and isinstance(parse_design(given.design), ThinningDesign)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().numpy().tobytes()
