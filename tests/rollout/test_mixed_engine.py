"""Teacher-written answers: which ones, what they carry, and that no staleness is counted of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyncopd import pipeline
from asyncopd.errors import ConfigError, RolloutError
from asyncopd.evaluation import EvaluationConfig
from asyncopd.objectives import ObjectiveConfig, build_objective
from asyncopd.pipeline import run
from asyncopd.queue.ledger import Ledger
from asyncopd.rollout.mixed_engine import MixedEngine, TeacherFraction, check_fraction
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.tracking.metrics import read_metrics
from asyncopd.types import NO_VERSION, Rollout, RolloutRequest
from tests.conftest import EOS, VOCABULARY, make_tiny_llama, save_checkpoint
from tests.queue.driver import Driver
from tests.tiny_run import ThreadedWorkers, tiny_config


@pytest.mark.parametrize(
    ("text", "shares"),
    [("0", [0, 0, 0]), ("0.25", [0.25, 0.25, 0.25]), ("0.5->0 over 100", [0.5, 0.25, 0]), ("0->1 over 50", [0, 1, 1])],
)
def test_a_share_is_constant_or_goes_linearly_from_one_to_the_other(text: str, shares: list[float]) -> None:
    fraction = TeacherFraction.parse(text)
    assert [fraction.at(version) for version in (0, 50, 100)] == shares


@pytest.mark.parametrize("text", ["", "half", "1.5", "-0.1", "0.5->2 over 10", "0.5->0", "1.2.3"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="teacher_fraction is"):
        TeacherFraction.parse(text)


def test_which_samples_the_teacher_writes_follows_from_seed_uid_and_version_and_more_means_the_same_ones_too() -> None:
    uids = [f"0-{number}-0-0" for number in range(4000)]
    half, few = TeacherFraction.parse("0.5"), TeacherFraction.parse("0.1")
    taken = {uid for uid in uids if half.takes(uid, 3, seed=1)}
    assert taken == {uid for uid in uids if half.takes(uid, 9, seed=1)}
    assert {uid for uid in uids if few.takes(uid, 3, seed=1)} < taken
    assert 0.46 < len(taken) / len(uids) < 0.54
    assert taken != {uid for uid in uids if half.takes(uid, 3, seed=2)}


def _engine(seed: int, version: int) -> TransformersEngine:
    return TransformersEngine(
        make_tiny_llama(seed), vocabulary=VOCABULARY, eos_token_ids=(EOS,), sampling=SamplingConfig(max_new_tokens=6),
        run_seed=3, version=version,
    )  # fmt: skip


def _answers(engine: TransformersEngine | MixedEngine, requests: list[RolloutRequest]) -> dict[str, Rollout]:
    engine.submit(requests)
    done: dict[str, Rollout] = {}
    while engine.in_flight:
        done |= {rollout.uid: rollout for rollout in engine.step()}
    return done


def test_each_answer_is_its_writers_and_only_the_students_carry_versions() -> None:
    fraction = TeacherFraction.parse("0.5")
    requests = [RolloutRequest(uid=f"0-{n}-0-0", prompt_ids=(5, 6, 7 + n), min_version=4) for n in range(12)]
    mixed = _answers(MixedEngine(_engine(1, 4), _engine(0, 0), fraction, run_seed=3), requests)
    by_teacher = _answers(_engine(0, 4), requests)
    by_student = _answers(_engine(1, 4), requests)
    written = {request.uid for request in requests if fraction.takes(request.uid, 4, 3)}
    assert 0 < len(written) < 12
    for uid, answer in mixed.items():
        writer = by_teacher if uid in written else by_student
        assert answer.response_ids_T.tolist() == writer[uid].response_ids_T.tolist()
        assert set(answer.versions_T.tolist()) == {NO_VERSION if uid in written else 4}
        assert answer.log_b_T.isnan().all() == (uid in written)


def test_none_is_taken_where_the_student_refuses_one() -> None:
    engine = MixedEngine(_engine(1, 4), _engine(0, 0), TeacherFraction.parse("0.5"), run_seed=3)
    requests = [RolloutRequest(uid=f"0-{n}-0-0", prompt_ids=(5,), min_version=5) for n in range(12)]
    with pytest.raises(RolloutError):
        engine.submit(requests)
    assert engine.in_flight == 0


def test_an_objective_that_reads_what_the_student_drew_is_refused_with_the_remedy() -> None:
    half = TeacherFraction.parse("0.5")
    for config in (ObjectiveConfig(name="reverse_kl", design="systematic(8)"), ObjectiveConfig(name="pg_cached")):
        with pytest.raises(ConfigError, match="teacher-drawn"):
            check_fraction(half, build_objective(config), teachers=1, loadable=True)
        check_fraction(TeacherFraction.parse("0"), build_objective(config), teachers=1, loadable=True)
    drawn = build_objective(ObjectiveConfig(name="forward_kl", design="systematic(8)"))
    check_fraction(half, drawn, teachers=1, loadable=True)
    for place in ({"teachers": 2, "loadable": True}, {"teachers": 1, "loadable": False}):
        with pytest.raises(ConfigError, match=r"teacher\.model"):
            check_fraction(half, drawn, **place)


@pytest.mark.parametrize("mode", ["async", "lagged:1"])
def test_a_run_trains_on_both_and_counts_no_age_of_what_the_teacher_wrote(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    teacher = save_checkpoint(make_tiny_llama(0), tmp_path / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    config = tiny_config(
        tmp_path, teacher, student, mode=mode, evaluation=EvaluationConfig(prompts=0),
        objective=ObjectiveConfig(name="forward_kl", design="systematic(8)"),
    )  # fmt: skip
    result = run(replace(config, rollout=replace(config.rollout, teacher_fraction="1->0 over 4")))
    rows = [row.values for row in read_metrics(result.path) if "loss" in row.values]
    shares = [row["teacher_written"] for row in rows]
    assert shares[0] == 1
    assert "staleness/mean" not in rows[0]
    assert shares[-1] < 1
    for row in rows:
        counted = sum(count for name, count in row.items() if name.startswith("staleness/training/"))
        assert counted == 8 * (1 - row["teacher_written"])
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        assert ledger.counts().trained == 48
    assert json.loads((result.path / "summary.json").read_text())["samples"]["trained"] == 48


def test_a_sample_of_no_version_never_grows_old_and_survives_a_resume(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_staleness=1, selection="oldest_ready")
    lease = driver.ledger.lease_rollouts("roller", 8, 60.0)
    assert lease is not None
    for sample in lease.samples:
        payload = driver.payload(sample.uid)
        driver.ledger.put_rollout(lease.token, sample.uid, payload, 7, None, None, "eos")
    driver.score()
    resumed = driver.ledger.resume(0, None)
    assert (resumed.kept, resumed.repeated) == (8, 0)
    for version in (1, 2):
        batch = driver.ledger.lease_batch()
        assert batch is not None
        assert [sample.oldest_version for sample in batch.samples] == [None] * 4
        driver.ledger.commit_step(batch, version, published=False)
    assert driver.ledger.counts().trained == 8
    assert driver.ledger.verify() == []
