"""One process's connection to the SQLite file that several processes share."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncopd.errors import LedgerError
from asyncopd.queue import schema
from asyncopd.queue.plan import LedgerPlan

BUSY_S = 60.0
"""Transactions take milliseconds: a lock held for longer than this is a process that hangs."""

NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "smb3", "smbfs"}
    | {"fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"}
)


def create_file(path: Path, plan: LedgerPlan) -> None:
    """Write an empty ledger in one transaction; LedgerError if there already is one."""
    refuse_network_file_system(path.parent, mounts())
    connection = _connect(path)
    try:
        with transaction(connection, path):
            if _has_tables(connection):
                raise LedgerError(f"{path} already holds a ledger; open or resume it, or choose another run folder")
            for statement in (*schema.TABLES, *schema.TRIGGERS, *schema.ROWS):
                connection.execute(statement)
            connection.execute("INSERT INTO run VALUES (0, ?, ?, 0, 0)", (schema.FORMAT, plan.to_json()))
    finally:
        connection.close()


def open_file(path: Path) -> tuple[sqlite3.Connection, LedgerPlan]:
    """A connection to an existing ledger, and its plan."""
    if not path.is_file():
        raise LedgerError(f"{path} does not exist; expected the ledger of a run: check the run folder")
    refuse_network_file_system(path.parent, mounts())
    connection = _connect(path)
    if not _has_tables(connection):
        connection.close()
        raise LedgerError(f"{path} holds no ledger (its creation was cut short); start the run again")
    found, plan = connection.execute("SELECT format, plan FROM run").fetchone()
    if found != schema.FORMAT:
        connection.close()
        raise LedgerError(f"{path} has format {found}; this asyncopd reads {schema.FORMAT}: use the one that wrote it")
    return connection, LedgerPlan.from_json(plan)


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
    """One ``BEGIN IMMEDIATE`` transaction: all or nothing, whatever kills the process.

    durable     survive a loss of power too, by one fsync of the log, which carries everything before it; otherwise the
                last transactions may be missing after it, and ``resume`` redoes their work
    """
    if durable:
        connection.execute("PRAGMA synchronous = FULL")
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.rollback()
            raise
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if connection.in_transaction:
            connection.rollback()
        raise LedgerError(f"{path}: {error}; {_remedy(str(error))}. Nothing of this transaction was kept") from error
    finally:
        if durable:
            connection.execute("PRAGMA synchronous = NORMAL")


def mounts() -> list[tuple[str, str]]:
    """(mount point, file system type) of every mount; empty where the system does not tell."""
    table = Path("/proc/mounts")
    if not table.is_file():
        return []
    rows = [line.split(" ") for line in table.read_text().splitlines()]
    return [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) > 2]


def refuse_network_file_system(folder: Path, mounted: list[tuple[str, str]]) -> None:
    """LedgerError if ``folder`` lies on a file system whose locks SQLite cannot trust."""
    where = folder.resolve()
    above = [(len(Path(point).parts), kind) for point, kind in mounted if where.is_relative_to(point)]
    if not above:
        return
    deepest = max(depth for depth, _ in above)
    # The last line of the table hides earlier ones on the same mount point.
    kind = [kind for depth, kind in above if depth == deepest][-1]
    if kind in NETWORK_FILE_SYSTEMS:
        raise LedgerError(
            f"{where} is on a network file system ({kind}), where SQLite's locks do not hold; "
            "put the run folder on a local disk"
        )


def _connect(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, cached_statements=256)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA cache_size = -16000")
    except sqlite3.OperationalError as error:
        raise LedgerError(f"{path} cannot be opened: {error}; {_remedy(str(error))}") from error
    except sqlite3.DatabaseError as error:
        raise LedgerError(f"{path} is not a ledger: {error}; check the run folder") from error
    return connection


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'run'").fetchone() is not None


def _remedy(message: str) -> str:
    for part, remedy in (
        ("full", "free space on the disk and resume"),
        ("readonly", "make the run folder writable"),
        ("unable to open", "check that the run folder exists and is writable"),
        ("locked", f"another process held the ledger for {BUSY_S:.0f} s; end the one that hangs"),
        ("disk I/O", "check the disk"),
    ):
        if part in message:
            return remedy
    return "run `asyncopd ledger verify` on the run folder"
