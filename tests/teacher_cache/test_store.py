"""The store: what is put in comes out, damaged or not at all; several processes; a size cap."""

import errno
import resource
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from teacher_cache import store as store_module
from teacher_cache.bundle import PackedRecord
from teacher_cache.cached_scorer import CachedScorer
from teacher_cache.codec import pack_record
from teacher_cache.errors import ScoringError, StoreError
from teacher_cache.key import record_key
from teacher_cache.record import TeacherRecord
from teacher_cache.store import RecordStore
from tests.teacher_cache.build_requests import (
    IDENTITY,
    VOCABULARY,
    CountingScorer,
    assert_same,
    make_request,
    score_one,
)

ROOT = Path(__file__).parents[2]


def entry(number: int, length: int = 7) -> tuple[bytes, PackedRecord]:
    request = make_request(number, length=length, design="systematic(4)")
    return record_key(IDENTITY.fingerprint, request), pack_record(score_one(request), request, vocabulary=VOCABULARY)


def put(store: RecordStore, *numbers: int) -> None:
    store.put(dict(entry(number) for number in numbers))


def cached(store: RecordStore, inner: CountingScorer, precision: str = "fp32") -> CachedScorer:
    return CachedScorer(lambda: inner, store, identity=IDENTITY, precision=precision)


def test_a_hit_is_bit_for_bit_what_was_scored_and_asks_no_teacher(tmp_path: Path) -> None:
    requests = [make_request(n, design="systematic(4)", draw="gumbel(3)") for n in range(6)]
    first, second = CountingScorer(), CountingScorer()
    with RecordStore(tmp_path) as store:
        before = cached(store, first).score(requests)
    with RecordStore(tmp_path) as store:
        after = cached(store, second).score(requests[::-1])[::-1]
    assert (first.scored, second.scored) == (6, 0)
    for one, other in zip(before, after, strict=True):
        assert isinstance(one, TeacherRecord)
        assert isinstance(other, TeacherRecord)
        assert_same(one, other)


def test_a_shard_takes_no_more_records_than_one_file_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_RECORDS", 3)
    with RecordStore(tmp_path) as store:
        put(store, *range(7))
        assert (store.stats().records, store.stats().shards) == (7, 3)


def test_a_warm_cache_never_loads_the_teacher(tmp_path: Path) -> None:
    def load() -> CountingScorer:
        raise AssertionError("loaded")

    with RecordStore(tmp_path) as store:
        cached(store, CountingScorer()).score([make_request(1)])
        assert CachedScorer(load, store, identity=IDENTITY).score([make_request(1)])


