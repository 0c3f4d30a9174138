"""Files that appear whole or not at all, and checksums that tell whether they still are."""

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from asyncopd.errors import LedgerError
from asyncopd.queue.rows import PayloadRef

PAYLOADS = "payloads"
"""Folder of all payloads in the run folder."""
PACK_BYTES = 2**20
"""Payloads that are written at once share a file up to this size; a larger one has a file of its own."""
PROMPTS_A_FOLDER = 1000
"""Prompts of an epoch whose files share a folder: file systems slow down when a folder grows without end."""


class PayloadError(LedgerError):
    """A payload is missing or is not what was written."""


def checksum(data: bytes) -> str:
    """CRC-32, which finds a torn write or a flipped bit; it is no defence against forgery."""
    return f"crc32:{zlib.crc32(data):08x}"


def write_packs(run_dir: Path, kind: str, payloads: Iterable[tuple[str, bytes]]) -> Iterator[dict[str, PayloadRef]]:
    """Write samples' payloads, (uid, data) each, a ``kind`` of its own folder; pack by pack the references, by uid.

    The references of a pack go into the ledger together, before the next pack is asked for. A pack has up to
    ``PACK_BYTES``: to create a file costs more than to write a few kilobytes, on ext4 a fifth of a small run's time
    (its search for a free inode passes over every one that was deleted lately).
    """
    pack: dict[str, bytes] = {}
    size = 0
    for uid, data in payloads:
        if pack and size + len(data) > PACK_BYTES:
            yield _write_pack(run_dir, kind, pack)
            pack, size = {}, 0
        pack[uid] = data
        size += len(data)
        if size >= PACK_BYTES:
            # Before the next one, which may be as large, is made.
            yield _write_pack(run_dir, kind, pack)
            pack, size = {}, 0
    if pack:
        yield _write_pack(run_dir, kind, pack)


def _write_pack(run_dir: Path, kind: str, pack: dict[str, bytes]) -> dict[str, PayloadRef]:
    """The name holds the checksums, so that a worker whose lease was lost never overwrites another one's pack."""
    uid = next(iter(pack))
    epoch, position = uid.split("-")[:2]
    checks = [checksum(data) for data in pack.values()]
    name = f"{uid}.{checksum(''.join(checks).encode())[-8:]}.pack"
    path = f"{PAYLOADS}/{kind}/{epoch}/{int(position) // PROMPTS_A_FOLDER}/{name}"
    write_whole(run_dir, path, b"".join(pack.values()))
    starts = accumulate((len(data) for data in pack.values()), initial=0)
    return {
        uid: PayloadRef(path=path, offset=start, bytes=len(data), checksum=check)
        for (uid, data), start, check in zip(pack.items(), starts, checks, strict=False)
    }


def write_whole(run_dir: Path, path: str, data: bytes) -> None:
    """Write under a temporary name, then rename: a reader sees all of it or none.

    There is no fsync, which would cost more than the queue itself. After a loss of power a file may be torn;
    ``resume`` checks every payload that it keeps and has the others made again.
    """
    target = run_dir / path
    temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        try:
            temporary.write_bytes(data)
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
        temporary.replace(target)
    except OSError as error:
        # What was written of it would keep a full disk full.
        with suppress(OSError):
            temporary.unlink()
        raise PayloadError(
            f"{target} cannot be written ({error.strerror}); free space or make the run folder writable, then resume"
        ) from error


def read_checked(run_dir: Path, ref: PayloadRef) -> bytes:
    """The payload's bytes; PayloadError names the file if it is missing, short or damaged."""
    target = run_dir / ref.path
    try:
        with target.open("rb") as pack:
            pack.seek(ref.offset)
            data = pack.read(ref.bytes)
    except OSError as error:
        raise PayloadError(f"{target} cannot be read ({error.strerror}); resume makes the sample again") from error
    if len(data) != ref.bytes:
        raise PayloadError(
            f"{target} has {len(data)} bytes at {ref.offset}; expected {ref.bytes}: resume makes the sample again"
        )
    found = checksum(data)
    if found != ref.checksum:
        raise PayloadError(
            f"{target} has checksum {found} at {ref.offset}; expected {ref.checksum}: resume makes the sample again"
        )
    return data


def is_whole(run_dir: Path, ref: PayloadRef) -> bool:
    """Whether the payload is there and undamaged."""
    try:
        read_checked(run_dir, ref)
    except PayloadError:
        return False
    return True


def sweep(run_dir: Path, keep: set[str]) -> int:
    """Delete payload files, whole or partial, that are not in ``keep`` (paths relative to the run folder); how many.

    Only while no worker runs: a worker writes a payload before the ledger knows of it.
    """
    deleted = 0
    for found in (run_dir / PAYLOADS).rglob("*"):
        if found.is_file() and found.relative_to(run_dir).as_posix() not in keep:
            found.unlink()
            deleted += 1
    return deleted


def delete_payloads(run_dir: Path, packs: Sequence[str]) -> None:
    """Delete the files that ``Ledger.forget_payloads`` named; those that are gone already are no error."""
    for path in packs:
        (run_dir / path).unlink(missing_ok=True)
