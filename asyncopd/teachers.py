"""The scorer of a run: each teacher in this process or behind services, with the cache in front of either."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError
from asyncopd.evaluation import AskedTeacher
from asyncopd.objectives import build_objective
from asyncopd.run_folder import TokenIds
from asyncopd.scoring import DEFAULT
from asyncopd.stage import Stage
from teacher_cache.cached_scorer import CacheCounts, CachedScorer
from teacher_cache.causal_scorer import CausalModel, CausalScorer
from teacher_cache.client import ClientConfig, TeacherClient
from teacher_cache.errors import HandshakeError, ScoringError, ServiceError
from teacher_cache.identity import Expectation, TeacherIdentity, identify_tokenizer
from teacher_cache.local_teacher import LocalTeacherConfig
from teacher_cache.prompt_logprobs_scorer import PromptLogprobsScorer
from teacher_cache.routed_scorer import RoutedScorer
from teacher_cache.scorer import Scorer
from teacher_cache.scripted_scorer import ScriptedScorer
from teacher_cache.store import RecordStore

TOKEN_VARIABLE = "TEACHER_CACHE_TOKEN"
_GIGABYTE = 10**9
_HANDSHAKE_S = 60.0
"""Seconds that a service has to answer before a run starts."""


def build_scorer(config: RunConfig, ids: TokenIds, stage: Stage, counts: CacheCounts) -> Scorer:
    """The scorer that the configuration names; with a warm cache no teacher is ever loaded.

    stage    is told while a service is waited for, or a teacher loaded at the first miss, which is not a hang
    counts   where the cache counts, if there is one
    """
    teacher = config.teacher
    size = round(teacher.cache_gb * _GIGABYTE) or None
    cache = None if teacher.cache is None else (RecordStore(teacher.cache, max_bytes=size), counts)
    # What is loaded here comes first: a worker that has waited for a service counts as ready, and may not load long.
    here_first = sorted(teacher.sources.items(), key=lambda item: isinstance(item[1], tuple))
    teachers = {name: _build(config, ids, name, source, cache, stage) for name, source in here_first}
    return RoutedScorer(teachers) if len(teachers) > 1 else teachers[DEFAULT]


def compared_teacher(config: RunConfig, ids: TokenIds, scorer: Scorer, name: str) -> CausalModel | AskedTeacher:
    """A teacher as held-out figures need it: what ``scorer`` runs; where it asks services a copy of theirs in this
    process, or without its weights here the services themselves, past the cache.
    """
    if isinstance(scorer, RoutedScorer):
        scorer = scorer.teachers[name]
    if isinstance(scorer, CachedScorer):
        scorer = scorer.behind()
    if not isinstance(scorer, CausalScorer):
        folder = config.teacher.weights_of(name)
        if folder is None:
            return AskedTeacher(scorer=scorer)
        scorer = _local(config, folder).load(ids.vocabulary)
    return scorer.model


def shake_hands(config: RunConfig, urls: tuple[str, ...], name: str) -> int:
    """The context that a teacher behind services takes; ConfigError where none answers, or one is not as needed."""
    connect = _client if config.teacher.scorer != "openai" else _prompt_logprobs
    try:
        with connect(config, urls, name, _HANDSHAKE_S, _nothing) as client:
            return client.max_context
    except (HandshakeError, ServiceError) as error:
        raise ConfigError(f"teacher {name!r}: {error}") from error


def check_loadable(config: RunConfig) -> None:
    """ConfigError where a teacher that is loaded here cannot be run as the configuration says; loads nothing."""
    if config.teacher.scorer == "scripted":
        return
    rollout = {core for group in config.rollout.vllm.core_groups for core in group}
    shared = rollout & config.teacher.vllm.core_set
    if shared and (config.rollout.engine, config.teacher.scorer) == ("vllm", "vllm"):
        raise ConfigError(
            f"rollout.vllm.cores and teacher.vllm.cores both name {sorted(shared)}; two engines on one core wait for "
            "each other: give each its own"
        )
    for name, source in config.teacher.sources.items():
        if isinstance(source, Path):
            try:
                _local(config, source)
            except ScoringError as error:
                raise ConfigError(f"teacher {name!r}: {error}") from error


def device() -> torch.device:
    """The first GPU that the process sees, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _build(
    config: RunConfig,
    ids: TokenIds,
    name: str,
    source: Path | tuple[str, ...],
    cache: tuple[RecordStore, CacheCounts] | None,
    stage: Stage,
) -> Scorer:
    if isinstance(source, tuple) and config.teacher.scorer == "openai":
        return _prompt_logprobs(config, source, name, config.teacher.deadline_s, stage.beat)
    if isinstance(source, tuple):
        client = _client(config, source, name, config.teacher.deadline_s, stage.beat)
        return client if cache is None else _cached(config, name, cache, client.identity, lambda: client)
    if cache is None:
        return SCORERS[config.teacher.scorer](config, ids, name, source)

    def load() -> Scorer:
        with stage.loading():
            return SCORERS[config.teacher.scorer](config, ids, name, source)

    return _cached(config, name, cache, _local(config, source).identity(), load)


