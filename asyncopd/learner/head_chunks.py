"""A head's logits one chunk of tokens at a time: products, softmax and gradients, in buffers that are used again.

Shape suffixes: T tokens, H hidden size, R head rows, V real vocabulary (V <= R), C candidates a token, t tokens of one
chunk, r tokens of one block.

A chunk is as many tokens as the memory budget allows, so that the matrix products are large. On a CPU everything
between the products runs over blocks of a chunk that stay in the caches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from teacher_cache.causal_head import logit_transform

LARGEST_CHUNK = 352
"""Tokens of a chunk beyond which the products get no faster."""
LARGEST_HALF_CHUNK = 512
"""The same in bf16, whose chunk weighs half and whose products are so fast that adding their results up counts."""
BLOCK_BYTES = 4 * 2**20
"""Float32 logits of one block on a CPU: a few tensors of this size stay in the caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """How hidden states become the logprobs that the objective reads.

    vocabulary      real token ids; head rows beyond are padding and get no probability
    temperature     of the objective; divides the logits last
    logit_scale     multiplies the logits first (1 / ``logits_scaling`` of Granite)
    softcap         ``softcap * tanh(logits / softcap)`` after scaling (Gemma); None for no cap
    compute_dtype   of the matrix products; softmax and sums are float32 (float64 for float64)
    chunk_bytes     memory for what grows with a chunk's tokens times the vocabulary, in bytes
    """

    vocabulary: int
    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    compute_dtype: torch.dtype = torch.float32
    chunk_bytes: int = 256 * 2**20

    @classmethod
    def of(
        cls, model: PretrainedConfig, *, vocabulary: int, temperature: float = 1.0, chunk_bytes: int = 256 * 2**20
    ) -> "HeadShape":
        """The shape for a model."""
        factor, softcap = logit_transform(model)
        return cls(
            vocabulary=vocabulary,
            temperature=temperature,
            logit_scale=factor,
            softcap=softcap,
            chunk_bytes=chunk_bytes,
        )

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of softmax, losses and accumulated gradients."""
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def chunk_rows(self, device: torch.device, dense: bool) -> int:
        """Tokens of a chunk that keep within ``chunk_bytes``; ``dense`` when the objective reads the whole vocabulary.

        A chunk is one token at least, whatever the budget.
        """
        kept = self.compute_dtype.itemsize * (1 if self.softcap is None else 2)
        # Float32 copies of logits, probabilities and gradient: of one block on a CPU, of the chunk elsewhere.
        copies = 0 if device.type == "cpu" else 3
        # Scores, weights and what a pointwise divergence and its gradient hold are about twelve tensors of that size.
        copies += 12 if dense else 0
        row = self.vocabulary * (kept + copies * self.sum_dtype.itemsize)
        largest = LARGEST_HALF_CHUNK if self.compute_dtype.itemsize == 2 else LARGEST_CHUNK
        return min(max(1, self.chunk_bytes // row), largest)


class HeadChunks:
    """Logits of hidden states under a head, chunk by chunk; the logits of one chunk are overwritten by the next."""

    def __init__(
        self, hidden_TH: Tensor, weight_RH: Tensor, bias_R: Tensor | None, shape: HeadShape, *, dense: bool = False
    ) -> None:
        self.shape = shape
        self.hidden_TH = hidden_TH.to(shape.compute_dtype)
        self.weight_VH = weight_RH[: shape.vocabulary].to(shape.compute_dtype)
        self.bias_V = None if bias_R is None else bias_R[: shape.vocabulary].to(shape.sum_dtype)
        tokens, device = len(hidden_TH), hidden_TH.device
        parts = -(-tokens // shape.chunk_rows(device, dense))
        self._rows = -(-tokens // max(parts, 1))
        self._block = self._rows
        if device.type == "cpu":
            self._block = max(1, BLOCK_BYTES // (shape.sum_dtype.itemsize * shape.vocabulary))
        size = (self._rows, shape.vocabulary)
        self._logits = torch.empty(size, dtype=shape.compute_dtype, device=device)
        self._slopes = None if shape.softcap is None else torch.empty_like(self._logits)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows of each chunk and its raw logits [t, V] in the compute dtype."""
        for start in range(0, len(self.hidden_TH), max(self._rows, 1)):
            rows = slice(start, min(start + self._rows, len(self.hidden_TH)))
            logits_tV = self._logits[: rows.stop - rows.start]
            yield rows, torch.mm(self.hidden_TH[rows], self.weight_VH.T, out=logits_tV)

    def blocks(self, tokens: int) -> Iterator[slice]:
        """The blocks of a chunk."""
        for start in range(0, tokens, max(self._block, 1)):
            yield slice(start, min(start + self._block, tokens))

    def transformed(self, raw_rV: Tensor, block: slice) -> Tensor:
        """What the softmax takes [r, V], from the raw logits of a block; may overwrite them. Keeps the cap's slope."""
        shape, logits_rV = self.shape, raw_rV.to(self.shape.sum_dtype)
        if self.bias_V is not None:
            logits_rV += self.bias_V
        if shape.softcap is None or self._slopes is None:
            factor = shape.logit_scale / shape.temperature
            return logits_rV if factor == 1.0 else logits_rV.mul_(factor)
        capped_rV = logits_rV.mul_(shape.logit_scale / shape.softcap).tanh_()
        self._slopes[block] = 1 - capped_rV.square()
        return capped_rV.mul_(shape.softcap / shape.temperature)

    def through_transform(self, grad_rV: Tensor, block: slice) -> Tensor:
        """Gradient of the raw logits [r, V] from that of the transformed ones, in place."""
        if self._slopes is not None:
            grad_rV *= self._slopes[block]
        factor = self.shape.logit_scale / self.shape.temperature
        return grad_rV if factor == 1.0 else grad_rV.mul_(factor)


