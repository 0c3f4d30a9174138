"""The scorer of a run: the teacher in this process, or services, with the cache in front of either."""

from collections.abc import Callable
from pathlib import Path

import torch

from asyncopd.config import RunConfig
from asyncopd.run_folder import TokenIds
from asyncopd.scoring import TeacherConfig
from teacher_cache.cached_scorer import CachedScorer
from teacher_cache.identity import TeacherIdentity, identify_checkpoint
from teacher_cache.scorer import Scorer
from teacher_cache.scripted_scorer import ScriptedScorer
from teacher_cache.store import RecordStore
from teacher_cache.transformers_scorer import TransformersScorer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_GIGABYTE = 10**9


def build_scorer(config: RunConfig, ids: TokenIds) -> Scorer:
    """The scorer that the configuration names; with a warm cache no teacher is ever loaded."""
    teacher = config.teacher
    if teacher.cache is None:
        return SCORERS[teacher.scorer](config, ids)
    identity = identify_checkpoint(teacher.model, temperature=config.objective.temperature, dtype=_numerics(teacher))
    return _cached(teacher, teacher.cache, identity, lambda: SCORERS[teacher.scorer](config, ids))


def _cached(
    teacher: TeacherConfig, folder: Path, identity: TeacherIdentity, load: Callable[[], Scorer]
) -> CachedScorer:
    store = RecordStore(folder, max_bytes=round(teacher.cache_gb * _GIGABYTE) or None)
    return CachedScorer(load, store, identity=identity, precision=teacher.cache_precision)


def _numerics(teacher: TeacherConfig) -> str:
    """What changes the last bits of a score: the dtype, and on a GPU other kernels."""
    return f"{teacher.dtype}+{device().type}"


def device() -> torch.device:
    """The first GPU that the process sees, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _scripted(config: RunConfig, ids: TokenIds) -> Scorer:
    return ScriptedScorer(vocabulary=ids.vocabulary, temperature=config.objective.temperature)


def _transformers(config: RunConfig, ids: TokenIds) -> Scorer:
    return TransformersScorer(
        config.teacher.model,
        vocabulary=ids.vocabulary,
        temperature=config.objective.temperature,
        batch_tokens=config.teacher.batch_tokens,
        dtype=DTYPES[config.teacher.dtype],
        device=device(),
    )


SCORERS: dict[str, Callable[[RunConfig, TokenIds], Scorer]] = {
    "scripted": _scripted,
    "transformers": _transformers,
}
