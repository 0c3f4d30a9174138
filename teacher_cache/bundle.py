"""Several packed records as one safetensors file, the same on the wire and on disk.

    tensor records   the bytes of every tensor of every record, one after the other
    tensor NAME      what belongs to the file as a whole, such as the keys of its records
    metadata told    JSON: what the file as a whole says, the kinds of records, and of each record (kind, length)

Records of a design differ in nothing but their length and their numbers, so what they say in common is written once: a
kind is the plain values of a record and the names, dtypes and shapes of its tensors, the length left open.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from teacher_cache.errors import CodecError

LAYOUT = 2
"""Version of the layout; another one is refused."""

_DTYPES = {"u8": torch.uint8, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_RECORDS = "records"
MOST_RECORDS = 2**16
_MOST_TENSORS = 8
_MOST_DIMENSIONS = 4
_LONGEST = 2**40
"""Limits of what a reader believes: a kind is written once, so few bytes could ask for endless empty tensors."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRecord:
    """A record, or the error in its place, ready to be written.

    told      plain values for a JSON header
    tensors   by name; uint8 or floating point
    """

    told: dict[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bundle:
    """What a file holds.

    told      plain values of the file as a whole
    columns   uint8 tensors of the file as a whole, by name
    """

    told: dict[str, Any]
    columns: Mapping[str, Tensor]
    records: Sequence[PackedRecord]


def bundle(
    records: Sequence[PackedRecord], told: Mapping[str, Any], columns: Mapping[str, Tensor] | None = None
) -> bytes:
    """The file of some records; CodecError for more than MOST_RECORDS."""
    if len(records) > MOST_RECORDS:
        raise CodecError(f"{len(records)} records in one file; expected at most {MOST_RECORDS}: make several files")
    kinds: dict[str, int] = {}
    places: list[list[int]] = []
    parts: list[Tensor] = []
    for record in records:
        length = max((len(tensor) for tensor in record.tensors.values()), default=0)
        kind = json.dumps([record.told, _shapes(record, length)], separators=(",", ":"))
        places.append([kinds.setdefault(kind, len(kinds)), length])
        parts += [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in record.tensors.values()]
    header = {
        "bundle": LAYOUT,
        **told,
        "kinds": [json.loads(kind) for kind in kinds],
        "records": places,
    }
    tensors = {**(columns or {}), _RECORDS: torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)}
    return save(tensors, metadata={"told": json.dumps(header, separators=(",", ":"))})


def unbundle(data: bytes) -> Bundle:
    """What ``bundle`` was given; CodecError for anything else, whatever it is."""
    try:
        # The layout of safetensors: the length of a JSON header as 8 bytes, little-endian, then the header.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        told = json.loads(header["__metadata__"]["told"])
        if told["bundle"] != LAYOUT:
            raise CodecError(f"a bundle of layout {told['bundle']!r}; expected {LAYOUT}: use one version on both sides")
        columns = load(data)
        kinds, reader = told["kinds"], _Reader(columns.pop(_RECORDS))
        if len(told["records"]) > MOST_RECORDS:
            raise CodecError(f"{len(told['records'])} records in one file; expected at most {MOST_RECORDS}")
        records = [reader.record(kinds[_whole(kind)], _whole(length)) for kind, length in told["records"]]
        reader.finish()
        return Bundle(told=told, columns=columns, records=records)
    except (
        SafetensorError,
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        RuntimeError,
        RecursionError,
        AttributeError,
    ) as error:
        raise CodecError(f"not a bundle of records: {error}") from error


class _Reader:
    """Takes records from the front of the bytes of all."""

    def __init__(self, data: Tensor) -> None:
        if data.dtype != torch.uint8 or data.ndim != 1:
            raise CodecError(f"the records are {data.dtype} {tuple(data.shape)}; expected bytes")
        self._data = data
        self._at = 0

    def record(self, kind: Any, length: int) -> PackedRecord:
        told, shapes = kind
        if len(shapes) > _MOST_TENSORS or any(len(shape) > _MOST_DIMENSIONS for _, _, shape in shapes):
            raise CodecError("a record of more tensors, or of more dimensions, than there are")
        return PackedRecord(
            told=dict(told),
            tensors={
                str(name): self._tensor(_DTYPES[dtype], [length if size is None else _whole(size) for size in shape])
                for name, dtype, shape in shapes
            },
        )

    def finish(self) -> None:
        if self._at != len(self._data):
            raise CodecError(f"{len(self._data)} bytes of records, of which {self._at} are used")

    def _tensor(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._data) - self._at:
            raise CodecError(f"a tensor of {size} bytes where {len(self._data) - self._at} are left")
        # A copy begins at an address that every dtype accepts, and does not keep the whole file in memory.
        taken = self._data[self._at : self._at + size].clone()
        self._at += size
        return taken.view(dtype).reshape(shape)


def _shapes(record: PackedRecord, length: int) -> list[list[Any]]:
    """Name, dtype and shape of each tensor; None stands for the record's length."""
    shapes = []
    for name, tensor in record.tensors.items():
        first, *rest = tensor.shape
        shapes.append([name, _NAMES[tensor.dtype], [None if first == length else first, *rest]])
    return shapes


def _whole(value: Any) -> int:
    """A size or an index."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LONGEST:
        raise CodecError(f"{value!r} where a whole number is expected")
    return value
