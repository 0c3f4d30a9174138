"""The sample queue: one row a sample, every change one transaction, nothing consumed on read.

    PENDING -> ROLLING -> ROLLED -> SCORING -> SCORED -> LEASED -> TRAINED        final
    any live state -> DROPPED(reason)                                            final
    an expired or released lease goes back one state; resume rolls back what the checkpoint does not cover

Units: staleness in policy versions (optimizer steps); lengths in tokens; times in seconds since the epoch.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

from asyncopd.queue import admission, batches, leases
from asyncopd.queue.connection import create_file, open_file, transaction
from asyncopd.queue.files import PayloadError, is_whole, read_checked, sweep
from asyncopd.queue.plan import LedgerPlan, QueueConfig
from asyncopd.queue.resume import roll_back
from asyncopd.queue.rows import (
    Batch,
    BatchSample,
    Counts,
    Lease,
    LeasedSample,
    PayloadRef,
    Resumed,
    Staleness,
    State,
)
from asyncopd.queue.staleness import read_staleness
from asyncopd.queue.verify import check_counters, violations

__all__ = [
    "Batch",
    "BatchSample",
    "Counts",
    "Lease",
    "LeasedSample",
    "Ledger",
    "LedgerPlan",
    "PayloadRef",
    "QueueConfig",
    "Resumed",
    "Staleness",
    "State",
]


class Ledger:
    """A process's view of the ledger. Any number of processes may open one file; a view belongs to one thread.

    Payload paths are relative to the folder of the file. Every method raises LedgerError if the file cannot be written,
    is held by a hanging process, or refuses the transition.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, plan: LedgerPlan) -> None:
        """Use ``create`` or ``open``."""
        self._path = path
        self._connection = connection
        self._plan = plan
        self._together = False

    @classmethod
    def create(cls, path: Path, plan: LedgerPlan) -> "Ledger":
        """A new ledger; LedgerError if there is one, or if ``path`` is on a network file system."""
        create_file(path, plan)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Ledger":
        """The ledger that ``create`` wrote."""
        connection, plan = open_file(path)
        return cls(path, connection, plan)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def plan(self) -> LedgerPlan:
        """What the run promised when it was created."""
        return self._plan

    @property
    def policy_version(self) -> int:
        """Optimizer steps committed."""
        return admission.policy_version(self._connection)

    @property
    def published_version(self) -> int:
        """Newest durable published version, at most ``policy_version``; -1 before the first ``publish``."""
        return admission.published_version(self._connection)

    @property
    def finished(self) -> bool:
        """Whether all steps are committed."""
        return self.policy_version == self._plan.steps

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is put in the block is one transaction; an error that leaves the block undoes all of it.

        For ``put_rollout`` and ``put_record`` alone. Samples whose payloads share a pack are put together: a pack of
        which the ledger knew a part only could be deleted with that part.
        """
        with transaction(self._connection, self._path):
            self._together = True
            try:
                yield
            finally:
                self._together = False

    def _putting(self) -> AbstractContextManager[sqlite3.Connection]:
        """The transaction of ``together``, or one of its own."""
        return nullcontext(self._connection) if self._together else transaction(self._connection, self._path)

    def lease_rollouts(self, owner: str, count: int, lease_s: float) -> Lease | None:
        """Admit as far as the window allows, then hand out up to ``count`` samples to generate, oldest first.

        In sync and lagged modes: exactly one whole group, and ``count`` is ignored. None if there is nothing to do now.
        """
        with transaction(self._connection, self._path) as connection:
            return leases.lease_rollouts(connection, self._plan, owner, count, lease_s)

    def lease_scoring(self, owner: str, count: int, lease_s: float) -> Lease | None:
        """Hand out up to ``count`` generated samples to score, oldest first; a whole group in sync and lagged modes."""
        with transaction(self._connection, self._path) as connection:
            return leases.lease_scoring(connection, self._plan, owner, count, lease_s)

    def put_rollout(
        self,
        token: int,
        uid: str,
        payload: PayloadRef,
        tokens: int,
        oldest_version: int | None,
        newest_version: int | None,
        finish: str,
    ) -> None:
        """A sample is generated; ``payload`` is on disk already. Putting it again under the same token is nothing.

        oldest_version, newest_version  policy versions of its oldest and newest token; None where no student wrote it,
                                        which has no staleness

        StaleLeaseError under a dead token; LedgerError if a version is not what the lease demanded.
        """
        with self._putting() as connection:
            leases.put_rollout(
                connection,
                self._plan,
                token,
                uid,
                payload,
                tokens=tokens,
                oldest_version=oldest_version,
                newest_version=newest_version,
                finish=finish,
            )

    def put_record(
        self, token: int, uid: str, payload: PayloadRef, valid_tokens: int, disagreement: float | None = None
    ) -> None:
        """A sample is scored; ``payload`` is on disk already. Putting it again under the same token is nothing.

        valid_tokens    positions that will enter the loss
        disagreement    how far student and teacher differ (nats a token), for policies that select by it

        StaleLeaseError under a dead token.
        """
        with self._putting() as connection:
            leases.put_record(
                connection, self._plan, token, uid, payload, valid_tokens=valid_tokens, disagreement=disagreement
            )

    def drop(self, token: int | None, uid: str, reason: str, detail: str) -> None:
        """Quarantine a sample that can be neither generated nor scored nor trained.

        token   the lease that holds it; None for a sample of the learner's leased batch, which the learner must then
                release and lease anew
        reason  a short word, counted; ``detail`` says more
        """
        with transaction(self._connection, self._path) as connection:
            leases.drop(connection, self._plan, token, uid, reason, detail)

    def heartbeat(self, token: int, lease_s: float) -> bool:
        """Extend a lease to ``lease_s`` seconds from now; False if it is dead, so that its work should be abandoned."""
        with transaction(self._connection, self._path) as connection:
            return leases.heartbeat(connection, token, lease_s)

    def release(self, token: int) -> None:
        """Give back what a lease still holds; nothing if it is dead."""
        with transaction(self._connection, self._path) as connection:
            leases.release(connection, self._plan, token)

    def release_owner(self, owner: str) -> int:
        """Give back all that a worker holds, because it is dead; how many samples went back one state."""
        with transaction(self._connection, self._path) as connection:
            return leases.release_owner(connection, self._plan, owner)

    def expire(self, now: float | None = None) -> int:
        """Take back the leases that expired before ``now``; how many samples went back one state."""
        with transaction(self._connection, self._path) as connection:
            return leases.expire(connection, self._plan, time.time() if now is None else now)

    def lease_batch(self) -> Batch | None:
        """The batch that the learner trains next, or None while it is not complete. It does not expire.

        While a batch is leased, the same batch is returned again.
        """
        if not batches.may_be_ready(self._connection, self._plan):
            return None
        with transaction(self._connection, self._path) as connection:
            return batches.lease_batch(connection, self._plan)

    def following_batch(self, before: Batch) -> Batch | None:
        """The batch that ``lease_batch`` will return once ``before``, the leased one, is committed; leases nothing.

        None while a sample of it is not scored, and always in the pinned modes and under a policy that overtakes, where
        it is only known then. In strict order nothing can come between.
        """
        with self.reading() as connection:
            return batches.following_batch(connection, self._plan, before)

    def release_batch(self) -> None:
        """Put the leased batch back among the scored samples."""
        with transaction(self._connection, self._path) as connection:
            batches.release_batch(connection)

    def commit_step(self, batch: Batch, version: int, published: bool) -> None:
        """One transaction: the batch is trained, and the policy is at ``version``, one more than before.

        The caller has made the weights of ``version`` durable before. After it returns, not even a loss of power undoes
        it. published: whether workers can load those weights.
        """
        with transaction(self._connection, self._path, durable=True) as connection:
            batches.commit_step(connection, self._plan, batch, version, published)
            check_counters(connection)

    def publish(self, version: int) -> None:
        """Workers can load ``version``, which is durable: the initial version 0, or one republished after a resume."""
        with transaction(self._connection, self._path) as connection:
            batches.publish(connection, version)

    def resume(self, version: int, kept_from: int | None) -> Resumed:
        """Roll back to the checkpoint of policy version ``version``, and delete the payloads of the lost timeline.

        Nothing else may have the ledger open for work. Every payload that is kept is read and checked.

        kept_from   oldest policy version whose published weights are still on disk; None if all are
        """
        folder = self._path.parent
        with transaction(self._connection, self._path, durable=True) as connection:
            resumed = roll_back(connection, self._plan, version, kept_from, lambda ref: is_whole(folder, ref))
            check_counters(connection)
        sweep(folder, batches.needed_packs(self._connection))
        return resumed

    def forget_payloads(self, oldest_kept_version: int) -> list[str]:
        """Packs of payloads that no kept checkpoint can need again, each returned once; the caller deletes the files.

        oldest_kept_version     policy version of the oldest checkpoint that a resume may use

        Empty where the plan records the run for replay. Should the caller die before it deletes them, resume does.
        """
        if self._plan.record:
            return []
        with transaction(self._connection, self._path) as connection:
            return batches.forget_payloads(connection, oldest_kept_version)

    def trained_batch(self, version: int) -> Batch:
        """The batch that the step to ``version`` trained, for a replay.

        LedgerError if that step is not committed, or its payloads were forgotten because the run is not recorded.
        """
        return batches.trained_batch(self._connection, self._plan, version)

    def counts(self) -> Counts:
        """Samples by state, from the counters."""
        # One statement is one snapshot, so the numbers fit together while other processes move samples.
        found = self._connection.execute(
            "SELECT 'state', state, n FROM tally UNION ALL SELECT 'reason', reason, n FROM drops WHERE n > 0"
            " UNION ALL SELECT 'admitted', NULL, n FROM admitted"
        ).fetchall()
        by_state = {State(key): count for kind, key, count in found if kind == "state"}
        return Counts(
            **{state.name.lower(): by_state[state] for state in State},
            admitted=next(count for kind, _, count in found if kind == "admitted"),
            dropped_by_reason={key: count for kind, key, count in found if kind == "reason"},
        )

    def check_invariant(self) -> None:
        """LedgerError unless admitted == trained + dropped + live; reads only counters."""
        check_counters(self._connection)

    def verify(self) -> list[str]:
        """Recount everything and read every payload: each broken invariant in words; empty for a sound ledger."""
        folder = self._path.parent

        def problem(ref: PayloadRef) -> str | None:
            try:
                read_checked(folder, ref)
            except PayloadError as error:
                return str(error)
            return None

        with self.reading() as connection:
            return violations(connection, self._plan, problem)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The tables as they are at one moment, for reports; nothing that is written in the block is kept."""
        self._connection.execute("BEGIN")
        try:
            yield self._connection
        finally:
            self._connection.rollback()

    def staleness(self) -> Staleness:
        """How old samples are, in flight, in the queue and when trained; and the bias of the lengths trained."""
        return read_staleness(self._connection)
