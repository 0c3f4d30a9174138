"""Work handed out to rollout workers and scorers: leases, results, quarantine, expiry.

Every function here needs an open transaction, and leaves each row in one state with one owner.

A lease is dead once it was taken back; between its expiry and the next lease call that notices, its holder may still
put results or extend it, because nobody else has the work yet.
"""

import math
import sqlite3
import time
from dataclasses import astuple

from asyncopd.errors import LedgerError, StaleLeaseError
from asyncopd.queue.admission import admit, live_samples, policy_version, published_version, window
from asyncopd.queue.order import slot_of, uid_of
from asyncopd.queue.plan import LedgerPlan
from asyncopd.queue.rows import (
    FIRST_FINAL,
    TOO_OLD,
    Lease,
    LeasedSample,
    PayloadRef,
    State,
    payload_columns,
    payload_of,
)

_LEASED_COLUMNS = f"ordinal, slot, attempt, prompt_index, min_version, exact_version, {payload_columns('rollout')}"

CLEAR_ROLLOUT = (
    "rollout_path = NULL, rollout_offset = NULL, rollout_bytes = NULL, rollout_checksum = NULL, rolled_by = NULL,"
    " rolled_s = NULL, tokens = NULL, oldest_version = NULL, newest_version = NULL, rolled_at = NULL, finish = NULL"
)
CLEAR_RECORD = (
    "record_path = NULL, record_offset = NULL, record_bytes = NULL, record_checksum = NULL, scored_by = NULL,"
    " scored_s = NULL, valid_tokens = NULL, disagreement = NULL"
)


def lease_rollouts(
    connection: sqlite3.Connection, plan: LedgerPlan, owner: str, count: int, lease_s: float
) -> Lease | None:
    """Up to ``count`` PENDING samples inside the window, oldest first; one whole group in sync and lagged modes."""
    expire(connection, plan, time.time())
    admit(connection, plan)
    published = published_version(connection)
    if plan.lag is None:
        # The floor is stamped again: the sample may have been admitted, and taken back, some versions ago.
        ordinals = _pending_in_window(connection, plan, published, count)
        connection.executemany(
            "UPDATE samples SET min_version = ? WHERE ordinal = ?", [(published, ordinal) for ordinal in ordinals]
        )
    else:
        ordinals = _whole_group(connection, plan, State.PENDING, published)
    return _hand_out(connection, plan, ordinals, State.ROLLING, owner, lease_s)


def lease_scoring(
    connection: sqlite3.Connection, plan: LedgerPlan, owner: str, count: int, lease_s: float
) -> Lease | None:
    """Up to ``count`` ROLLED samples, oldest first; one whole group in sync and lagged modes."""
    expire(connection, plan, time.time())
    if plan.lag is None:
        drop_too_old(connection, plan, State.ROLLED)
        found = connection.execute(
            "SELECT ordinal FROM samples WHERE state = 2 AND state < 6 ORDER BY ordinal LIMIT ?", (count,)
        )
        ordinals = [row[0] for row in found]
    else:
        ordinals = _whole_group(connection, plan, State.ROLLED, published_version(connection))
    return _hand_out(connection, plan, ordinals, State.SCORING, owner, lease_s)


def put_rollout(
    connection: sqlite3.Connection,
    plan: LedgerPlan,
    token: int,
    uid: str,
    payload: PayloadRef,
    *,
    tokens: int,
    oldest_version: int | None,
    newest_version: int | None,
    finish: str,
) -> None:
    """ROLLING -> ROLLED; nothing if this token already put it; StaleLeaseError under a dead token."""
    row = _row_under(connection, plan, token, uid, State.ROLLING, "rolled_by")
    if row is None:
        return
    ordinal, floor, exact = row
    if oldest_version is not None and newest_version is not None:
        _check_versions(uid, oldest_version, newest_version, floor, exact)
    connection.execute(
        f"UPDATE samples SET state = 2, rolled_by = token, ({payload_columns('rollout')}) = (?, ?, ?, ?),"
        " tokens = ?, oldest_version = ?, newest_version = ?, finish = ?, rolled_s = ?,"
        " rolled_at = (SELECT policy_version FROM run) WHERE ordinal = ?",
        astuple(payload) + (tokens, oldest_version, newest_version, finish, time.time(), ordinal),
    )


def put_record(
    connection: sqlite3.Connection,
    plan: LedgerPlan,
    token: int,
    uid: str,
    payload: PayloadRef,
    *,
    valid_tokens: int,
    disagreement: float | None,
) -> None:
    """SCORING -> SCORED; nothing if this token already put it; StaleLeaseError under a dead token."""
    row = _row_under(connection, plan, token, uid, State.SCORING, "scored_by")
    if row is None:
        return
    known = disagreement if disagreement is not None and math.isfinite(disagreement) else None
    connection.execute(
        f"UPDATE samples SET state = 4, scored_by = token, ({payload_columns('record')}) = (?, ?, ?, ?),"
        " valid_tokens = ?, disagreement = ?, scored_s = ? WHERE ordinal = ?",
        astuple(payload) + (valid_tokens, known, time.time(), row[0]),
    )


