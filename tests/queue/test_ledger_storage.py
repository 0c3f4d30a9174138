"""The file itself: created once, on a local disk, with errors that say what to do."""

import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncopd.errors import LedgerError
from asyncopd.queue.connection import refuse_network_file_system
from asyncopd.queue.ledger import Ledger
from tests.queue.driver import HOUR_S, Driver, plan_of


def test_the_plan_comes_back_as_it_was_created(tmp_path: Path) -> None:
    plan = plan_of(lag=1, selection="strict", record=True, shuffle=False)
    Ledger.create(tmp_path / "ledger.sqlite", plan).close()
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.plan == plan


def test_a_ledger_is_not_created_over_another(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    with pytest.raises(LedgerError, match="already holds a ledger"):
        Ledger.create(driver.path, plan_of())


def test_a_creation_that_was_cut_short_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    sqlite3.connect(path).execute("PRAGMA journal_mode = WAL")
    with pytest.raises(LedgerError, match="cut short"):
        Ledger.open(path)
    Ledger.create(path, plan_of()).close()


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="does not exist"):
        Ledger.open(tmp_path / "ledger.sqlite")
    (tmp_path / "notes.txt").write_text("no database at all, but long enough to have a header" * 9)
    with pytest.raises(LedgerError, match="is not a ledger"):
        Ledger.open(tmp_path / "notes.txt")
    with pytest.raises(LedgerError, match="exists and is writable"):
        Ledger.create(tmp_path / "no" / "such" / "folder" / "ledger.sqlite", plan_of())


def test_a_ledger_of_another_format_is_refused(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.ledger._connection.execute("UPDATE run SET format = 99")
    with pytest.raises(LedgerError, match="has format 99"):
        Ledger.open(driver.path)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "fuse.sshfs", "9p"])
def test_a_network_file_system_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(LedgerError, match=f"network file system \\({kind}\\).*local disk"):
        refuse_network_file_system(tmp_path, [("/", "ext4"), (str(tmp_path.resolve()), kind)])


def test_a_local_disk_below_a_network_mount_is_accepted(tmp_path: Path) -> None:
    here = str(tmp_path.resolve())
    refuse_network_file_system(tmp_path, [("/", "nfs"), (here, "nfs"), (here, "ext4")])
    refuse_network_file_system(tmp_path, [("/", "overlay"), ("/mnt/share", "nfs")])
    refuse_network_file_system(tmp_path, [])


def test_a_full_database_fails_clearly_and_loses_nothing(tmp_path: Path) -> None:
    driver = Driver(tmp_path, batch_size=400, prompts=1000)
    pages = driver.ledger._connection.execute("PRAGMA page_count").fetchone()[0]
    driver.ledger._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    before = driver.ledger.counts()
    with pytest.raises(LedgerError, match="full.*free space"):
        driver.roll()
    assert driver.ledger.counts() == before
    driver.ledger._connection.execute("PRAGMA max_page_count = 1000000")
    driver.run(1)
    assert driver.ledger.verify() == []


def test_a_read_only_ledger_fails_clearly_and_loses_nothing(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.ledger._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(LedgerError, match="make the run folder writable"):
        driver.roll()
    driver.ledger._connection.execute("PRAGMA query_only = OFF")
    driver.run(1)
    assert driver.ledger.verify() == []


def test_a_process_that_hangs_with_the_lock_is_reported(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.ledger._connection.execute("PRAGMA busy_timeout = 50")
    other = sqlite3.connect(driver.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="end the one that hangs"):
        driver.ledger.lease_rollouts("roller", 1, HOUR_S)
    other.execute("ROLLBACK")
    assert driver.roll() is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=16m", "none", disk], check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_fails_clearly_and_the_run_goes_on_once_there_is_room(small_disk: Path) -> None:
    driver = Driver(small_disk, batch_size=8, steps=3, max_staleness=0)
    ballast = small_disk / "ballast"
    driver.run(1)
    ballast.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 8192))
    with pytest.raises(LedgerError, match="free space"):
        driver.run(2)
    ballast.unlink()
    version = driver.ledger.policy_version
    driver.ledger.close()
    with Ledger.open(driver.path) as ledger:
        driver.ledger = ledger
        driver.ledger.resume(version, None)
        driver.run(3 - version)
        assert ledger.counts().trained == 24
        assert ledger.verify() == []
