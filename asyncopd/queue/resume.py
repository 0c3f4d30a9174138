"""Rolling the ledger back to a checkpoint, so that every sample is trained exactly once relative to it.

Needs an open transaction, and that no worker and no learner runs.
"""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from asyncopd.errors import LedgerError
from asyncopd.queue.admission import policy_version, published_version
from asyncopd.queue.leases import CLEAR_RECORD, CLEAR_ROLLOUT
from asyncopd.queue.plan import LedgerPlan
from asyncopd.queue.rows import FIRST_FINAL, PayloadRef, Resumed, State, payload_columns, payload_of

_REVIVED = (
    "SELECT ordinal FROM samples AS sample WHERE state >= 6 AND final_at > :version AND NOT ("
    # A later attempt has taken the place of a sample dropped for age: reviving both would train the slot twice.
    " EXISTS (SELECT 1 FROM samples AS later WHERE later.slot = sample.slot AND later.attempt > sample.attempt)"
    " OR EXISTS (SELECT 1 FROM requeued WHERE requeued.slot = sample.slot AND requeued.attempt > sample.attempt))"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Live:
    ordinal: int
    state: State
    exact_version: int | None
    oldest_version: int | None
    newest_version: int | None
    rollout: PayloadRef | None
    record: PayloadRef | None


def roll_back(
    connection: sqlite3.Connection,
    plan: LedgerPlan,
    version: int,
    kept_from: int | None,
    is_whole: Callable[[PayloadRef], bool],
) -> Resumed:
    """Make the ledger what it was when the checkpoint of ``version`` was the whole truth.

    kept_from   oldest policy version whose weights are still on disk; None if all are
    is_whole    whether a payload is on disk and undamaged
    """
    newest = policy_version(connection)
    if not 0 <= version <= newest:
        raise LedgerError(
            f"the checkpoint is of policy version {version}; expected one from 0 to the ledger's {newest}: "
            "the checkpoint and the ledger must be of the same run"
        )
    connection.execute("DELETE FROM leases")
    connection.execute("DELETE FROM published WHERE version > ? OR version < ?", (version, kept_from or 0))
    connection.execute("DELETE FROM steps WHERE version > ?", (version,))
    connection.execute("UPDATE run SET policy_version = ?", (version,))
    revived = [row[0] for row in connection.execute(_REVIVED, {"version": version}).fetchall()]
    connection.executemany(
        "UPDATE samples SET state = 4, reason = NULL, detail = NULL, final_at = NULL, final_s = NULL, forgotten = 0"
        " WHERE ordinal = ?",
        [(ordinal,) for ordinal in revived],
    )
    # Policy versions beyond this one were of the lost timeline: nothing has aged there.
    connection.execute("UPDATE samples SET rolled_at = ? WHERE state < 6 AND rolled_at > ?", (version, version))
    # Those that stay dropped do so from here on; the version of their drop is of the lost timeline.
    connection.execute(
        "UPDATE samples SET final_at = :version + 1 WHERE state = 7 AND final_at > :version + 1", {"version": version}
    )
    live = _live(connection)
    lost = [ref for row in live for ref in (row.rollout, row.record) if ref is not None and not is_whole(ref)]
    targets = _targets(plan, version, live, set(lost))
    _refuse_lost_weights(live, targets, kept_from)
    _move(connection, live, targets, published_version(connection))
    return Resumed(
        version=version,
        revived=len(revived),
        repeated=sum(
            target == State.PENDING and row.state != State.PENDING for row, target in zip(live, targets, strict=True)
        ),
        rescored=targets.count(State.ROLLED),
        kept=targets.count(State.SCORED),
        lost_payloads=len(lost),
    )


def _live(connection: sqlite3.Connection) -> list[_Live]:
    found = connection.execute(
        f"SELECT ordinal, state, exact_version, oldest_version, newest_version, {payload_columns('rollout')},"
        f" {payload_columns('record')} FROM samples WHERE state < 6 ORDER BY ordinal"
    )
    return [
        _Live(
            ordinal=row[0],
            state=State(row[1]),
            exact_version=row[2],
            oldest_version=row[3],
            newest_version=row[4],
            rollout=payload_of(row[5:9]),
            record=payload_of(row[9:]),
        )
        for row in found
    ]


def _targets(plan: LedgerPlan, version: int, live: list[_Live], lost: set[PayloadRef]) -> list[State]:
    """The furthest state that each live sample may keep."""
    targets = []
    for rank, row in enumerate(live):
        trained_at = version + rank // plan.batch_size
        if row.rollout is None or row.rollout in lost or not _still_valid(plan, version, trained_at, row):
            targets.append(State.PENDING)
        elif row.record is None or row.record in lost:
            targets.append(State.ROLLED)
        else:
            targets.append(State.SCORED)
    if plan.lag is None:
        return targets
    # A group is generated together and scored together, or its results would depend on where the run was cut.
    furthest: dict[int, State] = {}
    for row, target in zip(live, targets, strict=True):
        group = row.ordinal // plan.group_size
        furthest[group] = min(furthest.get(group, target), target)
    return [furthest[row.ordinal // plan.group_size] for row in live]


def _still_valid(plan: LedgerPlan, version: int, trained_at: int, row: _Live) -> bool:
    """Whether an answer is of this timeline and will still be fresh enough when strict order comes to it.

    Samples that live again in front of it may have pushed it back. A policy that overtakes drops what is too old.
    """
    if row.oldest_version is None or row.newest_version is None:
        # No student wrote it: it belongs to every timeline and never grows old.
        return True
    if row.newest_version > version:
        return False
    return plan.overtakes or trained_at - row.oldest_version <= plan.max_staleness


def _refuse_lost_weights(live: list[_Live], targets: list[State], kept_from: int | None) -> None:
    needed = [
        row.exact_version
        for row, target in zip(live, targets, strict=True)
        if target == State.PENDING and row.exact_version is not None
    ]
    if kept_from is not None and needed and min(needed) < kept_from:
        raise LedgerError(
            f"samples must be generated again by version {min(needed)}, whose weights are gone (oldest kept: "
            f"{kept_from}); resume from an earlier checkpoint, and keep weights back to the checkpoint minus the lag"
        )


def _move(connection: sqlite3.Connection, live: list[_Live], targets: list[State], published: int) -> None:
    cleared = {
        State.PENDING: f", {CLEAR_ROLLOUT}, {CLEAR_RECORD}, min_version = ifnull(exact_version, max({published}, 0))",
        State.ROLLED: f", {CLEAR_RECORD}",
        State.SCORED: "",
    }
    for row, target in zip(live, targets, strict=True):
        assert row.state < FIRST_FINAL
        connection.execute(
            f"UPDATE samples SET state = ?, token = NULL{cleared[target]} WHERE ordinal = ?",
            (int(target), row.ordinal),
        )
