"""`verify` names what is wrong; a sound ledger has nothing to name."""

from pathlib import Path

import pytest

from asyncopd.errors import LedgerError
from tests.queue.driver import HOUR_S, Driver


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    driver = Driver(tmp_path)
    driver.run(2)
    driver.prepare()
    assert driver.ledger.lease_batch() is not None
    driver.train()
    assert driver.ledger.lease_rollouts("roller", 2, HOUR_S) is not None
    assert driver.ledger.verify() == []
    return driver


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("DELETE FROM leases", "is ROLLING, but its lease is unknown"),
        ("UPDATE samples SET rollout_path = NULL WHERE ordinal = 0", "0-0-0-0 is TRAINED, but it has no rollout"),
        ("UPDATE samples SET record_path = NULL WHERE ordinal = 1", "0-0-1-0 is TRAINED, but it has no record"),
        ("UPDATE samples SET oldest_version = -3 WHERE ordinal = 8", "trained beyond max_staleness"),
        ("UPDATE samples SET final_at = 9 WHERE ordinal = 0", "a step that is not committed"),
        ("UPDATE samples SET final_at = NULL WHERE ordinal = 0", "final at no version"),
        ("UPDATE samples SET slot = 99 WHERE ordinal = 0", "different slots"),
        ("UPDATE samples SET slot = 1, attempt = 1 WHERE ordinal = 0", "live or trained 2 times"),
        ("UPDATE tally SET n = n + 1 WHERE state = 6", "the counter of TRAINED says 13; there are 12"),
        ("UPDATE admitted SET n = n - 1", "the counter of admitted samples"),
        ("UPDATE steps SET samples = 3 WHERE version = 2", "step 2 is noted with 3 samples"),
        ("INSERT INTO published VALUES (50)", "version 50 is published"),
        ("UPDATE samples SET rollout_checksum = 'crc32:0' WHERE ordinal = 0", "expected crc32:0"),
    ],
)
def test_verify_names_the_violation(driver: Driver, damage: str, named: str) -> None:
    driver.ledger._connection.execute(damage)
    assert any(named in line for line in driver.ledger.verify()), driver.ledger.verify()


def test_a_payload_that_is_gone_is_named_with_its_sample_and_file(driver: Driver) -> None:
    (driver.folder / "payloads/records/0-0-1-0").unlink()
    (found,) = driver.ledger.verify()
    assert "record of sample 0-0-1-0" in found
    assert str(driver.folder / "payloads/records/0-0-1-0") in found


def test_a_counter_that_is_off_fails_the_step(driver: Driver) -> None:
    driver.ledger._connection.execute("UPDATE tally SET n = n + 1 WHERE state = 4")
    with pytest.raises(LedgerError, match="were admitted, but"):
        driver.ledger.check_invariant()
    batch = driver.ledger.lease_batch()
    assert batch is not None
    with pytest.raises(LedgerError, match="were admitted, but"):
        driver.ledger.commit_step(batch, 4, True)
    assert driver.ledger.policy_version == 3


def test_a_sample_cannot_be_deleted(driver: Driver) -> None:
    with pytest.raises(Exception, match="never deleted"):
        driver.ledger._connection.execute("DELETE FROM samples WHERE ordinal = 0")
