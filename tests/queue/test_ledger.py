"""Leases, results, quarantine and the learner's batch."""

from dataclasses import replace
from pathlib import Path

import pytest

from asyncopd.errors import ConfigError, LedgerError, StaleLeaseError
from asyncopd.queue.files import delete_payloads
from asyncopd.queue.ledger import LeasedSample, Ledger, QueueConfig, State
from asyncopd.queue.order import permuted, prompt_index
from tests.queue.driver import HOUR_S, Driver, plan_of, uids_of


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def put_together(driver: Driver, token: int, *samples: LeasedSample) -> None:
    with driver.ledger.together():
        for sample in samples:
            driver.put_rollout(token, sample)


def test_a_run_trains_every_sample_of_the_first_slots_exactly_once(driver: Driver) -> None:
    batches = driver.run(6)
    trained = [sample.uid for batch in batches for sample in batch.samples]
    # 24 samples: one epoch of 20, then the first two prompts of the next.
    assert sorted(trained) == sorted(
        [f"0-{position}-{sample}-0" for position in range(10) for sample in range(2)]
        + [f"1-{position}-{sample}-0" for position in range(2) for sample in range(2)]
    )
    assert driver.ledger.finished
    assert driver.ledger.verify() == []
    assert driver.roll() is None
    assert driver.ledger.lease_batch() is None


def test_two_leases_never_share_a_sample(driver: Driver) -> None:
    first = driver.ledger.lease_rollouts("a", 3, HOUR_S)
    second = driver.ledger.lease_rollouts("b", 1000, HOUR_S)
    assert len(uids_of(first)) == 3
    assert len(uids_of(second)) == 5
    assert not set(uids_of(first)) & set(uids_of(second))
    assert driver.ledger.lease_rollouts("c", 1, HOUR_S) is None


def test_a_result_under_a_dead_token_is_refused(driver: Driver) -> None:
    lost = driver.ledger.lease_rollouts("slow", 2, HOUR_S)
    assert lost is not None
    driver.ledger.expire(lost.expires_at + 1)
    taken = driver.ledger.lease_rollouts("other", 2, HOUR_S)
    assert taken is not None
    assert uids_of(taken) == uids_of(lost)
    assert taken.token > lost.token
    with pytest.raises(StaleLeaseError, match="is refused"):
        driver.put_rollout(lost.token, lost.samples[0])
    driver.put_rollout(taken.token, taken.samples[0])
    with pytest.raises(StaleLeaseError, match="is refused"):
        driver.put_rollout(lost.token, lost.samples[0])
    with pytest.raises(StaleLeaseError, match="may no longer drop"):
        driver.ledger.drop(lost.token, lost.samples[1].uid, "poison", "")


def test_a_result_put_twice_under_one_token_counts_once(driver: Driver) -> None:
    lease = driver.roll(2)
    assert lease is not None
    driver.put_rollout(lease.token, lease.samples[0])
    scoring = driver.score(2)
    assert scoring is not None
    driver.put_rollout(lease.token, lease.samples[0])
    driver.put_record(scoring.token, scoring.samples[0])
    assert driver.ledger.counts().scored == 2
    assert driver.ledger.verify() == []


def test_an_expired_lease_goes_back_one_state_and_keeps_what_was_put(driver: Driver) -> None:
    lease = driver.ledger.lease_rollouts("roller", 3, HOUR_S)
    assert lease is not None
    driver.put_rollout(lease.token, lease.samples[0])
    assert driver.ledger.expire(lease.expires_at) == 2
    assert driver.states()[:3] == [State.ROLLED, State.PENDING, State.PENDING]
    scoring = driver.ledger.lease_scoring("scorer", 1, HOUR_S)
    assert scoring is not None
    assert driver.ledger.expire(scoring.expires_at) == 1
    assert driver.states()[0] == State.ROLLED


def test_the_next_lease_call_takes_back_what_has_expired(driver: Driver) -> None:
    dead = driver.ledger.lease_rollouts("gone", 1000, -1.0)
    assert uids_of(driver.ledger.lease_rollouts("next", 1000, HOUR_S)) == uids_of(dead)


def test_a_heartbeat_extends_a_lease_and_tells_when_it_is_dead(driver: Driver) -> None:
    lease = driver.ledger.lease_rollouts("roller", 1, 1.0)
    assert lease is not None
    assert driver.ledger.heartbeat(lease.token, HOUR_S)
    assert driver.ledger.expire(lease.expires_at + 1) == 0
    driver.ledger.release(lease.token)
    assert not driver.ledger.heartbeat(lease.token, HOUR_S)
    assert driver.states()[0] == State.PENDING


def test_a_heartbeat_of_a_lease_whose_work_is_done_is_no_loss(driver: Driver) -> None:
    lease = driver.roll(2)
    assert lease is not None
    assert driver.ledger.heartbeat(lease.token, HOUR_S)