def test_an_error_is_not_remembered_and_costs_no_neighbour(tmp_path: Path) -> None:
    inner = CountingScorer()
    with RecordStore(tmp_path) as store:
        scorer = cached(store, inner)
        for _ in range(2):
            good, bad = scorer.score([make_request(1), make_request(2, length=80)])
            assert isinstance(good, TeacherRecord)
            assert isinstance(bad, ScoringError)
    assert inner.scored == 3
    assert (scorer.counts.hits, scorer.counts.misses) == (1, 3)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_a_damaged_shard_is_set_aside_and_scored_again(tmp_path: Path, damage: str) -> None:
    requests = [make_request(n, design="systematic(4)") for n in range(3)]
    with RecordStore(tmp_path) as store:
        cached(store, CountingScorer()).score(requests)
        (shard,) = (tmp_path / "shards").rglob("*.safetensors")
        data = shard.read_bytes()
        if damage == "gone":
            shard.unlink()
        else:
            shard.write_bytes({"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-9], "empty": b""}[damage])
        inner = CountingScorer()
        for request, record in zip(requests, cached(store, inner).score(requests), strict=True):
            assert isinstance(record, TeacherRecord)
            assert_same(record, score_one(request))
        assert inner.scored >= 1
        assert store.stats().quarantined == (damage != "gone")
        assert store.verify() == []


def flipped_everywhere(folder: Path, stride: int) -> None:
    """Flip every ``stride``-th byte of every file of a store; whatever comes out must be right."""
    made, tried = folder / "made", folder / "tried"
    requests = [make_request(n, design="systematic(4)", draw="systematic(2)") for n in range(3)]
    with RecordStore(made) as store:
        cached(store, CountingScorer()).score(requests[:2])
        cached(store, CountingScorer()).score(requests[2:])
    expected = [score_one(request) for request in requests]
    for file in sorted(path for path in made.rglob("*") if path.is_file()):
        data = file.read_bytes()
        for place in range(0, len(data), stride):
            shutil.rmtree(tried, ignore_errors=True)
            shutil.copytree(made, tried)
            damaged = data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :]
            (tried / file.relative_to(made)).write_bytes(damaged)
            with RecordStore(tried) as store:
                for _ in range(2):
                    results = cached(store, CountingScorer()).score(requests)
                    for result, right in zip(results, expected, strict=True):
                        assert isinstance(result, TeacherRecord)
                        assert_same(result, right)


def test_a_flipped_byte_anywhere_is_found_or_harmless(tmp_path: Path) -> None:
    flipped_everywhere(tmp_path, 211)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thousands_of_flipped_bytes_one_at_a_time_are_found_or_harmless(tmp_path: Path) -> None:
    flipped_everywhere(tmp_path, 5)


def test_an_index_that_is_no_database_is_made_again_from_the_shards(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as store:
        put(store, 1, 2)
        put(store, 3)
    (tmp_path / "index.sqlite").write_bytes(b"not a database" * 500)
    with RecordStore(tmp_path) as store:
        assert len(store.get([entry(n)[0] for n in (1, 2, 3)])) == 3
        assert store.stats().quarantined == 1


def test_two_stores_open_at_once_survive_one_of_them_remaking_the_index(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as one, RecordStore(tmp_path) as other:
        put(one, 1)
        one._index.close()
        for file in tmp_path.glob("index.sqlite*"):
            file.unlink()
        with RecordStore(tmp_path) as third:
            assert third.gc().adopted == 1
            put(other, 2)
            assert len(third.get([entry(1)[0], entry(2)[0]])) == 2


def test_the_least_recently_used_shards_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "TOUCH_S", 0.0)
    with RecordStore(tmp_path / "measure") as store:
        put(store, 1)
        size = store.stats().shard_bytes
    with RecordStore(tmp_path / "capped", max_bytes=3 * size + size // 2) as store:
        for number in (1, 2, 3):
            put(store, number)
        assert store.get([entry(1)[0]])
        put(store, 4)
        assert [bool(store.get([entry(n)[0]])) for n in (1, 2, 3, 4)] == [True, False, True, True]
        assert store.stats().shard_bytes <= 3 * size + size // 2
        assert len(list((tmp_path / "capped" / "shards").rglob("*.safetensors"))) == 3


def test_a_full_disk_costs_the_cache_and_not_the_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with RecordStore(tmp_path) as store:
        monkeypatch.setattr(Path, "write_bytes", full)
        (record,) = cached(store, CountingScorer()).score([make_request(1)])
        monkeypatch.undo()
        assert isinstance(record, TeacherRecord)
        assert [file for file in (tmp_path / "shards").rglob("*") if file.is_file()] == []
        assert store.stats().records == 0


@pytest.mark.parametrize("limit", [1, 3000, 40_000])
def test_a_system_that_lets_files_grow_no_more_costs_the_cache_and_not_the_score(tmp_path: Path, limit: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    requests = [make_request(number, length=50, design="systematic(16)") for number in range(30)]
    with RecordStore(tmp_path) as store:
        put(store, 50)
        inner = CountingScorer()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            results = [cached(store, inner).score([request])[0] for request in (*requests, *requests)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for result, request in zip(results, (*requests, *requests), strict=True):
            assert isinstance(result, TeacherRecord)
            assert_same(result, score_one(request))
        put(store, 51)
        assert len(store.get([entry(50)[0], entry(51)[0]])) == 2
        assert store.verify() == []
        assert not list((tmp_path / "shards").rglob("*.part"))


def test_a_full_index_costs_the_cache_and_not_the_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RecordStore(tmp_path) as store:
        put(store, 0)
        store._index._connection.execute("PRAGMA max_page_count = 1")
        inner = CountingScorer()
        for number in range(40):
            (record,) = cached(store, inner).score([make_request(number, length=1)])
            assert isinstance(record, TeacherRecord)
        assert store.get([entry(0)[0]])


def test_gc_adopts_what_a_killed_writer_left_and_deletes_old_partial_files(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as store:
        store_module.write_shard(tmp_path / "shards", dict([entry(5)]))
        partial = tmp_path / "shards" / "x.1.part"
        partial.write_bytes(b"half")
        assert store.gc().partial == 0
        store_module.ABANDONED_S, kept = -1.0, store_module.ABANDONED_S
        swept = store.gc()
        store_module.ABANDONED_S = kept
        assert (swept.adopted, swept.partial) == (0, 1)
        assert store.get([entry(5)[0]])


def test_verify_names_damage_and_heals(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as store:
        put(store, 1)
        put(store, 2)
        shards = sorted((tmp_path / "shards").rglob("*.safetensors"))
        data = shards[0].read_bytes()
        # A byte of the header's padding: no record is hurt, the file is.
        shards[0].write_bytes(data[:8] + data[8:].replace(b" ", b"\t", 1) if b" " in data else data[:-1] + b"?")
        shards[1].unlink()
        problems = store.verify()
        assert len(problems) == 2
        assert shards[0].stem in " ".join(problems)
        assert store.verify() == []
        assert store.stats().records == 0


_WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from teacher_cache.store import RecordStore
from tests.teacher_cache.test_store import entry, put
first = int(sys.argv[1])
with RecordStore(Path({store!r})) as store:
    for number in range(first, first + 12):
        put(store, number % 18)
        assert entry(number % 18)[0] in store.get([entry(number % 18)[0]])
"""


def test_several_processes_read_and_write_one_store(tmp_path: Path) -> None:
    script = _WRITER.format(root=str(ROOT), store=str(tmp_path))
    processes = [subprocess.Popen([sys.executable, "-c", script, str(first)]) for first in (0, 6)]
    assert [process.wait(120) for process in processes] == [0, 0]
    with RecordStore(tmp_path) as store:
        assert store.stats().records == 18
        assert store.verify() == []


def test_a_store_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="name a folder"):
        RecordStore(tmp_path / "file")
    with pytest.raises(StoreError, match="at least 1"):
        RecordStore(tmp_path, max_bytes=0)


def test_a_busy_index_is_waited_for_not_remade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RecordStore(tmp_path) as store:
        put(store, 1)
        store._index._connection.execute("PRAGMA busy_timeout = 10")
        blocker = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        put(store, 2)
        assert store.get([entry(1)[0]]) == {} or store.stats().quarantined == 0
        blocker.execute("ROLLBACK")
        blocker.close()
        assert store.get([entry(1)[0]])
        assert store.stats().quarantined == 0
