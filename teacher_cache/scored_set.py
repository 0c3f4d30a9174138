"""A data set of finished answers that was scored once: what ``teacher-cache score`` leaves, to be trained on.

answers.jsonl   uid, prompt_ids and response_ids of every answer that was scored, in the order of the data
scored.json     which teacher scored them, how it drew, at which precision the scores are stored
shards, index   the scores: the folder is a store as well
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch

from teacher_cache.codec import unpack_record
from teacher_cache.errors import StoreError
from teacher_cache.identity import TeacherIdentity
from teacher_cache.key import record_key
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.store import RecordStore

ANSWERS_FILE = "answers.jsonl"
FACTS_FILE = "scored.json"
_LAYOUT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredFacts:
    """How a data set was scored.

    teacher     which one
    model       its path, for a reader
    draw        spec of the design that it drew its candidates with, or None
    seed        of the draws
    precision   of the stored scores
    """

    teacher: TeacherIdentity
    model: str
    draw: str | None
    seed: int
    precision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Where an answer stands in the file, and how long it is in tokens."""

    offset: int
    prompt: int
    response: int


class ScoredWriter:
    """Writes down which answers were scored; ``finish`` makes it a data set, and until then an older one stays."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._partial = folder / f"{ANSWERS_FILE}.partial"
        self._file = self._partial.open("w", encoding="utf-8")

    def add(self, requests: Iterable[ScoreRequest]) -> None:
        """Further answers that were scored."""
        for request in requests:
            row = {
                "uid": request.uid,
                "prompt_ids": list(request.prompt_ids),
                "response_ids": request.response_ids_T.tolist(),
            }
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def finish(self, facts: ScoredFacts) -> None:
        """The data set is whole."""
        self._file.close()
        told = {
            "layout": _LAYOUT,
            "teacher": facts.teacher.as_dict(),
            "model": facts.model,
            "draw": facts.draw,
            "seed": facts.seed,
            "precision": facts.precision,
        }
        partial = self._folder / f"{FACTS_FILE}.partial"
        partial.write_text(json.dumps(told, indent=1), encoding="utf-8")
        # Between the two renames the facts are missing, never those of other answers.
        (self._folder / FACTS_FILE).unlink(missing_ok=True)
        self._partial.replace(self._folder / ANSWERS_FILE)
        partial.replace(self._folder / FACTS_FILE)


class ScoredSet:
    """The answers of a folder and their records.

    StoreError where the folder holds no such data set.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            told = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
            if told["layout"] != _LAYOUT:
                raise StoreError(f"{folder / FACTS_FILE} has layout {told['layout']!r}; expected {_LAYOUT}")
            self.facts = ScoredFacts(
                teacher=TeacherIdentity.from_dict(told["teacher"]),
                model=told["model"],
                draw=told["draw"],
                seed=told["seed"],
                precision=told["precision"],
            )
            self.answers = tuple(_answers(folder / ANSWERS_FILE))
        except FileNotFoundError as error:
            raise StoreError(
                f"{str(folder)!r} holds no scored data set (no {Path(error.filename).name}); "
                "make one with `teacher-cache score --out`"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{str(folder)!r} holds no scored data set of this version: {error!r}") from error
        self._store = RecordStore(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def read(self, places: Sequence[int]) -> list[tuple[ScoreRequest, TeacherRecord]]:
        """Some answers with their records, in the order asked for; StoreError where a score is gone or damaged."""
        facts = self.facts
        with (self._folder / ANSWERS_FILE).open("rb") as file:
            requests = [self._request(_row(file, self.answers[place].offset)) for place in places]
        keys = [record_key(facts.teacher.fingerprint, request, facts.precision) for request in requests]
        packed = self._store.get(keys)
        missing = sum(key not in packed for key in keys)
        if missing:
            raise StoreError(
                f"{missing} of {len(keys)} scores are no longer in {str(self._folder)!r}, evicted or damaged; run the "
                "same `teacher-cache score` again, which scores only what is missing"
            )
        return [
            (request, unpack_record(packed[key], request, temperature=facts.teacher.temperature, teacher="default"))
            for key, request in zip(keys, requests, strict=True)
        ]

    def _request(self, row: dict[str, Any]) -> ScoreRequest:
        return ScoreRequest(
            uid=row["uid"],
            prompt_ids=tuple(row["prompt_ids"]),
            response_ids_T=torch.tensor(row["response_ids"], dtype=torch.int32),
            draw=self.facts.draw,
            run_seed=self.facts.seed,
        )


def _answers(path: Path) -> Iterator[Answer]:
    offset = 0
    with path.open("rb") as file:
        for line in file:
            row = json.loads(line)
            yield Answer(offset=offset, prompt=len(row["prompt_ids"]), response=len(row["response_ids"]))
            offset += len(line)


def _row(file: BinaryIO, offset: int) -> dict[str, Any]:
    file.seek(offset)
    return json.loads(file.readline())
