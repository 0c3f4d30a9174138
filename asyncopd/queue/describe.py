"""A ledger in words, for a person who asks where the samples are."""

import sqlite3
import time

from asyncopd.queue.ledger import Ledger
from asyncopd.queue.order import uid_of
from asyncopd.queue.rows import State

_ENTERED = "ifnull(scored_s, ifnull(rolled_s, admitted_s))"
"""When a live sample last moved on, as far as its row tells."""
_EXAMPLES = 3


def describe(ledger: Ledger) -> str:
    """Counts, ages (seconds and policy versions), leases and the reasons for drops; several lines."""
    counts, plan, now = ledger.counts(), ledger.plan, time.time()
    rate = "free running" if plan.lag is None else f"lag {plan.lag}, groups of {plan.group_size}"
    lines = [
        f"policy version {ledger.policy_version} of {plan.steps}, published {ledger.published_version}",
        f"{plan.selection} order, {plan.batch_size} samples a step, max_staleness {plan.max_staleness}, {rate}",
        "",
        f"{counts.admitted} admitted = {counts.trained} trained + {counts.dropped} dropped + {counts.live} live",
    ]
    with ledger.reading() as connection:
        lines += [*_live(connection, now), *_leases(connection, now), *_drops(connection, ledger)]
    return "\n".join([*lines, *_staleness(ledger)])


def _live(connection: sqlite3.Connection, now: float) -> list[str]:
    found = connection.execute(
        f"SELECT state, count(*), min({_ENTERED}) FROM samples WHERE state < 6 GROUP BY state ORDER BY state"
    )
    return [
        f"    {State(state).name:<8} {count:>7}   the oldest for {max(0.0, now - since):.0f} s"
        for state, count, since in found
    ]


def _leases(connection: sqlite3.Connection, now: float) -> list[str]:
    found = connection.execute(
        "SELECT owner, leases.state, count(*), min(expires_s) FROM leases JOIN samples"
        " ON samples.state < 6 AND samples.token = leases.token AND samples.state = leases.state"
        " GROUP BY owner, leases.state ORDER BY owner"
    ).fetchall()
    if not found:
        return []
    lines = ["", "leases"]
    for owner, state, count, expires in found:
        left = expires - now
        until = f"{left:.0f} s left" if left > 0 else f"expired {-left:.0f} s ago, taken back at the next lease"
        lines.append(f"    {owner}: {count} samples {State(state).name}, {until}")
    return lines


def _drops(connection: sqlite3.Connection, ledger: Ledger) -> list[str]:
    reasons = ledger.counts().dropped_by_reason
    if not reasons:
        return []
    lines = ["", "dropped"]
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        lines.append(f"    {reason}: {count}")
        found = connection.execute(
            "SELECT slot, attempt, detail FROM samples WHERE state = 7 AND reason = ? ORDER BY ordinal DESC LIMIT ?",
            (reason, _EXAMPLES),
        )
        lines += [f"        {uid_of(ledger.plan, slot, attempt)}  {detail}" for slot, attempt, detail in found]
    return lines


def _staleness(ledger: Ledger) -> list[str]:
    staleness = ledger.staleness()
    lines = ["", "staleness (policy versions: samples)"]
    for place, ages in (("in flight", staleness.in_flight), ("in queue", staleness.in_queue)):
        lines.append(f"    {place}: {', '.join(f'{age}: {count}' for age, count in ages) or 'none'}")
    if staleness.steps:
        last = staleness.steps[-1]
        lines.append(f"    trained by step {last.version}: mean {last.mean:.2f}, max {last.max}")
        lines.append(f"length bias of the answers trained: {staleness.length_bias:+.1%}")
    return lines
