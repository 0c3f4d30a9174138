"""A safetensors file written tensor by tensor, from weights that are gathered or merged one at a time.

    8 bytes, little-endian: length of the header | header, JSON: name -> dtype, shape, data_offsets | data

The writer holds one whole tensor at a time, so that a model that is spread over many processes, or whose adapters are
merged on the way, never stands whole in memory.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncopd.errors import CheckpointError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LazyWeight:
    """A weight whose values are made when they are asked for.

    read         gives the whole tensor, of ``shape`` and ``dtype``
    collective   whether every rank must call ``read`` at the same place of the same order
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]
    collective: bool


Weights = Mapping[str, Tensor | LazyWeight]
"""Weights by name; all ranks have the same names in the same order."""


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or gathered from the ranks over which it is spread, which must then all ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of the tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lazily(tensor: Tensor) -> Tensor | LazyWeight:
    """The tensor itself, or what gathers it."""
    if not isinstance(tensor, DTensor):
        return tensor
    return LazyWeight(shape=tensor.shape, dtype=tensor.dtype, read=tensor.full_tensor, collective=True)


def materialised(weight: Tensor | LazyWeight) -> Tensor:
    """The values of a weight, detached."""
    return (weight.read() if isinstance(weight, LazyWeight) else weight).detach()


def snapshot(weights: Weights, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """A copy in host memory, the floating-point weights as ``dtype`` (None keeps theirs); the other ranks take part."""
    return {
        name: materialised(weights[name]).to("cpu", stored_dtype(weights[name], dtype), copy=True)
        for name in file_order(weights, dtype)
    }


def take_part(weights: Weights, dtype: torch.dtype | None = None) -> None:
    """What the other ranks do while rank 0 writes ``weights`` with the same ``dtype``; nothing unless sharded."""
    for name in file_order(weights, dtype):
        weight = weights[name]
        if isinstance(weight, LazyWeight) and weight.collective:
            weight.read()


def write_safetensors(path: Path, weights: Weights, dtype: torch.dtype | None = None) -> None:
    """Write ``weights`` to ``path``, the floating-point ones as ``dtype`` (None keeps theirs)."""
    names = file_order(weights, dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape, stored = list(weights[name].shape), stored_dtype(weights[name], dtype)
        if stored not in _DTYPES:
            raise CheckpointError(f"{name} has dtype {stored}; a weight file takes {sorted(map(str, _DTYPES))}")
        begin, end = end, end + torch.Size(shape).numel() * stored.itemsize
        header[name] = {"dtype": _DTYPES[stored], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers map the file into memory, so the data begins at a multiple of the largest element.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            values = materialised(weights[name]).to("cpu", stored_dtype(weights[name], dtype)).contiguous()
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)


def stored_dtype(weight: Tensor | LazyWeight, dtype: torch.dtype | None) -> torch.dtype:
    """What a weight is published as, where floating-point ones are as ``dtype`` (None keeps theirs)."""
    return dtype if dtype is not None and weight.dtype.is_floating_point else weight.dtype


def file_order(weights: Weights, dtype: torch.dtype | None) -> list[str]:
    """Largest elements first, so that every tensor is aligned."""
    return sorted(weights, key=lambda name: -stored_dtype(weights[name], dtype).itemsize)
