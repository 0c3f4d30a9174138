"""The teacher stage on its own queue: how long a lease may take, and whose it is in the end."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from asyncopd import pipeline
from asyncopd.pipeline import run
from asyncopd.queue.ledger import Ledger
from teacher_cache.errors import ScoringError
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.scripted_scorer import ScriptedScorer
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import ThreadedWorkers, tiny_config


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
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    student = save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    config = tiny_config(tmp_path, Path("none"), student, steps=1)
    config = replace(
        config,
        rollout=replace(config.rollout, engine="scripted"),
        # One answer a batch, four answers a group: 1.6 s under a lease of one.
        teacher=replace(config.teacher, scorer="scripted", model=Path("none"), batch_tokens=1),
        queue=replace(config.queue, lease_s=1.0),
    )
    result = run(config)
    assert len(scored) == len(set(scored)) == 8
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
