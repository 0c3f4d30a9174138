"""Rolling back to a checkpoint: nothing lost, nothing twice, nothing of the lost timeline kept."""

from pathlib import Path

import pytest

from asyncopd.errors import LedgerError, StaleLeaseError
from asyncopd.queue.ledger import Ledger, State
from tests.queue.driver import HOUR_S, Driver, uids_of


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def trained_uids(driver: Driver, version: int) -> set[int]:
    rows = driver.ledger._connection.execute("SELECT slot FROM samples WHERE state = 6 AND final_at <= ?", (version,))
    return {row[0] for row in rows}


@pytest.mark.parametrize("version", range(5))
def test_a_resume_trains_again_exactly_what_the_checkpoint_does_not_cover(driver: Driver, version: int) -> None:
    driver.run(4)
    before = trained_uids(driver, version)
    resumed = driver.ledger.resume(version, None)
    assert resumed.revived == (4 - version) * 4
    assert driver.ledger.policy_version == driver.ledger.published_version == version
    assert trained_uids(driver, 99) == before
    assert driver.ledger.verify() == []
    driver.run(6 - version)
    assert trained_uids(driver, 99) == set(range(24))
    assert driver.ledger.verify() == []


def test_answers_by_versions_of_the_lost_timeline_are_generated_again(driver: Driver) -> None:
    driver.run(3)
    driver.prepare()
    driver.ledger.resume(2, None)
    oldest = driver.ledger._connection.execute(
        "SELECT ordinal, newest_version FROM samples WHERE newest_version IS NOT NULL AND state < 6"
    ).fetchall()
    assert oldest
    assert all(newest <= 2 for _, newest in oldest)


def test_scored_answers_of_kept_versions_are_neither_generated_nor_scored_again(driver: Driver) -> None:
    driver.prepare()
    driver.train()
    resumed = driver.ledger.resume(0, None)
    assert (resumed.kept, resumed.repeated, resumed.rescored) == (8, 0, 0)
    assert driver.ledger.lease_batch() is not None


def test_leases_are_dead_after_a_resume_and_their_samples_go_back(driver: Driver) -> None:
    rolling = driver.ledger.lease_rollouts("roller", 4, HOUR_S)
    assert rolling is not None
    driver.put_rollout(rolling.token, rolling.samples[0])
    driver.put_rollout(rolling.token, rolling.samples[1])
    scoring = driver.ledger.lease_scoring("scorer", 1, HOUR_S)
    assert scoring is not None
    driver.ledger.resume(0, None)
    assert driver.states()[:4] == [State.ROLLED, State.ROLLED, State.PENDING, State.PENDING]
    with pytest.raises(StaleLeaseError):
        driver.put_record(scoring.token, scoring.samples[0])
    with pytest.raises(StaleLeaseError):
        driver.put_rollout(rolling.token, rolling.samples[2])
    assert not driver.ledger.heartbeat(rolling.token, HOUR_S)


def test_a_leased_batch_is_scored_again_after_a_resume(driver: Driver) -> None:
    driver.prepare()
    batch = driver.ledger.lease_batch()
    driver.ledger.resume(0, None)
    assert driver.ledger.counts().leased == 0
    assert driver.ledger.lease_batch() == batch


def test_samples_dropped_after_the_checkpoint_live_again_and_earlier_ones_do_not(driver: Driver) -> None:
    first = driver.ledger.lease_rollouts("roller", 1, HOUR_S)
    assert first is not None
    driver.ledger.drop(first.token, first.samples[0].uid, "poison", "")
    driver.run(2)
    second = driver.ledger.lease_rollouts("roller", 1, HOUR_S)
    assert second is not None
    driver.ledger.drop(second.token, second.samples[0].uid, "nan", "")
    driver.ledger.resume(1, None)
    assert driver.ledger.counts().dropped_by_reason == {"poison": 1}
    assert driver.ledger.verify() == []


@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_a_payload_that_is_missing_or_damaged_is_made_again(driver: Driver, damage: str) -> None:
    driver.prepare()
    for name in ("rollouts/0-0-0-0", "records/0-0-1-0"):
        path = driver.folder / "payloads" / name
        data = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(data[:-1] + (b"" if damage == "short" else b"\x00"))
    resumed = driver.ledger.resume(0, None)
    assert resumed.lost_payloads == 2
    assert driver.states()[:3] == [State.PENDING, State.ROLLED, State.SCORED]
    driver.run(6)
    assert driver.ledger.verify() == []


def test_damage_in_a_pack_costs_the_damaged_payload_although_others_of_it_are_forgotten(driver: Driver) -> None:
    path = driver.folder / driver.roll_packed(8)
    driver.score()
    driver.train()
    assert driver.ledger.forget_payloads(1)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\x00")
    resumed = driver.ledger.resume(1, None)
    assert (resumed.lost_payloads, resumed.kept) == (1, 3)
    assert driver.states()[4:8] == [State.SCORED] * 3 + [State.PENDING]
    driver.run(5)
    assert driver.ledger.verify() == []


def test_files_that_no_sample_refers_to_are_deleted(driver: Driver) -> None:
    driver.run(2)
    driver.payload("0-0-0-0", text="by a worker whose lease was lost, under another name")
    stray = driver.folder / "payloads" / "rollouts" / "stray.77.part"
    stray.write_bytes(b"half a payload")
    forgotten = driver.ledger.forget_payloads(1)
    driver.ledger.resume(2, None)
    assert not stray.exists()
    assert not any((driver.folder / pack).exists() for pack in forgotten)
    assert driver.ledger.verify() == []


