"""A weight file is written tensor by tensor, and any reader of safetensors reads it."""

import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from asyncopd.errors import CheckpointError
from asyncopd.publish.stream import LazyWeight, take_part, write_safetensors

MIXED = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(3, dtype=torch.float16),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "matrix": torch.arange(15, dtype=torch.float32).reshape(5, 3).T,
    "double": torch.tensor([0.1, -2.0], dtype=torch.float64),
}


def test_a_file_holds_what_it_was_given_whatever_dtypes_and_strides(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "w.safetensors", MIXED)
    stored = load_file(tmp_path / "w.safetensors")
    assert stored.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor)
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_floating_point_weights_are_cast_and_the_others_are_not(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "w.safetensors", MIXED, torch.bfloat16)
    stored = load_file(tmp_path / "w.safetensors")
    assert {stored[name].dtype for name in ("half", "matrix", "double", "empty")} == {torch.bfloat16}
    assert torch.equal(stored["double"], MIXED["double"].to(torch.bfloat16))
    assert torch.equal(stored["flags"], MIXED["flags"])


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="wave has dtype torch.complex64"):
        write_safetensors(tmp_path / "w.safetensors", {"wave": torch.zeros(2, dtype=torch.complex64)})


class _Gathered:
    """Lazy weights that record the order in which they are read and how many stand whole at once."""

    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        self.order: list[str] = []
        self.most = 0
        self._alive: list[weakref.ref[Tensor]] = []
        self.weights = {name: self._lazy(name, dtype) for name, dtype in dtypes.items()}

    def _lazy(self, name: str, dtype: torch.dtype) -> LazyWeight:
        def read() -> Tensor:
            self.order.append(name)
            values = torch.full((4, 2), float(len(self.order)), dtype=dtype)
            self._alive.append(weakref.ref(values))
            self.most = max(self.most, sum(each() is not None for each in self._alive))
            return values

        return LazyWeight(shape=torch.Size([4, 2]), dtype=dtype, read=read, collective=True)


DTYPES = {"a": torch.float32, "b": torch.float64, "c": torch.float32, "d": torch.bfloat16}


def test_weights_that_are_gathered_stand_whole_one_at_a_time(tmp_path: Path) -> None:
    gathered = _Gathered(DTYPES)
    write_safetensors(tmp_path / "w.safetensors", gathered.weights, torch.float32)
    assert (sorted(gathered.order), gathered.most) == (["a", "b", "c", "d"], 1)
    stored = load_file(tmp_path / "w.safetensors")
    assert all(stored[name].eq(gathered.order.index(name) + 1).all() for name in DTYPES)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_other_ranks_take_part_in_the_order_in_which_the_first_one_writes(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    first, other = _Gathered(DTYPES), _Gathered(DTYPES)
    write_safetensors(tmp_path / "w.safetensors", {"plain": torch.zeros(1), **first.weights}, dtype)
    take_part({"plain": torch.zeros(1), **other.weights}, dtype)
    assert first.order == other.order
