"""What `asyncopd ledger show` prints."""

from pathlib import Path

from asyncopd.queue.describe import describe
from tests.queue.driver import HOUR_S, Driver


def test_a_description_tells_counts_ages_leases_and_reasons(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.run(2)
    lease = driver.ledger.lease_rollouts("rollout-0", 3, HOUR_S)
    assert lease is not None
    driver.ledger.drop(lease.token, lease.samples[0].uid, "too_long", "9000 tokens")
    lines = describe(driver.ledger).splitlines()
    assert lines[0] == "policy version 2 of 6, published 2"
    assert "16 admitted = 8 trained + 1 dropped + 7 live" in lines
    assert any(line.split()[:2] == ["SCORED", "4"] for line in lines)
    assert any("rollout-0: 2 samples ROLLING" in line and "s left" in line for line in lines)
    assert any("too_long: 1" in line for line in lines)
    assert any(f"{lease.samples[0].uid}  9000 tokens" in line for line in lines)
    assert any("length bias" in line for line in lines)


def test_an_empty_ledger_can_be_described(tmp_path: Path) -> None:
    assert "0 admitted = 0 trained + 0 dropped + 0 live" in describe(Driver(tmp_path).ledger)
