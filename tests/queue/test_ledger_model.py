"""The SQLite ledger against a model of it in plain Python, under random interleavings.

After every call the two must agree on every sample.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from asyncopd.errors import StaleLeaseError
from asyncopd.queue.ledger import Batch, Lease, LeasedSample, Ledger, LedgerPlan
from asyncopd.queue.selection import POLICIES
from tests.queue.driver import HOUR_S, plan_of, uids_of, write_payload
from tests.queue.ledger_model import (
    DROPPED,
    LEASED,
    PENDING,
    ROLLED,
    ROLLING,
    SCORED,
    SCORING,
    TRAINED,
    Model,
    Sample,
)

plans = st.builds(
    plan_of,
    selection=st.sampled_from(["strict", "strict", *sorted(POLICIES)]),
    requeue_too_old=st.booleans(),
    max_staleness=st.integers(0, 2),
    batch_size=st.sampled_from([2, 4]),
    steps=st.integers(2, 5),
    prompts=st.integers(1, 5),
)
pinned_plans = st.builds(
    lambda lag, slack, group_size, steps: plan_of(
        lag=lag, max_staleness=lag + slack, group_size=group_size, steps=steps, prompts=4
    ),
    lag=st.integers(0, 2),
    slack=st.integers(0, 1),
    group_size=st.sampled_from([1, 2, 4]),
    steps=st.integers(2, 5),
)


class LedgerMachine(RuleBasedStateMachine):
    """Every call of every stage, in any order, with leases that die at any time and resumes in between."""

    @initialize(plan=st.one_of(plans, pinned_plans))
    def create(self, plan: LedgerPlan) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-model-", dir=_fast_disk()))
        self.ledger = Ledger.create(self.folder / "ledger.sqlite", plan)
        self.ledger.publish(0)
        self.model = Model(plan)
        self.held: list[tuple[int, LeasedSample]] = []
        self.put: list[tuple[int, LeasedSample]] = []
        self.batch: Batch | None = None
        self.tokens: set[int] = set()
        self.revived = 0

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        try:
            self.finish()
        finally:
            self.ledger.close()
            shutil.rmtree(self.folder)

    def agree(self) -> None:
        rows = self.ledger._connection.execute(
            "SELECT slot, attempt, exact_version, state, final_at, reason FROM samples ORDER BY ordinal"
        ).fetchall()
        model = [(s.slot, s.attempt, s.exact, s.state, s.final_at, s.reason) for s in self.model.samples]
        assert rows == model
        assert self.ledger.policy_version == self.model.version
        assert self.ledger.published_version == max(self.model.published)
        self.ledger.check_invariant()
        assert self.model.staleness_bound_holds()

    def hold(self, lease: Lease | None, ordinals: list[int], state: int) -> None:
        assert [sample.ordinal for sample in lease.samples] == ordinals if lease else ordinals == []
        if lease is None:
            return
        assert lease.token not in self.tokens
        self.tokens.add(lease.token)
        for sample in lease.samples:
            self.model.samples[sample.ordinal].state = state
            self.model.samples[sample.ordinal].token = lease.token
            self.held.append((lease.token, sample))

    @rule(count=st.integers(1, 6))
    def lease_rollouts(self, count: int) -> None:
        lease = self.ledger.lease_rollouts("roller", count, HOUR_S)
        self.model.admit()
        self.hold(lease, self.model.may_lease(PENDING, count), ROLLING)
        for sample in lease.samples if lease else ():
            floor = sample.exact_version if sample.exact_version is not None else max(self.model.published)
            assert sample.min_version == floor
        self.agree()

    @rule(count=st.integers(1, 6))
    def lease_scoring(self, count: int) -> None:
        lease = self.ledger.lease_scoring("scorer", count, HOUR_S)
        self.model.drop_too_old(ROLLED)
        self.hold(lease, self.model.may_lease(ROLLED, count), SCORING)
        self.agree()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def put_some(self, data: st.DataObject) -> None:
        """Results in any order; an answer may span the versions from its floor to the newest."""
        for _ in range(data.draw(st.integers(1, len(self.held)))):
            token, sample = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            newest = max(sample.min_version, max(self.model.published))
            if sample.exact_version is not None:
                newest = sample.exact_version
            self.put_result(token, sample, data.draw(st.integers(sample.min_version, newest)))
        self.agree()

    def put_all(self) -> None:
        while self.held:
            token, sample = self.held.pop(0)
            self.put_result(token, sample, sample.min_version)

    @rule(straggler=st.booleans())
    def stages_run(self, straggler: bool) -> None:
        """Each worker takes what there is and finishes it, all but perhaps the oldest answer."""
        self.lease_rollouts(100)
        late = [self.held.pop(0)] if straggler and self.held else []
        self.put_all()
        self.lease_scoring(100)
        self.put_all()
        self.held += late
        self.agree()

    @rule(publish=st.booleans(), straggler=st.booleans())
    def steps_pass(self, publish: bool, straggler: bool) -> None:
        """As many steps as can be trained at once."""
        self.stages_run(straggler)
        self.lease_batch()
        while self.batch is not None:
            self.commit_step(publish)
            self.lease_batch()

    def put_result(self, token: int, sample: LeasedSample, newest: int) -> None:
        row = self.model.samples[sample.ordinal]
        scoring = sample.rollout is not None
        held = row.token == token and row.state == (SCORING if scoring else ROLLING) and token not in self.model.dead
        try:
            if scoring:
                self.ledger.put_record(token, sample.uid, write_payload(self.folder, sample.uid, "records"), 7)
            else:
                ref = write_payload(self.folder, sample.uid, "rollouts")
                self.ledger.put_rollout(token, sample.uid, ref, 7, sample.min_version, newest, "eos")
        except StaleLeaseError:
            assert not held
        else:
            assert held
            row.state += 1
            if not scoring:
                row.oldest, row.newest = sample.min_version, newest
            self.put.append((token, sample))

    @precondition(lambda self: self.put)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        """A retry changes nothing: accepted as done, or refused because the work went back."""
        token, sample = data.draw(st.sampled_from(self.put))
        try:
            if sample.rollout is not None:
                self.ledger.put_record(token, sample.uid, write_payload(self.folder, sample.uid, "records"), 7)
            else:
                ref = write_payload(self.folder, sample.uid, "rollouts")
                self.ledger.put_rollout(token, sample.uid, ref, 7, sample.min_version, sample.min_version, "eos")
        except StaleLeaseError:
            assert token in self.model.dead
        self.agree()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop_one(self, data: st.DataObject) -> None:
        token, sample = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        row = self.model.samples[sample.ordinal]
        if self.model.plan.lag is not None and self.last_of_its_batch(sample.ordinal):
            return
        held = row.token == token and row.state in (ROLLING, SCORING) and token not in self.model.dead
        try:
            self.ledger.drop(token, sample.uid, "poison", "drawn")
        except StaleLeaseError:
            assert not held
        else:
            assert held
            self.model.drop(sample.ordinal, "poison")
        self.agree()

    def last_of_its_batch(self, ordinal: int) -> bool:
        size = self.model.plan.batch_size
        return sum(other // size == ordinal // size for other in self.model.live()) < 2

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["release", "heartbeat"]))
    def release_or_extend(self, data: st.DataObject, how: str) -> None:
        token, _ = data.draw(st.sampled_from(self.held))
        if how == "heartbeat":
            assert self.ledger.heartbeat(token, HOUR_S) == (token not in self.model.dead)
        else:
            self.ledger.release(token)
            self.model.take_back(token)
        self.agree()

    @rule()
    def expire_all(self) -> None:
        self.ledger.expire(2e10)
        for token in self.tokens - self.model.dead:
            self.model.take_back(token)
        self.agree()

    @rule()
    def lease_batch(self) -> None:
        batch = self.ledger.lease_batch()
        if self.batch is None:
            if self.model.version < self.model.plan.steps and self.may_drop_scored():
                self.model.drop_too_old(SCORED)
            ordinals = self.model.next_batch()
            assert ([sample.ordinal for sample in batch.samples] if batch else []) == ordinals
            for ordinal in ordinals:
                self.model.samples[ordinal].state = LEASED
            self.batch = batch
        assert batch == self.batch
        self.agree()

    def may_drop_scored(self) -> bool:
        return sum(sample.state == SCORED for sample in self.model.samples) >= self.model.plan.batch_size

    @precondition(lambda self: self.batch is not None)
    @rule(publish=st.booleans())
    def commit_step(self, publish: bool) -> None:
        assert self.batch is not None
        version = self.model.version + 1
        # Publishing may be rarer, but not so rare that the window closes for good.
        published = (
            publish
            or self.model.plan.lag is not None
            or version - max(self.model.published) > self.model.plan.max_staleness
        )
        self.ledger.commit_step(self.batch, version, published)
        self.model.version = version
        if published:
            self.model.published.add(version)
        for sample in self.batch.samples:
            row = self.model.samples[sample.ordinal]
            row.state, row.final_at = TRAINED, version
        self.batch = None
        self.agree()

    @precondition(lambda self: self.batch is not None)
    @rule()
    def release_batch(self) -> None:
        assert self.batch is not None
        self.ledger.release_batch()
        for sample in self.batch.samples:
            self.model.samples[sample.ordinal].state = SCORED
        self.batch = None
        self.agree()

    @precondition(lambda self: self.model.version > 1)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """Kill everything; go on from a checkpoint at or before the policy version."""
        model = self.model
        version = max(0, model.version - data.draw(st.integers(0, 2)))
        covered = [s for s in model.samples if s.final_at is not None and s.final_at <= version]
        self.ledger.resume(version, None)
        self.ledger.publish(version)
        assert self.ledger.verify() == []
        model.dead |= self.tokens
        model.version, self.batch = version, None
        model.published = {v for v in model.published if v <= version} | {version}
        rows = self.ledger._connection.execute(
            "SELECT state, final_at, reason, newest_version FROM samples ORDER BY ordinal"
        ).fetchall()
        superseded = {(s.slot, s.attempt - 1) for s in model.samples} | {(s, a - 1) for s, a in model.requeued}
        for sample, (state, final_at, reason, newest) in zip(model.samples, rows, strict=True):
            if sample in covered:
                assert (state, final_at, reason) == (sample.state, sample.final_at, sample.reason)
            elif (sample.slot, sample.attempt) in superseded:
                assert state == DROPPED
            else:
                assert state in (PENDING, ROLLED, SCORED)
                self.revived += sample.state == DROPPED
                assert newest is None or newest <= version
                assert not (
                    sample.state in (SCORED, LEASED, TRAINED) and state == PENDING and self.kept(sample, version)
                )
            sample.state, sample.final_at, sample.reason, sample.token = state, final_at, reason, None
        self.agree()

    def kept(self, sample: Sample, version: int) -> bool:
        """Whether a resume had no cause to generate this answer again, whatever its place."""
        later = (len(self.model.live()) // self.model.plan.batch_size) + version - sample.oldest
        return self.model.plan.lag is None and sample.newest <= version and later <= self.model.plan.max_staleness

    def finish(self) -> None:
        """Whatever happened, honest stages bring the run to its end: no deadlock, nothing lost, nothing twice."""
        self.ledger.expire(2e10)
        plan = self.ledger.plan
        for _ in range(20 * plan.steps):
            if self.ledger.finished:
                break
            while lease := self.ledger.lease_rollouts("roller", 100, HOUR_S):
                for sample in lease.samples:
                    ref = write_payload(self.folder, sample.uid, "rollouts")
                    self.ledger.put_rollout(
                        lease.token, sample.uid, ref, 7, sample.min_version, sample.min_version, "eos"
                    )
            while lease := self.ledger.lease_scoring("scorer", 100, HOUR_S):
                for sample in lease.samples:
                    self.ledger.put_record(
                        lease.token, sample.uid, write_payload(self.folder, sample.uid, "records"), 7
                    )
            batch = self.ledger.lease_batch()
            if batch is not None:
                self.ledger.commit_step(batch, self.ledger.policy_version + 1, True)
        assert self.ledger.finished, self.ledger.counts()
        assert self.ledger.verify() == []
        counts = self.ledger.counts()
        if plan.lag is None:
            assert counts.trained == plan.steps * plan.batch_size
        if not self.model.overtakes:
            assert "too_old" not in counts.dropped_by_reason
            # Strict order: every slot up to the last trained one is trained, or was poisoned. A sample that was
            # admitted in place of one that lives again is left over.
            assert counts.live <= self.revived
        assert len(uids_of(self.ledger.lease_batch())) == 0


def _fast_disk() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def check(examples: int, calls: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=calls,
            deadline=None,
            derandomize=derandomize,
            database=None,
            suppress_health_check=list(HealthCheck),
            # A failure is printed as it was found; to make it small can take minutes.
            phases=(Phase.generate,),
        ),
    )


def test_the_ledger_and_its_model_agree_after_every_call() -> None:
    check(150, 30, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_ledger_and_its_model_agree_on_many_more_runs() -> None:
    check(1500, 60, derandomize=False)
