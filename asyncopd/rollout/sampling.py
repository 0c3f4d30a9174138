"""The distribution that tokens are really drawn from, and the draw itself.

Shape suffixes: B rows in the batch, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncopd.errors import ConfigError
from teacher_cache.designs.inverse_cdf import block_sums, in_blocks, locate
from teacher_cache.noise import position_uniforms

TOKEN_STREAM = "token"
"""Noise stream of the rollout's own token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How answers are sampled."""

    temperature: float = 1.0
    """Divides the logits; for all but greedy answers take a small one, such as 1e-4."""
    top_p: float = 1.0
    """Smallest set of most likely tokens with at least this mass; 1 keeps all."""
    top_k: int = 0
    """Number of most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Share of the most likely token's probability that a token must reach; 0 keeps all."""
    min_new_tokens: int = 0
    """Tokens before which an answer may not end: EOS and stop tokens cannot be drawn."""
    max_new_tokens: int = 128
    """Tokens after which an answer is cut (finish ``length``)."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer as EOS does."""

    def __post_init__(self) -> None:
        _check(self.temperature > 0, "temperature", self.temperature, "above 0", "for greedy answers take 1e-4")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]", "1 keeps every token")
        _check(self.top_k >= 0, "top_k", self.top_k, "0 or more", "0 keeps every token")
        _check(0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)", "0 keeps every token")
        _check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more", "try 128")
        _check(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"0 to max_new_tokens ({self.max_new_tokens})",
            "0 lets an answer end at once",
        )
        _check(
            all(token >= 0 for token in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "token ids, 0 or more",
            "look them up with tokenizer.convert_tokens_to_ids",
        )

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn although the softmax gives them mass."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.min_new_tokens > 0


def _check(holds: bool, name: str, value: object, expected: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(f"sampling.{name} is {value}; expected {expected} ({remedy})")


def sampling_logprobs(
    logits_BV: Tensor, sampling: SamplingConfig, *, generated_B: Tensor, end_ids: Sequence[int]
) -> Tensor:
    """Logprobs (nats, float32) of the very distribution that the next token is drawn from; -inf where it cannot be.

    Applied in this order: ban of ``end_ids`` before ``min_new_tokens``, temperature, top-k, top-p, min-p, each on the
    distribution that the one before leaves.

    logits_BV    float32, after the model's own scale and soft-cap, real vocabulary only
    generated_B  int64, tokens that each answer already has
    end_ids      tokens that end an answer
    """
    if sampling.min_new_tokens and end_ids:
        ids_E = torch.tensor(list(end_ids), device=logits_BV.device)
        banned_BE = (generated_B < sampling.min_new_tokens)[:, None].expand(-1, len(ids_E))
        logits_BV = logits_BV.index_copy(1, ids_E, logits_BV[:, ids_E].masked_fill(banned_BE, -torch.inf))
    if sampling.temperature != 1:
        logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[1]:
        kth_B1 = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if sampling.top_p < 1:
        logits_BV = _nucleus(logits_BV, sampling.top_p)
    if sampling.min_p > 0:
        floor_B1 = logits_BV.amax(-1, keepdim=True) + float(np.log(sampling.min_p))
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -torch.inf)
    return torch.log_softmax(logits_BV, dim=-1)


def _nucleus(logits_BV: Tensor, top_p: float) -> Tensor:
    """Logits with -inf outside the smallest set of most likely tokens whose mass reaches ``top_p``."""
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    mass_BV = torch.softmax(sorted_BV, dim=-1)
    before_BV = mass_BV.cumsum(-1, dtype=torch.float64) - mass_BV
    outside_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(1, order_BV, before_BV >= top_p)
    return logits_BV.masked_fill(outside_BV, -torch.inf)


def token_uniforms(run_seed: int, uids: Sequence[str], positions: Sequence[int]) -> Tensor:
    """Float64 uniforms [B] that depend on (run seed, uid, position) and on nothing else."""
    return torch.tensor(
        [
            position_uniforms(run_seed, uid, position, TOKEN_STREAM, 1)[0]
            for uid, position in zip(uids, positions, strict=True)
        ],
        dtype=torch.float64,
    )


def draw_tokens(log_b_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Tokens (int64 [B]) by inverse CDF in float64: the first token at which the cumulative mass passes the uniform."""
    mass_BGN = in_blocks(log_b_BV.exp())
    sums_BG = block_sums(mass_BGN)
    target_B1 = uniforms_B[:, None].to(sums_BG.device) * sums_BG.sum(-1, keepdim=True)
    return locate(mass_BGN, sums_BG, target_B1)[:, 0]
