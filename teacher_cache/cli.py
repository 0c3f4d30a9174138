"""The ``teacher-cache`` command: thin, everything is a call into the library."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from teacher_cache.designs import parse_design
from teacher_cache.errors import TeacherCacheError
from teacher_cache.local_teacher import LocalTeacherConfig
from teacher_cache.scorer import Scorer
from teacher_cache.service import ServiceConfig, TeacherService
from teacher_cache.shards import shard_path, write_shard
from teacher_cache.store import RecordStore

T = TypeVar("T")
TOKEN_VARIABLE = "TEACHER_CACHE_TOKEN"


@dataclass(frozen=True, kw_only=True, slots=True)
class Serve:
    """Score over HTTP; Ctrl-C or SIGTERM finishes what was accepted. A token comes from TEACHER_CACHE_TOKEN."""

    teacher: OmitArgPrefixes[LocalTeacherConfig]
    service: OmitArgPrefixes[ServiceConfig]
    cache: Path | None = None
    """Store in which scores are kept, and looked up first."""
    cache_gb: float = 50.0
    """Size cap of the store in GB; 0: no cap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Score a data set of finished answers, once and ahead of training, into a folder that can be trained on."""

    teacher: OmitArgPrefixes[LocalTeacherConfig]
    data: Path
    """JSON lines with prompt_ids and response_ids, or prompt and response."""
    out: Path
    """The store; which answers were scored is written beside the scores."""
    draw: str | None = "systematic(16)"
    """Design of the candidates that the teacher draws."""
    seed: int = 0
    """Seed of the draws: the seed of the run that will use them."""
    precision: str = "fp32"
    """Stored scores: ``fp32``, ``fp16`` or ``bf16``."""
    group: int = 256
    """Answers scored at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Show a store in figures."""

    store: Annotated[Path, Positional]
    """The store's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Read every byte of a store; what is damaged goes to quarantine and is named. Exit status 1 if anything is."""

    store: Annotated[Path, Positional]
    """The store's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gc:
    """Evict the least recently used scores, take up shards that the index does not know, delete abandoned files."""

    store: Annotated[Path, Positional]
    """The store's folder."""
    max_gb: float | None = None
    """Evict down to this size; nothing evicts nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Write every record into files that another store takes up: copy them into its folder shards and run gc."""

    store: Annotated[Path, Positional]
    """The store's folder."""
    out: Path
    """Folder of the files; made if it is not there."""
    per_file: int = 1000
    """Records a file."""


def main(argv: Sequence[str] | None = None) -> int:
    """The ``teacher-cache`` command; its exit status."""
    commands: dict[str, tuple[type, Callable[..., int]]] = {
        "serve": (Serve, _serve),
        "score": (Score, _score),
        "stats": (Stats, _stats),
        "verify": (Verify, _verify),
        "gc": (Gc, _gc),
        "export": (Export, _export),
    }
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in commands:
        usage = [f"  {name:8}{(kind.__doc__ or '').splitlines()[0]}" for name, (kind, _) in commands.items()]
        asked_for_help = bool(words) and words[0] in ("-h", "--help")
        print("usage: teacher-cache COMMAND ...\n", *usage, sep="\n", file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    kind, command = commands[words[0]]
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        return command(tyro.cli(kind, args=words[1:], prog=f"teacher-cache {words[0]}"))
    except TeacherCacheError as error:
        print(f"teacher-cache: {error}", file=sys.stderr)
        return 1


def _serve(options: Serve) -> int:
    from teacher_cache.cached_scorer import CachedScorer

    identity = options.teacher.identity()
    scorer: Scorer = options.teacher.load(identity.tokenizer.vocabulary)
    loaded = scorer
    if options.cache is not None:
        store = RecordStore(options.cache, max_bytes=round(options.cache_gb * 10**9) or None)
        scorer = CachedScorer(lambda: loaded, store, identity=identity)
    token = os.environ.get(TOKEN_VARIABLE)
    TeacherService(scorer, identity, options.service, token=token, teacher=loaded).serve()
    return 0


def _score(options: Score) -> int:
    from transformers import AutoTokenizer

    from teacher_cache.answers import read_answers
    from teacher_cache.cached_scorer import CachedScorer
    from teacher_cache.errors import ScoringError
    from teacher_cache.scored_set import ScoredFacts, ScoredWriter

    identity = options.teacher.identity()
    tokenizer = AutoTokenizer.from_pretrained(options.teacher.model)
    requests = read_answers(options.data, tokenizer, draw=options.draw, run_seed=options.seed)
    with RecordStore(options.out) as store:
        scorer = CachedScorer(
            lambda: options.teacher.load(identity.tokenizer.vocabulary),
            store,
            identity=identity,
            precision=options.precision,
        )
        refused, written = 0, ScoredWriter(options.out)
        for group in _groups(requests, options.group):
            results = scorer.score(group)
            for result in results:
                if isinstance(result, ScoringError):
                    refused += 1
                    print(f"refused: {result}", file=sys.stderr)
            pairs = zip(group, results, strict=True)
            written.add(request for request, result in pairs if not isinstance(result, ScoringError))
        written.finish(
            ScoredFacts(
                teacher=identity,
                model=str(options.teacher.model),
                draw=parse_design(options.draw).spec if options.draw is not None else None,
                seed=options.seed,
                precision=options.precision,
            )
        )
    print(f"{scorer.counts.misses - refused} scored, {scorer.counts.hits} were there, {refused} refused: {options.out}")
    return 0


def _stats(options: Stats) -> int:
    with _existing(options.store) as store:
        print(json.dumps(asdict(store.stats())))
    return 0


def _verify(options: Verify) -> int:
    with _existing(options.store) as store:
        problems = store.verify()
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" if problems else "whole")
    return 1 if problems else 0


def _gc(options: Gc) -> int:
    with _existing(options.store) as store:
        swept = store.gc(None if options.max_gb is None else round(options.max_gb * 10**9))
    print(json.dumps(asdict(swept)))
    return 0


def _export(options: Export) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    with _existing(options.store) as store:
        for group in _groups(store.records(), options.per_file):
            print(shard_path(options.out, write_shard(options.out, dict(group))[0]))
    return 0


def _groups(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while group := list(islice(items, size)):
        yield group


def _existing(path: Path) -> RecordStore:
    """A store that is there: a mistyped path must not become an empty one."""
    if not (path / "shards").is_dir():
        raise TeacherCacheError(f"{str(path)!r} holds no store (no folder shards); give the folder of one")
    return RecordStore(path)


if __name__ == "__main__":
    sys.exit(main())
