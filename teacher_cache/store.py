"""A content-addressed cache of teacher scores on disk, for several readers and writers at once.

    index.sqlite   which shard holds which record    shards/       the records, written once
    index.lock     held while the index is remade    quarantine/   what was damaged, for a look

A damaged record is never returned: it is moved to quarantine and is a miss from then on. A cache that cannot be read or
written costs time, not the run: ``get`` then finds nothing and ``put`` keeps nothing, with a warning.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from filelock import FileLock

from teacher_cache.bundle import MOST_RECORDS, PackedRecord
from teacher_cache.errors import StoreError
from teacher_cache.shard_index import DamagedIndexError, ShardIndex
from teacher_cache.shards import PART, SUFFIX, DamagedShardError, read_shard, shard_path, write_shard

LOG = logging.getLogger(__name__)
T = TypeVar("T")
SHARD_BYTES = 4 * 2**20
"""A shard is read whole, so it is kept small; a larger record has one to itself."""

TOUCH_S = 1.0
"""How exactly the time of use is kept, in seconds."""

ABANDONED_S = 3600.0
"""Age at which a partial file is taken to be nobody's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """A store in figures. Sizes in bytes."""

    records: int
    shards: int
    shard_bytes: int
    index_bytes: int
    quarantined: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """What ``gc`` did: shards evicted, shards that the index did not know, partial files deleted."""

    evicted: int
    adopted: int
    partial: int


