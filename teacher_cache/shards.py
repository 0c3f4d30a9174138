"""Shard files: some records a file, in safetensors, each with a digest that binds its bytes to its key.

A shard is written once and never changed; its name is the hash of its bytes.
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from teacher_cache.bundle import PackedRecord, bundle, unbundle
from teacher_cache.errors import CodecError

SUFFIX = ".safetensors"
PART = ".part"
_BYTES = 16
"""Of a key and of a digest."""


class DamagedShardError(CodecError):
    """A shard that is not what was written."""


def write_shard(folder: Path, records: Mapping[bytes, PackedRecord]) -> tuple[str, int]:
    """Write records under a temporary name, then rename; the shard's name and bytes. OSError if the disk refuses."""
    columns = {"keys": _column(records), "digests": _column(record_digest(*item) for item in records.items())}
    data = bundle(list(records.values()), {}, columns)
    name = blake2b(data, digest_size=_BYTES).hexdigest()
    target = shard_path(folder, name)
    temporary = target.with_name(f"{name}.{os.getpid()}{PART}")
    try:
        target.parent.mkdir(exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(target)
    except OSError:
        # What was written of it would keep a full disk full.
        with suppress(OSError):
            temporary.unlink()
        raise
    return name, len(data)


def read_shard(folder: Path, name: str, wanted: Collection[bytes] | None = None) -> dict[bytes, PackedRecord]:
    """The wanted records of a shard, or all, each checked against its digest.

    OSError if the file is not there (evicted, for one); DamagedShardError if a wanted record is not what was written,
    or, where all are asked for, if any byte of the file is not.
    """
    data = shard_path(folder, name).read_bytes()
    if wanted is None and blake2b(data, digest_size=_BYTES).hexdigest() != name:
        raise DamagedShardError(f"shard {name} has other bytes than when it was written")
    try:
        shard = unbundle(data)
        keys, digests = (_from_column(shard.columns[name]) for name in ("keys", "digests"))
        found = {}
        for key, digest, record in zip(keys, digests, shard.records, strict=True):
            if wanted is None or key in wanted:
                if record_digest(key, record) != digest:
                    raise DamagedShardError(
                        f"shard {name}: record {key.hex()} has other bytes than when it was written"
                    )
                found[key] = record
    except DamagedShardError:
        raise
    except (CodecError, KeyError, TypeError, ValueError) as error:
        raise DamagedShardError(f"shard {name}: {error}") from error
    if wanted is not None and (missing := set(wanted) - found.keys()):
        raise DamagedShardError(f"shard {name} lacks {len(missing)} records that the index says it has")
    return found


def shard_path(folder: Path, name: str) -> Path:
    """Where the shard of that name is."""
    # File systems slow down when a folder grows without end.
    return folder / name[:2] / f"{name}{SUFFIX}"


def record_digest(key: bytes, record: PackedRecord) -> bytes:
    """Hash of a record under its key: names, dtypes, shapes and bytes of all that it consists of."""
    digest = blake2b(key, digest_size=_BYTES)
    digest.update(json.dumps(record.told, sort_keys=True).encode())
    for name in sorted(record.tensors):
        tensor = record.tensors[name].contiguous()
        digest.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.digest()


def _column(values: Iterable[bytes]) -> Tensor:
    return torch.frombuffer(bytearray().join(values), dtype=torch.uint8)


def _from_column(column: Tensor) -> list[bytes]:
    data = bytes(column.tolist())
    return [data[start : start + _BYTES] for start in range(0, len(data), _BYTES)]