def drop(
    connection: sqlite3.Connection, plan: LedgerPlan, token: int | None, uid: str, reason: str, detail: str
) -> None:
    """Quarantine a sample: one held under ``token``, or with None one of the learner's batch."""
    slot, attempt = slot_of(plan, uid)
    row = connection.execute(
        "SELECT ordinal, state, token FROM samples WHERE slot = ? AND attempt = ?", (slot, attempt)
    ).fetchone()
    if row is None:
        raise LedgerError(f"sample {uid} is not in this ledger; expected the uid of a leased sample")
    ordinal, state, held_by = row
    if state == State.DROPPED and token in (None, held_by):
        return
    if token is None:
        if state != State.LEASED:
            raise LedgerError(f"sample {uid} is {State(state).name}; only a sample of the leased batch needs no token")
    elif held_by != token or state not in (State.ROLLING, State.SCORING):
        raise StaleLeaseError(
            f"lease {token} may no longer drop {uid}, which is {State(state).name}: forget the sample and lease anew"
        )
    drop_rows(connection, [ordinal], reason, detail)


def drop_too_old(connection: sqlite3.Connection, plan: LedgerPlan, state: State) -> int:
    """Under a policy that overtakes, drop the samples in ``state`` that are beyond max_staleness; how many."""
    if not plan.overtakes:
        return 0
    oldest_allowed = policy_version(connection) - plan.max_staleness
    rows = connection.execute(
        "SELECT ordinal, slot, attempt FROM samples WHERE state = ? AND state < 6 AND oldest_version < ?",
        (state, oldest_allowed),
    ).fetchall()
    drop_rows(connection, [row[0] for row in rows], TOO_OLD, f"oldest token before version {oldest_allowed}")
    if plan.requeue_too_old:
        connection.executemany(
            "INSERT INTO requeued (slot, attempt) VALUES (?, ?)", [(slot, attempt + 1) for _, slot, attempt in rows]
        )
    return len(rows)


def drop_rows(connection: sqlite3.Connection, ordinals: list[int], reason: str, detail: str) -> None:
    """Any live state -> DROPPED."""
    now = time.time()
    connection.executemany(
        "UPDATE samples SET state = 7, reason = ?, detail = ?, final_s = ?,"
        " final_at = (SELECT policy_version + 1 FROM run) WHERE ordinal = ?",
        [(reason, detail, now, ordinal) for ordinal in ordinals],
    )


def heartbeat(connection: sqlite3.Connection, token: int, lease_s: float) -> bool:
    """Extend a lease to ``lease_s`` seconds from now; False once it is dead."""
    found = connection.execute("UPDATE leases SET expires_s = ? WHERE token = ?", (time.time() + lease_s, token))
    return found.rowcount == 1


