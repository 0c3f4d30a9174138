"""Finding where cumulative mass crosses given targets, without a cumulative sum of the whole vocabulary.

Shape suffixes: T positions, V vocabulary, G blocks of the vocabulary, B tokens in a block, K targets, N largest tokens.

Two levels: float64 sums of blocks of 128 tokens, then one cumulative sum inside the block that holds the target.
This runs inside the decode loop, where a float64 pass over the vocabulary for every row is what costs.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 128


def in_blocks(mass_TV: Tensor) -> Tensor:
    """Mass as [T, G, B], padded with zeros at the end; a small vocabulary is one block."""
    block = min(_BLOCK, mass_TV.shape[1])
    missing = -mass_TV.shape[1] % block
    padded = pad(mass_TV, (0, missing)) if missing else mass_TV
    return padded.reshape(mass_TV.shape[0], -1, block)


def block_sums(mass_TGB: Tensor) -> Tensor:
    """Float64 mass of each block."""
    return mass_TGB.sum(-1, dtype=torch.float64)


def largest(mass_TGB: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest masses in descending order, and their token ids (int64).

    The largest ``count`` tokens lie in the ``count`` blocks with the largest maxima. Where fewer tokens have mass, the
    rest are zeros with the id of the largest, so that every id is a token's and not the padding's.
    """
    block, blocks = mass_TGB.shape[2], min(count, mass_TGB.shape[1])
    block_TN = mass_TGB.amax(-1).topk(blocks, sorted=False).indices
    inside_TNB = mass_TGB.gather(1, block_TN[..., None].expand(-1, -1, block))
    mass_TN, flat_TN = inside_TNB.flatten(1).topk(count)
    ids_TN = block_TN.gather(1, flat_TN // block) * block + flat_TN % block
    return mass_TN, ids_TN.where(mass_TN > 0, ids_TN[:, :1])


def locate(mass_TGB: Tensor, sums_TG: Tensor, target_TK: Tensor) -> Tensor:
    """Ids (int64) of the tokens whose stretch of the line ``[0, total)`` holds each float64 target.

    A target at or past the end by rounding falls on the last token that has mass. Rows without mass give any id.
    """
    block = mass_TGB.shape[2]
    cumulative_TG = sums_TG.cumsum(-1)
    target_TK = target_TK.minimum(_below(cumulative_TG[:, -1:]))
    block_TK = torch.searchsorted(cumulative_TG, target_TK.contiguous(), right=True).clamp_(max=sums_TG.shape[1] - 1)
    before_TK = cumulative_TG.gather(1, block_TK) - sums_TG.gather(1, block_TK)
    inside_TKB = mass_TGB.gather(1, block_TK[..., None].expand(-1, -1, block)).double().cumsum(-1)
    rest_TK = (target_TK - before_TK).minimum(_below(inside_TKB[..., -1]))
    return block_TK * block + (inside_TKB <= rest_TK[..., None]).sum(-1).clamp_(max=block - 1)


def _below(value: Tensor) -> Tensor:
    """The next smaller float64."""
    return torch.nextafter(value, torch.full_like(value, -torch.inf))