class RecordStore:
    """One process's view of a store; safe from several threads.

    max_bytes   of all shards; the least recently used ones go first. None keeps everything
    """

    def __init__(self, path: Path, *, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise StoreError(f"the store's size cap is {max_bytes} bytes; expected at least 1, or None for no cap")
        self.path = path
        self._max_bytes = max_bytes
        self._shards, self._quarantine = path / "shards", path / "quarantine"
        self._lock = threading.RLock()
        self._touched: dict[str, float] = {}
        try:
            self._shards.mkdir(parents=True, exist_ok=True)
            self._index = self._open_index()
        except (OSError, sqlite3.DatabaseError, DamagedIndexError) as error:
            raise StoreError(f"no store can be opened at {path} ({error}); name a folder on a local disk") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the index."""
        with self._lock:
            self._index.close()

    def get(self, keys: Sequence[bytes]) -> dict[bytes, PackedRecord]:
        """The records that are there and undamaged."""
        try:
            places = self._with_index(lambda index: index.lookup(keys))
            found: dict[bytes, PackedRecord] = {}
            for name, wanted in places.items():
                found.update(self._read(name, set(wanted)))
            self._touch(list(places))
        except (OSError, StoreError) as error:
            LOG.warning("the store at %s cannot be read, scores are made again: %s", self.path, error)
            return {}
        return found

    def put(self, records: Mapping[bytes, PackedRecord]) -> None:
        """Keep records; what does not fit on the disk is not kept."""
        try:
            for part in _shard_sized(records):
                # The index comes last: a reader never finds a shard that is not there yet.
                name, size = write_shard(self._shards, part)
                self._enter(name, size, part)
            if self._max_bytes is not None:
                self._evict(self._max_bytes)
        except (OSError, StoreError) as error:
            LOG.warning("the store at %s cannot be written, scores are not kept: %s", self.path, error)

    def stats(self) -> StoreStats:
        """The store in figures."""
        return self._with_index(
            lambda index: StoreStats(
                records=index.records(),
                shards=len(index.names()),
                shard_bytes=index.total_bytes(),
                index_bytes=sum(file.stat().st_size for file in self.path.glob("index.sqlite*")),
                quarantined=sum(1 for _ in self._quarantine.glob("*")) if self._quarantine.is_dir() else 0,
            )
        )

    def verify(self) -> list[str]:
        """Read every byte; what is damaged goes to quarantine and is named here."""
        # An index that cannot be opened was made again on opening; a subtler damage is found here.
        problems = [f"index: {problem}" for problem in self._with_index(lambda index: index.check())]
        if problems:
            with self._lock:
                self._index.close()
                self._index = self._remade(problems[0])
        for name in self._with_index(lambda index: index.names()):
            try:
                read_shard(self._shards, name)
            except DamagedShardError as error:
                self._set_aside(name, str(error))
                problems.append(str(error))
            except FileNotFoundError:
                self._forget(name)
                problems.append(f"shard {name} is missing")
        return problems

    def gc(self, max_bytes: int | None = None) -> Swept:
        """Enter shards that the index does not know, delete abandoned partial files, evict down to ``max_bytes``."""
        known = set(self._with_index(lambda index: index.names()))
        adopted = [name for name in self._names_on_disk() if name not in known and self._adopt(name)]
        old = time.time() - ABANDONED_S
        partial = [file for file in self._shards.rglob(f"*{PART}") if file.stat().st_mtime < old]
        for file in partial:
            file.unlink(missing_ok=True)
        limit = max_bytes if max_bytes is not None else self._max_bytes
        evicted = 0 if limit is None else self._evict(limit)
        return Swept(evicted=evicted, adopted=len(adopted), partial=len(partial))

    def records(self) -> Iterator[tuple[bytes, PackedRecord]]:
        """Every undamaged record with its key, shard by shard."""
        for name in self._with_index(lambda index: index.names()):
            yield from self._read(name, None).items()

    def _read(self, name: str, wanted: Collection[bytes] | None) -> dict[bytes, PackedRecord]:
        try:
            return read_shard(self._shards, name, wanted)
        except FileNotFoundError:
            # Evicted by another process after the look-up.
            return {}
        except DamagedShardError as error:
            self._set_aside(name, str(error))
            return {}

    def _set_aside(self, name: str, problem: str) -> None:
        """Put a damaged shard where nobody reads it."""
        LOG.warning("%s; moved to %s, its records are scored again", problem, self._quarantine)
        self._quarantine.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            shard_path(self._shards, name).replace(self._quarantine / f"{name}{SUFFIX}")
        self._forget(name)

    def _enter(self, name: str, size: int, keys: Iterable[bytes]) -> None:
        self._with_index(lambda index: index.add(name, size, keys))

    def _forget(self, name: str) -> None:
        self._with_index(lambda index: index.forget(name))

    def _adopt(self, name: str) -> bool:
        """Enter a shard file; one that is damaged is set aside."""
        found = self._read(name, None)
        if found:
            self._enter(name, shard_path(self._shards, name).stat().st_size, found)
        return bool(found)

    def _evict(self, max_bytes: int) -> int:
        dropped = self._with_index(lambda index: index.forget_coldest(max_bytes))
        for name in dropped:
            shard_path(self._shards, name).unlink(missing_ok=True)
        return len(dropped)

    def _touch(self, names: Sequence[str]) -> None:
        now = time.monotonic()
        stale = [name for name in names if now - self._touched.get(name, -TOUCH_S) >= TOUCH_S]
        if stale:
            self._touched.update(dict.fromkeys(stale, now))
            self._with_index(lambda index: index.touch(stale))

    def _with_index(self, work: Callable[[ShardIndex], T]) -> T:
        """Run ``work`` on the index, once more on a new one if it is damaged; StoreError if that does not help."""
        with self._lock:
            try:
                if self._index.replaced:
                    self._index.close()
                    self._index = self._open_index()
                try:
                    return self._index.guarded(lambda: work(self._index))
                except DamagedIndexError as error:
                    self._index.close()
                    self._index = self._remade(str(error))
                    return self._index.guarded(lambda: work(self._index))
            except (sqlite3.DatabaseError, DamagedIndexError, OSError) as error:
                raise StoreError(f"the index of {self.path} cannot be used: {error}") from error

    def _open_index(self) -> ShardIndex:
        try:
            return ShardIndex(self.path / "index.sqlite")
        except DamagedIndexError as error:
            return self._remade(str(error))

    def _remade(self, problem: str) -> ShardIndex:
        """The index, made again from the shards unless another process has just done so."""
        with FileLock(self.path / "index.lock"):
            try:
                index = ShardIndex(self.path / "index.sqlite")
                if not index.guarded(index.check):
                    return index
                index.close()
            except DamagedIndexError:
                pass
            LOG.warning("the index of %s is damaged (%s); it is made again from the shards", self.path, problem)
            self._quarantine.mkdir(exist_ok=True)
            for file in self.path.glob("index.sqlite*"):
                file.replace(self._quarantine / f"{file.name}.{time.time_ns()}")
            index = ShardIndex(self.path / "index.sqlite")
            for name in self._names_on_disk():
                with suppress(DamagedShardError, FileNotFoundError):
                    found = read_shard(self._shards, name)
                    index.add(name, shard_path(self._shards, name).stat().st_size, found)
            return index

    def _names_on_disk(self) -> list[str]:
        return sorted(file.name.removesuffix(SUFFIX) for file in self._shards.rglob(f"*{SUFFIX}"))


def _shard_sized(records: Mapping[bytes, PackedRecord]) -> Iterator[dict[bytes, PackedRecord]]:
    part: dict[bytes, PackedRecord] = {}
    size = 0
    for key, record in records.items():
        if part and (size + record.nbytes > SHARD_BYTES or len(part) == MOST_RECORDS):
            yield part
            part, size = {}, 0
        part[key] = record
        size += record.nbytes
    if part:
        yield part
