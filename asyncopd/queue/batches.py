"""The learner's side: which batch is next, and the one transaction that makes it trained.

Every function here that changes something needs an open transaction.
"""

import sqlite3
import time

from asyncopd.errors import LedgerError
from asyncopd.queue.admission import policy_version
from asyncopd.queue.leases import drop_too_old
from asyncopd.queue.order import uid_of
from asyncopd.queue.plan import LedgerPlan
from asyncopd.queue.rows import Batch, BatchSample, PayloadRef, State, payload_columns
from asyncopd.queue.selection import POLICIES, QueueRow


def may_be_ready(connection: sqlite3.Connection, plan: LedgerPlan) -> bool:
    """A cheap look without a transaction: whether it is worth asking for a batch."""
    scored, leased = connection.execute(
        "SELECT (SELECT n FROM tally WHERE state = 4), (SELECT n FROM tally WHERE state = 5)"
    ).fetchone()
    if leased:
        return True
    if plan.lag is None and scored < plan.batch_size:
        return False
    if plan.overtakes:
        return True
    head = connection.execute("SELECT state FROM samples WHERE state < 6 ORDER BY ordinal LIMIT 1").fetchone()
    # With no live sample at all, a batch that was dropped whole must still be noticed.
    return head is None or head[0] == State.SCORED or plan.lag is not None


def lease_batch(connection: sqlite3.Connection, plan: LedgerPlan) -> Batch | None:
    """The batch already leased, or the next one that the policy selects; None while there is none."""
    batch = _leased_batch(connection, plan)
    if batch.samples:
        return batch
    version = policy_version(connection)
    if version >= plan.steps:
        return None
    drop_too_old(connection, plan, State.SCORED)
    chosen = _select(connection, plan) if plan.lag is None else _pinned(connection, plan, version)
    if chosen is None:
        return None
    connection.executemany("UPDATE samples SET state = 5 WHERE ordinal = ?", [(ordinal,) for ordinal in chosen])
    return _leased_batch(connection, plan)


def following_batch(connection: sqlite3.Connection, plan: LedgerPlan, before: Batch) -> Batch | None:
    """What ``lease_batch`` will give once ``before``, the leased batch, is trained; None where that may change."""
    if plan.overtakes or plan.lag is not None:
        return None
    found = connection.execute(
        "SELECT state FROM samples WHERE state < 6 AND ordinal > ? ORDER BY ordinal LIMIT ?",
        (before.samples[-1].ordinal, plan.batch_size),
    ).fetchall()
    if len(found) < plan.batch_size or any(state != State.SCORED for (state,) in found):
        return None
    where = "state < 6 AND ordinal > ?"
    return _batch(connection, plan, where, (before.samples[-1].ordinal,), limit=plan.batch_size)


def release_batch(connection: sqlite3.Connection) -> int:
    """LEASED -> SCORED; how many samples."""
    return connection.execute("UPDATE samples SET state = 4 WHERE state = 5 AND state < 6").rowcount


def commit_step(connection: sqlite3.Connection, plan: LedgerPlan, batch: Batch, version: int, published: bool) -> None:
    """The batch is trained and ``policy_version`` is ``version``; LedgerError if either is not what is expected."""
    old = policy_version(connection)
    if version != old + 1:
        raise LedgerError(f"step commits version {version}; expected {old + 1}, one after the ledger's policy version")
    rows = connection.execute(
        "SELECT ordinal, oldest_version, tokens FROM samples WHERE state = 5 AND state < 6 ORDER BY ordinal"
    ).fetchall()
    if not rows or [row[0] for row in rows] != [sample.ordinal for sample in batch.samples]:
        raise LedgerError(
            f"step {version} commits {len(batch.samples)} samples that are not the {len(rows)} leased ones; "
            "expected the batch that lease_batch returned last"
        )
    staleness = [old - oldest for _, oldest, _ in rows if oldest is not None]
    oldest_age = max(staleness, default=0)
    if oldest_age > plan.max_staleness:
        raise LedgerError(
            f"step {version} would train a sample of staleness {oldest_age}; expected at most {plan.max_staleness}"
        )
    now = time.time()
    connection.execute(
        "UPDATE samples SET state = 6, final_at = ?, final_s = ? WHERE state = 5 AND state < 6", (version, now)
    )
    dropped, dropped_tokens = connection.execute(
        "SELECT count(tokens), ifnull(sum(tokens), 0) FROM samples"
        " WHERE state >= 6 AND forgotten = 0 AND final_at = ? AND state = 7",
        (version,),
    ).fetchone()
    totals = connection.execute(
        "SELECT all_samples, all_trained_tokens, all_dropped, all_dropped_tokens"
        " FROM steps ORDER BY version DESC LIMIT 1"
    ).fetchone() or (0, 0, 0, 0)
    trained = sum(row[2] for row in rows)
    own = (len(rows), trained, dropped, dropped_tokens)
    connection.execute(
        "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (version, now, len(rows), sum(staleness), oldest_age, trained, dropped, dropped_tokens)
        + tuple(total + part for total, part in zip(totals, own, strict=True)),
    )
    connection.execute("UPDATE run SET policy_version = ?", (version,))
    if published:
        publish(connection, version)


