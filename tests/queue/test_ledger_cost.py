"""The cost of a sample does not grow with the samples that went before it."""

import re
from pathlib import Path

import pytest

from tests.queue.driver import HOUR_S, Driver


def statements_of(driver: Driver) -> set[str]:
    """Every statement of a life with drops, expiry, a whole step and the readings of a step."""
    seen: set[str] = set()
    driver.ledger._connection.set_trace_callback(seen.add)
    lost = driver.ledger.lease_rollouts("lost", 2, -1.0)
    assert lost is not None
    lease = driver.ledger.lease_rollouts("roller", 1, HOUR_S)
    assert lease is not None
    driver.ledger.drop(lease.token, lease.samples[0].uid, "poison", "")
    driver.ledger.release(lease.token)
    driver.run(2)
    driver.prepare()
    driver.ledger.lease_batch()
    driver.ledger.release_batch()
    driver.ledger.staleness()
    driver.ledger.counts()
    driver.ledger.forget_payloads(1)
    driver.ledger._connection.set_trace_callback(None)
    return {statement for statement in seen if statement.lstrip().startswith(("SELECT", "UPDATE", "DELETE"))}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"selection": "oldest_ready", "requeue_too_old": True},
        {"lag": 1, "group_size": 2},
    ],
    ids=["strict", "overtaking", "pinned"],
)
def test_no_statement_of_a_step_scans_the_history(tmp_path: Path, changes: dict) -> None:
    driver = Driver(tmp_path, **changes)
    scans = []
    for statement in statements_of(driver):
        for row in driver.ledger._connection.execute(f"EXPLAIN QUERY PLAN {statement}"):
            # The partial indices hold live samples, or final ones whose payloads are not deleted yet; a scan of the
            # steps backwards ends with its first row or its hundredth.
            scan = re.fullmatch(r"SCAN (samples|steps)( USING INDEX (?!live|by_state|undeleted).*)?", row[3])
            if scan and "ORDER BY version DESC LIMIT" not in statement:
                scans.append((statement, row[3]))
    assert scans == []