def test_a_poisoned_sample_is_dropped_with_its_reason_and_the_run_goes_on(driver: Driver) -> None:
    lease = driver.ledger.lease_rollouts("roller", 1, HOUR_S)
    assert lease is not None
    driver.ledger.drop(lease.token, lease.samples[0].uid, "too_long", "9000 tokens")
    driver.ledger.drop(lease.token, lease.samples[0].uid, "too_long", "9000 tokens")
    driver.run(6)
    counts = driver.ledger.counts()
    assert counts.dropped_by_reason == {"too_long": 1}
    assert (counts.admitted, counts.trained, counts.dropped, counts.live) == (25, 24, 1, 0)
    assert driver.ledger.verify() == []


def test_the_learner_drops_a_sample_of_its_batch_without_a_token(driver: Driver) -> None:
    driver.prepare()
    batch = driver.ledger.lease_batch()
    assert batch is not None
    driver.ledger.drop(None, batch.samples[0].uid, "not_finite", "loss is NaN")
    driver.ledger.release_batch()
    with pytest.raises(LedgerError, match="only a sample of the leased batch"):
        driver.ledger.drop(None, batch.samples[1].uid, "not_finite", "")
    assert batch.samples[0].uid not in uids_of(driver.ledger.lease_batch())


def test_the_leased_batch_is_returned_again_until_it_is_committed_or_released(driver: Driver) -> None:
    driver.prepare()
    batch = driver.ledger.lease_batch()
    assert batch is not None
    with Ledger.open(driver.path) as other:
        assert other.lease_batch() == batch
        assert other.expire(2e10) == 0
    driver.ledger.release_batch()
    assert driver.ledger.counts().leased == 0
    assert driver.ledger.lease_batch() == batch


def test_a_step_commits_only_the_leased_batch_and_only_the_next_version(driver: Driver) -> None:
    driver.prepare()
    batch = driver.ledger.lease_batch()
    assert batch is not None
    for version in (0, 2):
        with pytest.raises(LedgerError, match="expected 1"):
            driver.ledger.commit_step(batch, version, True)
    driver.ledger.release_batch()
    with pytest.raises(LedgerError, match="not the 0 leased ones"):
        driver.ledger.commit_step(batch, 1, True)
    assert driver.ledger.policy_version == 0
    driver.train()
    with pytest.raises(LedgerError, match="expected 2"):
        driver.ledger.commit_step(batch, 1, True)


def test_an_answer_below_its_version_floor_is_refused(driver: Driver) -> None:
    driver.run(1)
    lease = driver.ledger.lease_rollouts("roller", 1, HOUR_S)
    assert lease is not None
    assert lease.samples[0].min_version == 1
    with pytest.raises(LedgerError, match="expected at least 1"):
        driver.put_rollout(lease.token, lease.samples[0], oldest=0)


def test_a_uid_of_another_plan_is_refused(driver: Driver) -> None:
    lease = driver.ledger.lease_rollouts("roller", 1, HOUR_S)
    assert lease is not None
    for uid in ("0-99-0-0", "0-0-7-0", "nonsense", "0-9-1-3"):
        with pytest.raises(LedgerError, match="uid|not in this ledger"):
            driver.ledger.drop(lease.token, uid, "poison", "")


def test_the_batch_carries_references_and_lengths_in_ordinal_order(driver: Driver) -> None:
    driver.roll(length_of=lambda sample: sample.ordinal + 1)
    driver.score()
    batch = driver.ledger.lease_batch()
    assert batch is not None
    assert [sample.tokens for sample in batch.samples] == [1, 2, 3, 4]
    assert [sample.ordinal for sample in batch.samples] == [0, 1, 2, 3]
    assert batch.samples[0].rollout.path == "payloads/rollouts/0-0-0-0"
    assert batch.samples[0].record.path == "payloads/records/0-0-0-0"


def test_payloads_are_forgotten_once_the_oldest_kept_checkpoint_covers_them(driver: Driver) -> None:
    driver.run(3)
    packs = driver.ledger.forget_payloads(2)
    assert len(packs) == 2 * 8
    assert driver.ledger.forget_payloads(2) == []
    delete_payloads(driver.folder, packs)
    assert driver.ledger.verify() == []


def test_a_pack_is_kept_until_its_last_payload_is_forgotten(driver: Driver) -> None:
    pack = driver.roll_packed(8)
    driver.score()
    driver.train()
    assert pack not in driver.ledger.forget_payloads(1)
    assert driver.ledger.verify() == []
    driver.train()
    assert pack in driver.ledger.forget_payloads(2)


def test_an_error_in_the_midst_of_what_is_put_together_puts_nothing(driver: Driver) -> None:
    lease = driver.ledger.lease_rollouts("roller", 2, HOUR_S)
    assert lease is not None
    known = lease.samples[0]
    with pytest.raises(LedgerError, match="not in this ledger"):
        put_together(driver, lease.token, known, replace(known, uid="9-9-0-9"))
    assert driver.ledger.counts().rolling == 2
    driver.put_rollout(lease.token, lease.samples[0])
    assert driver.ledger.counts().rolled == 1


