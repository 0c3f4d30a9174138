"""Which shard holds which record: an SQLite file that several processes read and write.

Nothing is trusted that it says: a record's digest binds it to its key, so a wrong answer of the index is a miss. An
index that is damaged is made again from the shards.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SCHEMA_VERSION = 1
_BUSY_S = 20.0
_MANY = 500
_TRANSIENT = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS shards (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL, used REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, shard INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_of_shard ON records (shard);
CREATE INDEX IF NOT EXISTS shards_by_use ON shards (used, id);
CREATE TABLE IF NOT EXISTS totals (bytes INTEGER NOT NULL);
INSERT INTO totals SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM totals);
CREATE TRIGGER IF NOT EXISTS counted AFTER INSERT ON shards BEGIN UPDATE totals SET bytes = bytes + new.bytes; END;
CREATE TRIGGER IF NOT EXISTS uncounted AFTER DELETE ON shards BEGIN UPDATE totals SET bytes = bytes - old.bytes; END;
PRAGMA user_version = {SCHEMA_VERSION};
"""


class DamagedIndexError(Exception):
    """The index is no index; it is to be made again."""


class ShardIndex:
    """One connection to the index; not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        # Damaged text must not be a decoding error in the middle of a fetch.
        self._connection.text_factory = bytes
        try:
            self.guarded(self._prepare)
        except (DamagedIndexError, sqlite3.DatabaseError):
            self._connection.close()
            raise
        self._inode = path.stat().st_ino

    @property
    def replaced(self) -> bool:
        """Whether another process has made the index again since this one was opened."""
        try:
            return self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def guarded(self, work: Callable[[], T]) -> T:
        """Run ``work``; an SQLite error that waiting cannot mend becomes DamagedIndexError."""
        try:
            return work()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in _TRANSIENT:
                raise
            raise DamagedIndexError(str(error)) from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            # The message itself may quote a damaged name, which is then no text.
            raise DamagedIndexError(str(error)) from error

    def lookup(self, keys: Sequence[bytes]) -> dict[str, list[bytes]]:
        """The keys that are known, by the name of their shard."""
        found: dict[str, list[bytes]] = {}
        for start in range(0, len(keys), _MANY):
            part = keys[start : start + _MANY]
            rows = self._connection.execute(
                "SELECT records.key, shards.name FROM records JOIN shards ON shards.id = records.shard "
                f"WHERE records.key IN ({','.join('?' * len(part))})",
                part,
            )
            for key, name in rows:
                if not isinstance(key, bytes):
                    raise DamagedIndexError("a key that is no key")
                found.setdefault(_text(name), []).append(key)
        return found

    def add(self, name: str, size: int, keys: Iterable[bytes]) -> None:
        """Enter a shard; a record that another shard holds as well is found in the newer one."""
        with self._transaction():
            self._connection.execute(
                "INSERT INTO shards (name, bytes, used) VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET used = excluded.used",
                (name, size, time.time()),
            )
            (shard,) = self._connection.execute("SELECT id FROM shards WHERE name = ?", (name,)).fetchone()
            self._connection.executemany(
                "INSERT OR REPLACE INTO records (key, shard) VALUES (?, ?)", [(key, shard) for key in keys]
            )

    def touch(self, names: Iterable[str]) -> None:
        """Note that shards were used now."""
        with self._transaction():
            now = time.time()
            self._connection.executemany("UPDATE shards SET used = ? WHERE name = ?", [(now, name) for name in names])

    def forget(self, name: str) -> None:
        """Drop a shard and what it holds."""
        with self._transaction():
            self._connection.execute(
                "DELETE FROM records WHERE shard IN (SELECT id FROM shards WHERE name = ?)", (name,)
            )
            self._connection.execute("DELETE FROM shards WHERE name = ?", (name,))

    def forget_coldest(self, max_bytes: int) -> list[str]:
        """Drop the least recently used shards until the rest fits; their names, whose files are to be deleted."""
        if self.total_bytes() <= max_bytes:
            return []
        with self._transaction():
            left = self.total_bytes()
            coldest = []
            for shard, name, size in self._connection.execute("SELECT id, name, bytes FROM shards ORDER BY used, id"):
                if left <= max_bytes:
                    break
                coldest.append((shard, _text(name)))
                left -= _number(size)
            ids = [(shard,) for shard, _ in coldest]
            self._connection.executemany("DELETE FROM records WHERE shard = ?", ids)
            self._connection.executemany("DELETE FROM shards WHERE id = ?", ids)
        return [name for _, name in coldest]

    def total_bytes(self) -> int:
        """Bytes of all shards."""
        return _number(self._connection.execute("SELECT bytes FROM totals").fetchone()[0])

    def records(self) -> int:
        """Records that can be found."""
        return _number(self._connection.execute("SELECT COUNT(*) FROM records").fetchone()[0])

    def names(self) -> list[str]:
        """Names of all shards, the least recently used first."""
        return [_text(name) for (name,) in self._connection.execute("SELECT name FROM shards ORDER BY used, id")]

    def check(self) -> list[str]:
        """What SQLite itself finds wrong; empty when nothing is."""
        rows = self._connection.execute("PRAGMA integrity_check").fetchall()
        found = [_text(row[0]) for row in rows]
        return [] if found == ["ok"] else found

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute("PRAGMA cell_size_check = ON")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self._connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if version == 0 and tables == 0:
            self._connection.executescript(_SCHEMA)
        elif version != SCHEMA_VERSION:
            raise DamagedIndexError(f"an index of layout {version}; expected {SCHEMA_VERSION}")

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._connection)


class _Transaction:
    """BEGIN IMMEDIATE, then COMMIT, or ROLLBACK where something went wrong."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._connection.execute("COMMIT")
        elif self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def _text(value: object) -> str:
    if not isinstance(value, bytes):
        raise DamagedIndexError(f"{value!r} where a text is expected")
    try:
        return value.decode("ascii")
    except UnicodeDecodeError as error:
        raise DamagedIndexError(f"{value!r} where a name is expected") from error


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise DamagedIndexError(f"{value!r} where a number is expected")
    return value
