"""The teacher stage on its own queue: how long a lease may take, and whose it is in the end."""

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from asyncopd import pipeline
from asyncopd.config import RunConfig
from asyncopd.errors import LedgerError
from asyncopd.pipeline import run
from asyncopd.queue.ledger import Ledger
from asyncopd.queue.payloads import read_record, read_rollout
from teacher_cache.errors import ScoringError
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.scripted_scorer import ScriptedScorer
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import ThreadedWorkers, tiny_config


def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> RunConfig:
    """A run without models beside the learner's, its workers threads of this process."""
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    student = save_checkpoint(make_tiny_llama(1, layers=2), folder / "student")
    config = tiny_config(folder, Path("none"), student, **changes)
    return replace(
        config,
        rollout=replace(config.rollout, engine="scripted"),
        teacher=replace(config.teacher, scorer="scripted", model=Path("none")),
    )


def test_a_lease_that_takes_longer_than_its_time_is_kept_by_the_progress_of_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[str] = []
    score = ScriptedScorer.score

    def slowly(self: ScriptedScorer, requests: Sequence[ScoreRequest]) -> list[TeacherRecord | ScoringError]:
        time.sleep(0.4)
        scored.extend(request.uid for request in requests)
        return score(self, requests)

    monkeypatch.setattr(ScriptedScorer, "score", slowly)
    config = scripted(tmp_path, monkeypatch, steps=1)
    # One answer a batch, four answers a group: 1.6 s under a lease of one.
    config = replace(config, teacher=replace(config.teacher, batch_tokens=1))
    result = run(replace(config, queue=replace(config.queue, lease_s=1.0)))
    assert len(scored) == len(set(scored)) == 8
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []


def test_the_queue_learns_how_far_student_and_teacher_differ_on_each_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = scripted(tmp_path, monkeypatch, steps=2)
    result = run(replace(config, queue=replace(config.queue, record=True)))
    with sqlite3.connect(result.path / "ledger.sqlite") as connection:
        told = dict(connection.execute("SELECT ordinal, disagreement FROM samples").fetchall())
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        samples = [sample for version in (1, 2) for sample in ledger.trained_batch(version).samples]
    assert len(samples) == len(told) == 16
    for sample in samples:
        rollout = read_rollout(result.path, sample.rollout, sample.uid)
        record = read_record(result.path, sample.record, sample.uid)
        expected = (rollout.log_b_T.double() - record.log_q_T.double()).mean().item()
        assert told[sample.ordinal] == pytest.approx(expected, abs=1e-5)
    assert len(set(told.values())) == 16


def test_a_teacher_that_refuses_everything_fails_the_run_and_its_reasons_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ScriptedScorer, requests: Sequence[ScoreRequest]) -> list[TeacherRecord | ScoringError]:
        return [ScoringError(f"{request.uid}: no") for request in requests]

    monkeypatch.setattr(ScriptedScorer, "score", refuse)
    config = scripted(tmp_path, monkeypatch, mode="async")
    with pytest.raises(LedgerError, match=r"samples were dropped \(\{'unscorable': \d+\}\) before one batch of 8"):
        run(config)