def release(connection: sqlite3.Connection, plan: LedgerPlan, token: int) -> int:
    """End a lease; what it still holds goes back one state. How many samples; none if it was dead already."""
    row = connection.execute("DELETE FROM leases WHERE token = ? RETURNING state", (token,)).fetchone()
    if row is None:
        return 0
    held = State(row[0])
    ordinals = [
        found[0]
        for found in connection.execute(
            "SELECT ordinal FROM samples WHERE state = ? AND state < 6 AND token = ?", (held, token)
        )
    ]
    if plan.lag is None:
        return _set_back(connection, ordinals, held)
    # A group is generated (or scored) whole or not at all: its finished members go back as well.
    groups = {ordinal // plan.group_size for ordinal in ordinals}
    members = [ordinal for group in groups for ordinal in _members(plan, group)]
    return _set_back(connection, members, held)


def release_owner(connection: sqlite3.Connection, plan: LedgerPlan, owner: str) -> int:
    """End every lease of ``owner``; how many samples went back one state."""
    held = connection.execute("SELECT token FROM leases WHERE owner = ?", (owner,)).fetchall()
    return sum(release(connection, plan, token) for (token,) in held)


def expire(connection: sqlite3.Connection, plan: LedgerPlan, now: float) -> int:
    """Take back every lease that has expired; how many samples went back one state."""
    dead = connection.execute("SELECT token FROM leases WHERE expires_s <= ?", (now,)).fetchall()
    return sum(release(connection, plan, token) for (token,) in dead)


def _pending_in_window(connection: sqlite3.Connection, plan: LedgerPlan, published: int, count: int) -> list[int]:
    room = window(plan, policy_version(connection), published)
    if room == 0:
        return []
    end = 2**62
    if live_samples(connection) > room:
        # Only after a resume: more is live again than the window holds.
        end = connection.execute(
            "SELECT ordinal FROM samples WHERE state < 6 ORDER BY ordinal LIMIT 1 OFFSET ?", (room,)
        ).fetchone()[0]
    found = connection.execute(
        "SELECT ordinal FROM samples WHERE state = 0 AND state < 6 AND ordinal < ? ORDER BY ordinal LIMIT ?",
        (end, count),
    )
    return [row[0] for row in found]


def _whole_group(connection: sqlite3.Connection, plan: LedgerPlan, state: State, published: int) -> list[int]:
    """The first group whose live members are all in ``state`` and whose version is published, or nothing."""
    row = connection.execute(
        "SELECT ordinal / :size FROM samples WHERE state < 6 GROUP BY ordinal / :size"
        " HAVING min(state) = :state AND max(state) = :state AND max(exact_version) <= :published"
        " ORDER BY 1 LIMIT 1",
        {"size": plan.group_size, "state": int(state), "published": published},
    ).fetchone()
    if row is None:
        return []
    members = _members(plan, row[0])
    found = connection.execute(
        "SELECT ordinal FROM samples WHERE ordinal BETWEEN ? AND ? AND state < 6 ORDER BY ordinal",
        (members.start, members.stop - 1),
    )
    return [member[0] for member in found]


def _members(plan: LedgerPlan, group: int) -> range:
    return range(group * plan.group_size, (group + 1) * plan.group_size)


def _hand_out(
    connection: sqlite3.Connection, plan: LedgerPlan, ordinals: list[int], state: State, owner: str, lease_s: float
) -> Lease | None:
    if not ordinals:
        return None
    expires = time.time() + lease_s
    token = connection.execute(
        "INSERT INTO leases (state, owner, expires_s) VALUES (?, ?, ?)", (int(state), owner, expires)
    ).lastrowid
    assert token is not None
    samples = []
    for ordinal in ordinals:
        row = connection.execute(
            f"UPDATE samples SET state = ?, token = ? WHERE ordinal = ? RETURNING {_LEASED_COLUMNS}",
            (int(state), token, ordinal),
        ).fetchone()
        samples.append(_leased(plan, row))
    return Lease(token=token, samples=tuple(samples), expires_at=expires)


def _leased(plan: LedgerPlan, row: tuple) -> LeasedSample:
    ordinal, slot, attempt, index, floor, exact, *payload = row
    return LeasedSample(
        uid=uid_of(plan, slot, attempt),
        ordinal=ordinal,
        epoch=slot // plan.slots_per_epoch,
        prompt_index=index,
        sample_index=slot % plan.samples_per_prompt,
        attempt=attempt,
        min_version=floor,
        exact_version=exact,
        group=None if plan.lag is None else ordinal // plan.group_size,
        rollout=payload_of(payload),
    )


def _set_back(connection: sqlite3.Connection, ordinals: list[int], held: State) -> int:
    """Rows in ``held`` or just past it go to the state before it, without the results that they had from it."""
    cleared = CLEAR_RECORD
    if held == State.ROLLING:
        cleared = f"{CLEAR_ROLLOUT}, {CLEAR_RECORD}"
    back = 0
    for ordinal in ordinals:
        changed = connection.execute(
            f"UPDATE samples SET state = ?, token = NULL, {cleared} WHERE ordinal = ? AND state IN (?, ?)",
            (held - 1, ordinal, int(held), held + 1),
        )
        back += changed.rowcount
    return back


def _row_under(
    connection: sqlite3.Connection, plan: LedgerPlan, token: int, uid: str, state: State, put_by: str
) -> tuple[int, int, int | None] | None:
    """(ordinal, min_version, exact_version) of a sample that ``token`` holds; None if it put the result already."""
    slot, attempt = slot_of(plan, uid)
    row = connection.execute(
        f"SELECT ordinal, min_version, exact_version, state, token, {put_by} FROM samples"
        " WHERE slot = ? AND attempt = ?",
        (slot, attempt),
    ).fetchone()
    if row is None:
        raise LedgerError(f"sample {uid} is not in this ledger; expected the uid of a leased sample")
    ordinal, floor, exact, found, held_by, already = row
    if found == state and held_by == token:
        return ordinal, floor, exact
    if already == token:
        return None
    final = "final" if found >= FIRST_FINAL else "live"
    raise StaleLeaseError(
        f"the result for {uid} under lease {token} is refused: the sample is {State(found).name} ({final}), "
        f"last held by lease {held_by}; drop the result and lease anew"
    )


def _check_versions(uid: str, oldest: int, newest: int, floor: int, exact: int | None) -> None:
    if exact is not None and (oldest, newest) != (exact, exact):
        raise LedgerError(
            f"sample {uid} was generated by versions {oldest} to {newest}; expected exactly {exact}: "
            "the worker must load that version before the first token and drain before it swaps"
        )
    if not floor <= oldest <= newest:
        raise LedgerError(
            f"sample {uid} was generated by versions {oldest} to {newest}; expected at least {floor}: "
            "the worker must load its min_version before the first token"
        )