class HeadGradients:
    """Gradients of hidden states, weight and bias, summed over chunks in float32 (float64 for float64)."""

    def __init__(
        self, chunks: HeadChunks, hidden_TH: Tensor, weight_RH: Tensor, wanted: tuple[bool, bool, bool]
    ) -> None:
        self._chunks = chunks
        wants_hidden, wants_weight, wants_bias = wanted
        dtype, device, vocabulary = chunks.shape.sum_dtype, hidden_TH.device, chunks.shape.vocabulary
        self.hidden_TH = torch.empty_like(hidden_TH) if wants_hidden else None
        self.weight_RH = torch.empty(weight_RH.shape, dtype=dtype, device=device) if wants_weight else None
        self.bias_R = torch.zeros(len(weight_RH), dtype=dtype, device=device) if wants_bias else None
        if self.weight_RH is not None:
            # The first chunk writes the rows of the real vocabulary.
            self.weight_RH[vocabulary if len(hidden_TH) else 0 :] = 0
        self._first = True

    def add(self, rows: slice, grad_tV: Tensor) -> None:
        """Add the part of one chunk, from the gradient of its raw logits in the compute dtype."""
        chunks = self._chunks
        if self.bias_R is not None:
            self.bias_R[: grad_tV.shape[1]] += grad_tV.sum(0, dtype=self.bias_R.dtype)
        if self.hidden_TH is not None:
            if self.hidden_TH.dtype == grad_tV.dtype:
                torch.mm(grad_tV, chunks.weight_VH, out=self.hidden_TH[rows])
            else:
                self.hidden_TH[rows] = grad_tV @ chunks.weight_VH
        if self.weight_RH is not None:
            self._add_weight(self.weight_RH[: grad_tV.shape[1]], grad_tV, chunks.hidden_TH[rows])
        self._first = False

    def _add_weight(self, total_VH: Tensor, grad_tV: Tensor, hidden_tH: Tensor) -> None:
        if total_VH.dtype == grad_tV.dtype:
            torch.addmm(total_VH, grad_tV.T, hidden_tH, beta=0.0 if self._first else 1.0, out=total_VH)
            return
        step = max(1, 2 * BLOCK_BYTES // (hidden_tH.shape[1] * grad_tV.dtype.itemsize))
        for start in range(0, len(total_VH), step):
            part_vH = grad_tV[:, start : start + step].T @ hidden_tH
            if self._first:
                total_VH[start : start + step] = part_vH
            else:
                total_VH[start : start + step] += part_vH


def log_normaliser(logits_rV: Tensor, p_rV: Tensor) -> Tensor:
    """``logsumexp`` of the logits [r, 1], given their softmax."""
    return logits_rV.amax(-1, keepdim=True) - p_rV.amax(-1, keepdim=True).log()