def test_after_a_resume_only_what_fits_the_window_is_handed_out(driver: Driver) -> None:
    driver.run(4)
    driver.prepare()
    driver.ledger.resume(0, None)
    assert driver.ledger.counts().live == 24
    for path in (driver.folder / "payloads").rglob("*-*"):
        path.unlink()
    driver.ledger.resume(0, None)
    assert driver.ledger.counts().pending == 24
    assert len(uids_of(driver.ledger.lease_rollouts("roller", 1000, HOUR_S))) == 8
    driver.ledger.resume(0, None)
    driver.run(6)
    assert max(step.max for step in driver.ledger.staleness().steps) <= 1
    assert driver.ledger.verify() == []


def test_an_answer_pushed_back_by_a_revived_one_is_generated_again_before_it_is_too_old(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_staleness=0)
    lease = driver.ledger.lease_rollouts("roller", 4, HOUR_S)
    assert lease is not None
    driver.ledger.drop(lease.token, lease.samples[0].uid, "poison", "")
    for sample in lease.samples[1:]:
        driver.put_rollout(lease.token, sample)
    driver.roll()
    driver.score()
    assert driver.states() == [State.DROPPED] + [State.SCORED] * 4
    driver.ledger.resume(0, None)
    # The revived sample takes a place in batch 0, so the fifth belongs to batch 1, which version 1 must generate.
    assert driver.states() == [State.PENDING] + [State.SCORED] * 3 + [State.PENDING]
    driver.run(6)
    assert driver.ledger.verify() == []


@pytest.mark.parametrize("admitted", [False, True])
def test_a_newer_attempt_takes_the_place_of_a_dropped_one_for_good(tmp_path: Path, admitted: bool) -> None:
    driver = Driver(tmp_path, selection="freshest", max_staleness=0, requeue_too_old=True)
    lease = driver.ledger.lease_rollouts("roller", 4, HOUR_S)
    assert lease is not None
    driver.ledger._connection.execute("UPDATE run SET policy_version = 1")
    driver.ledger.publish(1)
    for sample in lease.samples:
        driver.put_rollout(lease.token, sample)
    assert driver.score() is None
    assert driver.ledger.counts().dropped_by_reason == {"too_old": 4}
    if admitted:
        assert driver.ledger.lease_rollouts("roller", 4, HOUR_S) is not None
    driver.ledger.resume(0, None)
    assert driver.ledger.verify() == []
    assert driver.ledger.counts().dropped_by_reason == {"too_old": 4}
    again = driver.roll()
    assert [uid[-2:] for uid in uids_of(again)] == ["-1"] * 4


@pytest.mark.parametrize(("lag", "version"), [(0, 2), (1, 2), (2, 3), (1, 0)])
def test_a_pinned_run_resumes_with_the_same_batches_and_versions(tmp_path: Path, lag: int, version: int) -> None:
    driver = Driver(tmp_path, lag=lag, max_staleness=lag, group_size=2)
    driver.run(4)
    half = driver.ledger.lease_rollouts("roller", 1, HOUR_S)
    if half is not None:
        driver.put_rollout(half.token, half.samples[0], half.samples[0].exact_version)
    driver.ledger.resume(version, max(0, version - lag))
    assert driver.ledger.verify() == []
    for batch_index in range(version, 6):
        driver.prepare()
        batch = driver.train()
        assert [sample.ordinal for sample in batch.samples] == list(range(4 * batch_index, 4 * batch_index + 4))
        assert {sample.oldest_version for sample in batch.samples} == {max(0, batch_index - lag)}
    assert driver.ledger.verify() == []


def test_a_pinned_group_with_one_lost_payload_is_redone_whole(tmp_path: Path) -> None:
    driver = Driver(tmp_path, lag=0, max_staleness=0, group_size=2)
    driver.prepare()
    (driver.folder / "payloads/records/0-0-0-0").unlink()
    (driver.folder / "payloads/rollouts/0-1-1-0").unlink()
    driver.ledger.resume(0, 0)
    assert driver.states() == [State.ROLLED, State.ROLLED, State.PENDING, State.PENDING]


def test_a_resume_that_needs_weights_that_are_gone_says_so(tmp_path: Path) -> None:
    driver = Driver(tmp_path, lag=1, max_staleness=1, group_size=2)
    driver.run(3)
    (driver.folder / "payloads/rollouts/0-6-0-0").unlink(missing_ok=True)
    with pytest.raises(LedgerError, match="weights are gone"):
        driver.ledger.resume(3, 3)
    assert driver.ledger.policy_version == 3


def test_a_checkpoint_newer_than_the_ledger_is_refused(driver: Driver) -> None:
    driver.run(1)
    with pytest.raises(LedgerError, match="expected one from 0 to the ledger's 1"):
        driver.ledger.resume(2, None)


def test_resuming_twice_changes_nothing_more(driver: Driver) -> None:
    driver.run(3)
    driver.prepare()
    driver.ledger.resume(2, None)
    before = driver.states()
    with Ledger.open(driver.path) as other:
        assert other.resume(2, None).revived == 0
    assert driver.states() == before