def _cached(
    config: RunConfig,
    name: str,
    cache: tuple[RecordStore, CacheCounts],
    identity: TeacherIdentity,
    load: Callable[[], Scorer],
) -> Scorer:
    store, counts = cache
    precision = config.teacher.cache_precision
    return CachedScorer(load, store, identity=identity, precision=precision, teacher=name, counts=counts)


def _scripted(config: RunConfig, ids: TokenIds, name: str, path: Path) -> Scorer:
    return ScriptedScorer(vocabulary=ids.vocabulary, temperature=config.objective.temperature, teacher=name)


def _loaded(config: RunConfig, ids: TokenIds, name: str, path: Path) -> Scorer:
    return _local(config, path).load(ids.vocabulary, name)


def _local(config: RunConfig, path: Path) -> LocalTeacherConfig:
    teacher = config.teacher
    return LocalTeacherConfig(
        model=path,
        # Where others run the teacher, what is loaded here is only for held-out figures.
        backend="vllm" if teacher.scorer == "vllm" else "transformers",
        temperature=config.objective.temperature,
        dtype=teacher.dtype,
        device=device().type,
        device_map=teacher.device_map or None,
        compile=teacher.compile,
        quantization=teacher.quantization,
        batch_tokens=teacher.batch_tokens,
        vllm=teacher.vllm,
    )


def _client(
    config: RunConfig, urls: tuple[str, ...], name: str, deadline_s: float, beat: Callable[[], None]
) -> TeacherClient:
    return TeacherClient(
        urls, expected=_expected(config)[1], config=_client_config(name, deadline_s), while_waiting=beat
    )


def _prompt_logprobs(
    config: RunConfig, urls: tuple[str, ...], name: str, deadline_s: float, beat: Callable[[], None]
) -> PromptLogprobsScorer:
    tokenizer, expected = _expected(config)
    return PromptLogprobsScorer(
        urls,
        expected=expected,
        tokenizer=tokenizer,
        config=_client_config(name, deadline_s),
        while_waiting=beat,
    )


def _expected(config: RunConfig) -> tuple[PreTrainedTokenizerBase, Expectation]:
    """The student's tokenizer, and what a teacher behind services must be."""
    draws = build_objective(config.objective).draws
    tokenizer = AutoTokenizer.from_pretrained(config.student)
    return tokenizer, Expectation(
        tokenizer=identify_tokenizer(tokenizer),
        temperature=config.objective.temperature,
        draw=draws["teacher"].spec if "teacher" in draws else None,
        designs=tuple(draw.spec for draw in draws.values()),
    )


def _client_config(name: str, deadline_s: float) -> ClientConfig:
    return ClientConfig(token=os.environ.get(TOKEN_VARIABLE), deadline_s=deadline_s, teacher=name)


def _nothing() -> None:
    """Nobody watches."""


SCORERS: dict[str, Callable[[RunConfig, TokenIds, str, Path], Scorer]] = {
    "scripted": _scripted,
    "transformers": _loaded,
    "vllm": _loaded,
}