def test_a_dead_lease_among_what_is_put_together_costs_only_its_own_samples(driver: Driver) -> None:
    dead, held = (driver.ledger.lease_rollouts("roller", 2, HOUR_S) for _ in range(2))
    assert dead is not None
    assert held is not None
    driver.ledger.release(dead.token)
    with driver.ledger.together():
        with pytest.raises(StaleLeaseError):
            driver.put_rollout(dead.token, dead.samples[0])
        for sample in held.samples:
            driver.put_rollout(held.token, sample)
    assert (driver.ledger.counts().pending, driver.ledger.counts().rolled) == (6, 2)


def test_only_puts_can_be_done_together(driver: Driver) -> None:
    with pytest.raises(LedgerError, match="within a transaction"), driver.ledger.together():
        driver.ledger.publish(1)
    assert driver.ledger.published_version == 0


def test_a_recorded_run_forgets_no_payload(tmp_path: Path) -> None:
    driver = Driver(tmp_path, record=True)
    batches = driver.run(3)
    assert driver.ledger.forget_payloads(3) == []
    assert [driver.ledger.trained_batch(version) for version in (1, 2, 3)] == batches


def test_a_batch_whose_payloads_are_gone_cannot_be_replayed(driver: Driver) -> None:
    driver.run(2)
    driver.ledger.forget_payloads(1)
    assert driver.ledger.trained_batch(2).samples
    for version in (1, 3):
        with pytest.raises(LedgerError, match="queue.record = true"):
            driver.ledger.trained_batch(version)


def test_staleness_is_told_in_flight_in_queue_and_for_each_step(driver: Driver) -> None:
    driver.run(1)
    driver.prepare()
    driver.ledger.expire(2e10)
    staleness = driver.ledger.staleness()
    assert staleness.in_queue == ((0, 4), (1, 4))
    assert staleness.in_flight == ()
    driver.train()
    assert driver.ledger.lease_rollouts("roller", 3, HOUR_S) is not None
    staleness = driver.ledger.staleness()
    assert staleness.in_flight == ((0, 3),)
    assert [(step.version, step.mean, step.max) for step in staleness.steps] == [(1, 0.0, 0), (2, 1.0, 1)]
    assert staleness.length_bias == 0.0


def test_strict_order_has_no_length_bias_however_long_the_answers(driver: Driver) -> None:
    for _ in range(6):
        while driver.roll(length_of=lambda sample: 1 + (37 * sample.ordinal) % 101) or driver.score():
            pass
        driver.train()
    assert driver.ledger.staleness().length_bias == 0.0
    assert driver.ledger.counts().dropped == 0


@pytest.mark.parametrize("size", [1, 2, 3, 10, 257, 1000])
def test_the_prompt_order_is_a_permutation_that_the_seed_and_the_epoch_choose(size: int) -> None:
    orders = [
        [permuted(i, size, seed=seed, epoch=epoch) for i in range(size)] for seed, epoch in ((0, 0), (0, 1), (5, 0))
    ]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size > 9:
        assert orders[0] != orders[1]
        assert orders[0] != orders[2]


def test_every_prompt_comes_first_about_equally_often() -> None:
    first = [permuted(0, 5, seed=seed, epoch=3) for seed in range(2000)]
    # 400 expected, standard deviation 18: five of them either way.
    assert all(310 < first.count(value) < 490 for value in range(5))


def test_without_shuffling_prompts_come_in_data_set_order() -> None:
    plan = plan_of(shuffle=False, samples_per_prompt=2)
    assert [prompt_index(plan, slot) for slot in range(22)] == [i // 2 for i in range(20)] + [0, 0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 3}, "multiple of samples_per_prompt"),
        ({"steps": 0}, "steps is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"lag": 2}, "max_staleness >= 2"),
        ({"lag": 0, "group_size": 3}, "divisor of batch_size"),
        ({"lag": 0, "selection": "freshest"}, "expected 'strict'"),
        ({"selection": "best"}, "expected one of"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_the_remedy(changes: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan_of(**changes)


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"lease_s": 0.0}, {"selection": "best"}, {"max_staleness": -1}])
def test_a_queue_config_that_cannot_work_is_refused(changes: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        QueueConfig(**changes)


def test_all_that_a_dead_worker_holds_goes_back_at_once_and_its_tokens_are_dead(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    held = driver.ledger.lease_rollouts("rollout-0", 2, HOUR_S)
    others = driver.ledger.lease_rollouts("rollout-1", 1, HOUR_S)
    assert held is not None
    assert others is not None
    driver.put_rollout(held.token, held.samples[0])
    assert driver.ledger.release_owner("rollout-0") == 1
    with pytest.raises(StaleLeaseError):
        driver.put_rollout(held.token, held.samples[1])
    again = driver.ledger.lease_rollouts("rollout-2", 1, HOUR_S)
    assert uids_of(again) == [held.samples[1].uid]
    driver.put_rollout(others.token, others.samples[0])
    assert driver.ledger.release_owner("rollout-0") == 0
    assert driver.ledger.verify() == []