def publish(connection: sqlite3.Connection, version: int) -> None:
    """Record that the weights of ``version`` are durable and readable by the workers."""
    newest = policy_version(connection)
    if not 0 <= version <= newest:
        raise LedgerError(f"version {version} is published; expected one from 0 to the policy version, {newest}")
    connection.execute("INSERT INTO published VALUES (?) ON CONFLICT DO NOTHING", (version,))


def _select(connection: sqlite3.Connection, plan: LedgerPlan) -> list[int] | None:
    policy, version = POLICIES[plan.selection], policy_version(connection)
    reach = policy.reach(plan.batch_size, plan.window_batches)
    found = connection.execute(
        "SELECT ordinal, state, slot, oldest_version, tokens, disagreement, scored_s FROM samples"
        " WHERE state < 6 ORDER BY ordinal LIMIT ?",
        (-1 if reach is None else reach,),
    )
    rows = [
        QueueRow(
            ordinal=ordinal,
            ready=state == State.SCORED,
            prompt=slot // plan.samples_per_prompt,
            # What no student wrote never grows old.
            oldest_version=version if oldest is None and state == State.SCORED else oldest,
            tokens=tokens,
            disagreement=disagreement,
            scored_at=scored,
        )
        for ordinal, state, slot, oldest, tokens, disagreement, scored in found
    ]
    return policy.choose(rows, plan.batch_size)


def _pinned(connection: sqlite3.Connection, plan: LedgerPlan, version: int) -> list[int] | None:
    """Batch number ``version``, as it was fixed at admission, less what was dropped."""
    first, last = version * plan.batch_size, (version + 1) * plan.batch_size - 1
    rows = connection.execute(
        "SELECT ordinal, state FROM samples WHERE ordinal BETWEEN ? AND ? ORDER BY ordinal", (first, last)
    ).fetchall()
    live = [(ordinal, state) for ordinal, state in rows if state != State.DROPPED]
    if len(rows) < plan.batch_size or any(state != State.SCORED for _, state in live):
        return None
    if not live:
        reasons = connection.execute("SELECT reason, n FROM drops WHERE n > 0").fetchall()
        raise LedgerError(
            f"every sample of batch {version} was dropped ({dict(reasons)}), so step {version + 1} has nothing to "
            "train; see the details with `asyncopd ledger show` and repair the prompts or the teacher"
        )
    return [ordinal for ordinal, _ in live]


def trained_batch(connection: sqlite3.Connection, plan: LedgerPlan, version: int) -> Batch:
    """The batch that made ``version``, for a replay; LedgerError if it is not trained or its payloads are deleted."""
    where = "state >= 6 AND forgotten = 0 AND state = 6 AND final_at = ?"
    batch = _batch(connection, plan, where, (version,))
    if not batch.samples:
        raise LedgerError(
            f"no payloads of the batch that made version {version}; expected a version from 1 to "
            f"{policy_version(connection)} of a run recorded with queue.record = true"
        )
    return batch


def _leased_batch(connection: sqlite3.Connection, plan: LedgerPlan) -> Batch:
    return _batch(connection, plan, "state = 5 AND state < 6", ())


def _batch(
    connection: sqlite3.Connection, plan: LedgerPlan, where: str, values: tuple[int, ...], limit: int = -1
) -> Batch:
    found = connection.execute(
        "SELECT ordinal, slot, attempt, prompt_index, tokens, valid_tokens, oldest_version, rolled_at,"
        f" {payload_columns('rollout')}, {payload_columns('record')}"
        f" FROM samples WHERE {where} ORDER BY ordinal LIMIT ?",
        (*values, limit),
    )
    samples = [
        BatchSample(
            uid=uid_of(plan, slot, attempt),
            ordinal=ordinal,
            prompt_index=index,
            tokens=tokens,
            valid_tokens=valid,
            oldest_version=oldest,
            rolled_at=rolled_at,
            rollout=PayloadRef(*payloads[:4]),
            record=PayloadRef(*payloads[4:]),
        )
        for ordinal, slot, attempt, index, tokens, valid, oldest, rolled_at, *payloads in found
    ]
    return Batch(samples=tuple(samples))


def forget_payloads(connection: sqlite3.Connection, oldest_kept_version: int) -> list[str]:
    """Forget the payloads of samples that are final at ``oldest_kept_version``; the packs that nothing needs now."""
    found = connection.execute(
        "UPDATE samples SET forgotten = 1 WHERE state >= 6 AND forgotten = 0 AND final_at <= ?"
        " RETURNING rollout_path, record_path",
        (oldest_kept_version,),
    ).fetchall()
    forgotten = {path for paths in found for path in paths if path is not None}
    return sorted(forgotten - needed_packs(connection)) if forgotten else []


def needed_packs(connection: sqlite3.Connection) -> set[str]:
    """Paths of the packs that hold a payload which is not forgotten."""
    columns = "SELECT rollout_path, record_path FROM samples"
    found = connection.execute(
        f"{columns} WHERE state < 6 UNION ALL {columns} WHERE state >= 6 AND forgotten = 0"  # each has its index
    )
    return {path for paths in found for path in paths if path is not None}
