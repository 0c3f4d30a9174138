"""Which samples may exist: the window that keeps the staleness promise.

Under strict order a sample with ``r`` live samples before it is trained ``r // batch_size`` steps from now. Generated
by at least the published version ``p`` while the policy is at ``v``, its staleness when trained is at most
``v + r // batch_size - p``. So the promise ``<= max_staleness`` is kept by generating only samples with
``r < (max_staleness + 1 - (v - p)) * batch_size``: the window. A dropped sample is not live, so it takes no room.

In sync and lagged modes the window is the batches themselves: batch ``j`` may exist once the policy is at ``j - lag``.
"""

import sqlite3
import time

from asyncopd.queue.order import prompt_index
from asyncopd.queue.plan import LedgerPlan


def policy_version(connection: sqlite3.Connection) -> int:
    """Optimizer steps committed."""
    return connection.execute("SELECT policy_version FROM run").fetchone()[0]


def published_version(connection: sqlite3.Connection) -> int:
    """Newest durable published version; -1 before the first."""
    return connection.execute("SELECT ifnull(max(version), -1) FROM published").fetchone()[0]


def live_samples(connection: sqlite3.Connection) -> int:
    """Samples neither trained nor dropped."""
    return connection.execute("SELECT sum(n) FROM tally WHERE state < 6").fetchone()[0]


def window(plan: LedgerPlan, version: int, published: int) -> int:
    """How many live samples, oldest first, may be generated now (async mode)."""
    if published < 0:
        return 0
    return max(0, plan.max_staleness + 1 - (version - published)) * plan.batch_size


def admit(connection: sqlite3.Connection, plan: LedgerPlan) -> int:
    """Add PENDING samples as far as the window and the end of the run allow; how many. Needs a transaction."""
    version, next_slot = connection.execute("SELECT policy_version, next_slot FROM run").fetchone()
    published = published_version(connection)
    admitted = connection.execute("SELECT n FROM admitted").fetchone()[0]
    if plan.lag is None:
        allowed = min(window(plan, version, published), (plan.steps - version) * plan.batch_size)
        room = allowed - live_samples(connection)
    else:
        room = min(version + plan.lag + 1, plan.steps) * plan.batch_size - admitted
    if room <= 0 or published < 0:
        return 0
    again = connection.execute("SELECT id, slot, attempt FROM requeued ORDER BY id LIMIT ?", (room,)).fetchall()
    names = [(slot, attempt) for _, slot, attempt in again]
    names += [(slot, 0) for slot in range(next_slot, next_slot + room - len(again))]
    now = time.time()
    rows = []
    for ordinal, (slot, attempt) in enumerate(names, start=admitted):
        exact = None if plan.lag is None else max(0, ordinal // plan.batch_size - plan.lag)
        floor = published if exact is None else exact
        rows.append((ordinal, slot, attempt, prompt_index(plan, slot), floor, exact, now))
    connection.executemany(
        "INSERT INTO samples (ordinal, slot, attempt, prompt_index, state, min_version, exact_version, admitted_s)"
        " VALUES (?, ?, ?, ?, 0, ?, ?, ?)",
        rows,
    )
    if again:
        connection.execute("DELETE FROM requeued WHERE id <= ?", (again[-1][0],))
    connection.execute("UPDATE run SET next_slot = next_slot + ?", (room - len(again),))
    return room
