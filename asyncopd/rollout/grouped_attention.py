"""Attention of one new token over grouped keys, without repeating the keys.

Shape suffixes: B rows, Q query heads, K key-value heads, G = Q / K query heads a key, L positions, D head size.

With a padding mask, transformers repeats every key and value G times before it attends, at every layer and step: in
SmolLM2 (G = 3) that was a third of the decode step. Seen as G queries of one head, the same product needs no copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "asyncopd_grouped"


def grouped_attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention output [B, new, Q, D]; whatever is not one new token over grouped keys goes to transformers' own.

    query [B, Q, new, D], key and value [B, K, L, D], attention_mask bool [B, 1, new, L] or None.
    """
    rows, heads, new, size = query.shape
    shared = key.shape[1]
    plain_mask = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1)
    if new > 1 or shared == heads or not plain_mask or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    groups = heads // shared
    output_BKGD = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, shared, groups, size),
        key,
        value,
        attn_mask=None if attention_mask is None else attention_mask.expand(-1, -1, groups, -1),
        scale=kwargs.get("scaling"),
    )
    return output_BKGD.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(NAME, grouped_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let ``model`` attend this way inside the block, where it would use scaled dot-product attention outside.

    Set on the config for the block only, because the model may be one that somebody else trains.
    """
    config = model.config.get_text_config(decoder=True)
    usual = config._attn_implementation
    if usual != "sdpa":
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
