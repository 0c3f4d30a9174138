"""What is read ahead is what would have been read in turn, and nothing is leased or lost by it."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from asyncopd.learner import read_ahead
from asyncopd.learner.read_ahead import ReadAhead, read_samples
from asyncopd.queue.ledger import Batch
from asyncopd.queue.payloads import PayloadRef, write_records, write_rollouts
from asyncopd.types import Rollout
from teacher_cache.record import TeacherRecord
from tests.queue.driver import Driver


def _only(packs: Iterable[dict[str, PayloadRef]]) -> PayloadRef:
    ((ref,),) = (pack.values() for pack in packs)
    return ref


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    """Three batches of four scored answers with real payloads."""
    driver = Driver(tmp_path, max_staleness=2)
    lease = driver.ledger.lease_rollouts("roller", 12, 60.0)
    assert lease is not None
    for number, sample in enumerate(lease.samples):
        rollout = Rollout(
            uid=sample.uid,
            prompt_ids=(1, 2),
            response_ids_T=torch.full((3 + number,), number, dtype=torch.int32),
            versions_T=torch.zeros(3 + number, dtype=torch.int32),
            log_b_T=torch.zeros(3 + number),
            finish="eos",
            candidates=None,
        )
        driver.ledger.put_rollout(
            lease.token, sample.uid, _only(write_rollouts(tmp_path, [rollout])), 3 + number, 0, 0, "eos"
        )
    lease = driver.ledger.lease_scoring("scorer", 12, 60.0)
    assert lease is not None
    for sample in lease.samples:
        record = TeacherRecord(
            temperature=1.0, teacher="default", log_q_T=torch.zeros(3), entropy_T=torch.zeros(3), sets=()
        )
        driver.ledger.put_record(lease.token, sample.uid, _only(write_records(tmp_path, {sample.uid: record})), 3)
    return driver


def _trained(driver: Driver, ahead: ReadAhead, version: int) -> tuple[Batch, list[str], list[str]]:
    batch = driver.ledger.lease_batch()
    assert batch is not None
    got = [sample.rollout.uid for sample in ahead.samples(batch)]
    driver.ledger.commit_step(batch, version, published=True)
    return batch, got, [sample.rollout.uid for sample in read_samples(driver.folder, batch.samples)]


def test_the_batch_that_follows_is_read_once_and_before_its_turn(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[str]] = []

    def noted(run_dir: Path, samples: list) -> list:
        read.append([sample.uid for sample in samples])
        return read_samples(run_dir, samples)

    monkeypatch.setattr(read_ahead, "read_samples", noted)
    ahead = ReadAhead(driver.folder, 0, 1)
    first = driver.ledger.lease_batch()
    assert first is not None
    assert [sample.rollout.uid for sample in ahead.samples(first)] == [sample.uid for sample in first.samples]
    ahead._ahead.result(60)
    assert driver.ledger.counts().leased == 4
    driver.ledger.commit_step(first, 1, published=True)
    second, got, expected = _trained(driver, ahead, 2)
    assert got == expected == [sample.uid for sample in second.samples]
    assert read[:3] == [[s.uid for s in first.samples], [s.uid for s in second.samples], []]


def test_ranks_read_their_own_shares_and_together_the_whole_batch(driver: Driver) -> None:
    ranks = [ReadAhead(driver.folder, rank, 2) for rank in range(2)]
    for version in (1, 2, 3):
        batch = driver.ledger.lease_batch()
        assert batch is not None
        shares = [[sample.rollout.uid for sample in rank.samples(batch)] for rank in ranks]
        assert all(shares)
        assert sorted(shares[0] + shares[1]) == sorted(sample.uid for sample in batch.samples)
        driver.ledger.commit_step(batch, version, published=True)


def test_a_rank_for_which_no_sample_is_left_goes_along_with_one_that_is_not_trained(driver: Driver) -> None:
    batch = driver.ledger.lease_batch()
    assert batch is not None
    shares = [ReadAhead(driver.folder, rank, 5).samples(batch) for rank in range(5)]
    assert [len(share) for share in shares] == [1] * 5
    trained = [not share[0].record.log_q_T.isnan().all() for share in shares]
    assert sorted(trained) == [False, True, True, True, True]


def test_a_batch_that_is_too_large_for_two_is_read_when_its_turn_comes(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MOST_BYTES", 100)
    ahead = ReadAhead(driver.folder, 0, 1)
    _trained(driver, ahead, 1)
    assert ahead._ahead.result(60) == {}
    _, got, expected = _trained(driver, ahead, 2)
    assert got == expected
