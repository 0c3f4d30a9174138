"""Keys and values of a running batch whose rows come and go.

Shape suffixes: B rows, H key-value heads, L positions, D head size.

One buffer a layer, with room for more positions: a decode step writes in place, a row that leaves costs one copied row,
and a row that joins is written into a free slot. Rows are padded on the left, so all end at the same position.
"""

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

HEADROOM = 64
"""Positions allocated ahead of need."""


class GrowingLayer(DynamicLayer):
    """A cache layer whose ``keys`` and ``values`` [B, H, L, D] are views into larger buffers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new positions; all keys and values of the layer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, length = key_states.shape[0], self.get_seq_length()
        needed = length + key_states.shape[-2]
        if not self.buffers:
            self.buffers = [_allocate(states, rows, needed) for states in (key_states, value_states)]
        elif needed > self.buffers[0].shape[2]:
            self.move(rows, start=0, new_start=0, length=length, new_length=needed)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:rows, :, length:needed] = states
        return self.view(rows, needed)

    def view(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Let ``keys`` and ``values`` cover the first ``rows`` and ``length`` of the buffers."""
        key_buffer, value_buffer = self.buffers
        self.keys, self.values = key_buffer[:rows, :, :length], value_buffer[:rows, :, :length]
        return self.keys, self.values

    def move(self, rows: int, *, start: int, new_start: int, length: int, new_length: int) -> None:
        """New buffers for ``rows`` and ``new_length``, holding positions [start, length) from ``new_start`` on."""
        kept = min(rows, self.keys.shape[0])
        buffers = []
        for old in self.buffers:
            buffer = _allocate(old, rows, new_length)
            buffer[:kept, :, new_start : new_start + length - start] = old[:kept, :, start:length]
            buffers.append(buffer)
        self.buffers = buffers


def _allocate(like: Tensor, rows: int, length: int) -> Tensor:
    # Zeros, because a masked position still enters a product with weight 0, and 0 times garbage may be NaN.
    return like.new_zeros((rows, like.shape[1], length + HEADROOM, like.shape[3]))


class RowCache(Cache):
    """The cache of a whole model over rows that end together at position ``length``."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)

    @property
    def length(self) -> int:
        """Positions held, padding included."""
        return self.layers[0].keys.shape[2]

    @property
    def rows(self) -> int:
        return self.layers[0].keys.shape[0]

    @property
    def full(self) -> bool:
        """Whether the next position needs new buffers."""
        return self.length == self.layers[0].buffers[0].shape[2]

    def add_rows(self, other: "RowCache") -> None:
        """Append the rows of ``other``; the shorter of the two is padded on the left."""
        length, rows = max(self.length, other.length), self.rows + other.rows
        fits = length == self.length and rows <= self.layers[0].buffers[0].shape[0]
        shift, offset, first = length - self.length, length - other.length, self.rows
        for layer, joining in zip(self.layers, other.layers, strict=True):
            if not fits:
                layer.move(rows, start=0, new_start=shift, length=length - shift, new_length=length)
            for buffer, states in zip(layer.buffers, (joining.keys, joining.values), strict=True):
                buffer[first:rows, :, :offset] = 0
                buffer[first:rows, :, offset:length] = states
            layer.view(rows, length)

    def remove_row(self, index: int) -> None:
        """Forget one row; the last row takes its place."""
        last, length = self.rows - 1, self.length
        for layer in self.layers:
            if index != last:
                for buffer in layer.buffers:
                    buffer[index, :, :length] = buffer[last, :, :length]
            layer.view(last, length)

    def trim(self, positions: int) -> None:
        """Forget the first ``positions`` of every row (padding that all share) and make room at the end."""
        rows, length = self.rows, self.length
        for layer in self.layers:
            layer.move(rows, start=positions, new_start=0, length=length, new_length=length - positions)
            layer.view(rows, length - positions)
