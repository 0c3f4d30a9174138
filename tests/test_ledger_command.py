"""``asyncopd ledger``: what a person sees of the sample queue, and what a script learns from the exit status."""

from pathlib import Path

import pytest

from asyncopd import cli
from tests.queue.driver import Driver


@pytest.fixture
def queue(tmp_path: Path) -> Driver:
    """A run folder with a trained step, and samples in the queue."""
    driver = Driver(tmp_path)
    driver.run(1)
    driver.roll(2)
    return driver


def test_show_counts_samples_by_state(queue: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", "show", str(queue.folder)]) == 0
    shown = capsys.readouterr().out
    assert "policy version 1 of 6" in shown
    assert "4 trained + 0 dropped" in shown
    assert "ROLLED" in shown


def test_verify_says_that_a_sound_ledger_is_sound(queue: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", "verify", str(queue.folder)]) == 0
    assert "the ledger is sound" in capsys.readouterr().out


def test_verify_names_the_first_violation_and_exits_with_1(queue: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    queue.ledger._connection.execute("UPDATE tally SET n = n + 1 WHERE state IN (2, 6)")
    damaged = next((queue.folder / "payloads" / "rollouts").iterdir())
    damaged.write_bytes(b"torn")
    assert cli.main(["ledger", "verify", str(queue.folder)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "asyncopd: the counter of ROLLED says" in told.err
    assert "and 2 more" in told.err


def test_a_folder_without_a_ledger_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", "show", str(tmp_path)]) == 1
    assert "ledger.sqlite does not exist" in capsys.readouterr().err
