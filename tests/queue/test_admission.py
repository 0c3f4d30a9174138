"""The window: what may exist, and the staleness promise that follows from it."""

import random
from pathlib import Path

import pytest

from asyncopd.queue.ledger import State
from tests.queue.driver import HOUR_S, Driver, uids_of


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_admission_stops_at_the_window(tmp_path: Path, max_staleness: int) -> None:
    driver = Driver(tmp_path, max_staleness=max_staleness)
    lease = driver.ledger.lease_rollouts("roller", 1000, HOUR_S)
    assert len(uids_of(lease)) == (max_staleness + 1) * 4


def test_nothing_is_handed_out_before_version_0_is_published(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.ledger._connection.execute("DELETE FROM published")
    assert driver.ledger.published_version == -1
    assert driver.roll() is None


def test_a_step_that_is_not_published_shrinks_the_window(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_staleness=2)
    driver.prepare()
    driver.train(published=False)
    assert driver.roll() is None
    driver.train(published=True)
    lease = driver.ledger.lease_rollouts("roller", 1000, HOUR_S)
    assert len(uids_of(lease)) == 8
    assert {sample.min_version for sample in lease.samples} == {2}


def test_versions_may_be_published_every_other_step_without_a_stale_sample(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_staleness=1)
    for step in range(6):
        driver.prepare()
        driver.train(published=step % 2 == 1)
    assert max(step.max for step in driver.ledger.staleness().steps) == 1
    assert driver.ledger.verify() == []


def test_the_end_of_the_run_admits_no_more_than_it_trains(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_staleness=3, steps=2)
    driver.prepare()
    assert driver.ledger.counts().admitted == 8


def test_a_dropped_sample_leaves_its_room_to_another(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_staleness=0)
    lease = driver.ledger.lease_rollouts("roller", 1000, HOUR_S)
    assert lease is not None
    for sample in lease.samples[1:]:
        driver.ledger.drop(lease.token, sample.uid, "poison", "")
    more = driver.ledger.lease_rollouts("roller", 1000, HOUR_S)
    assert len(uids_of(more)) == 3


@pytest.mark.parametrize("seed", range(5))
def test_max_staleness_0_runs_on_policy_without_deadlock_even_with_drops(tmp_path: Path, seed: int) -> None:
    driver, random_ = Driver(tmp_path, max_staleness=0), random.Random(seed)
    while not driver.ledger.finished:
        lease = driver.ledger.lease_rollouts("roller", random_.randint(1, 5), HOUR_S)
        for sample in lease.samples if lease else ():
            if random_.random() < 0.3:
                driver.ledger.drop(lease.token, sample.uid, "poison", "")
            else:
                driver.put_rollout(lease.token, sample)
        driver.score(random_.randint(1, 5))
        if driver.ledger.lease_batch() is not None:
            driver.train()
    steps = driver.ledger.staleness().steps
    assert [step.samples for step in steps] == [4] * 6
    assert max(step.max for step in steps) == 0
    assert driver.ledger.verify() == []


def test_a_sample_taken_back_is_leased_with_a_fresh_floor(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_staleness=1)
    first = driver.ledger.lease_rollouts("roller", 4, HOUR_S)
    assert first is not None
    late = driver.ledger.lease_rollouts("late", 4, HOUR_S)
    assert late is not None
    for sample in first.samples:
        driver.put_rollout(first.token, sample)
    driver.score()
    driver.train()
    driver.ledger.release(late.token)
    again = driver.ledger.lease_rollouts("roller", 4, HOUR_S)
    assert uids_of(again) == uids_of(late)
    assert {sample.min_version for sample in again.samples} == {1}


def test_the_strict_learner_waits_for_a_straggler_while_the_window_fills(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_staleness=1)
    straggler = driver.ledger.lease_rollouts("slow", 1, HOUR_S)
    assert straggler is not None
    driver.prepare()
    assert driver.states() == [State.ROLLING] + [State.SCORED] * 7
    assert driver.ledger.lease_batch() is None
    driver.put_rollout(straggler.token, straggler.samples[0])
    driver.score()
    assert driver.train().samples[0].uid == straggler.samples[0].uid
