"""Students made from their teacher: the same model with some decoder layers left out.

Embeddings, head and tokenizer are kept, so teacher and student share one vocabulary by construction.
"""

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel

from asyncopd.errors import ConfigError

Model = TypeVar("Model", bound=PreTrainedModel)

ONE_ENTRY_A_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "no_rope_layers",
    "layer_rope_theta",
    "num_attention_heads_per_layer",
    "num_key_value_heads_per_layer",
)
"""Config fields that hold one entry for each decoder layer."""

LAYER_INDEX_LISTS = ("mlp_only_layers", "moe_layers", "attn_layer_indices")
"""Config fields that hold the indices of some decoder layers."""


def middle_layers(total: int, count: int) -> tuple[int, ...]:
    """Indices of the ``count`` layers in the middle of ``total``: what hurts least to leave out.

    With an odd number of layers left the longer half is kept at the end. ConfigError if no layer would be left.
    """
    if not 0 <= count < total:
        raise ConfigError(f"{count} of {total} layers to leave out; expected 0 to {total - 1}")
    first = (total - count) // 2
    return tuple(range(first, first + count))


def drop_layers(model: Model, layers: Sequence[int]) -> Model:
    """A copy of ``model`` without the decoder layers ``layers``; the model itself is left alone.

    The copy's config, ``layer_idx`` and per-layer config lists describe the layers that are left, so
    ``save_pretrained`` writes an ordinary checkpoint. ConfigError on an index that does not exist or comes twice,
    on leaving no layer, and on a model whose decoder layers cannot be found.
    """
    config = model.config.get_text_config(decoder=True)
    total = config.num_hidden_layers
    _check_indices(layers, total)
    student = copy.deepcopy(model)
    keep = [index for index in range(total) if index not in set(layers)]
    parent, name, stack = _decoder_layers(student, total)
    setattr(parent, name, torch.nn.ModuleList(stack[index] for index in keep))
    for position, layer in enumerate(getattr(parent, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    _keep_in_config(student.config.get_text_config(decoder=True), keep)
    return student


def _check_indices(layers: Sequence[int], total: int) -> None:
    wrong = [index for index in layers if not 0 <= index < total]
    if wrong:
        raise ConfigError(f"layers {wrong} do not exist; the model has {total}: give indices from 0 to {total - 1}")
    if len(set(layers)) != len(layers):
        raise ConfigError(f"layers {list(layers)} name one layer twice; give each index once")
    if len(layers) == total:
        raise ConfigError(f"all {total} layers would be left out; keep at least one")


def _decoder_layers(model: PreTrainedModel, total: int) -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    decoder = model.get_decoder()
    for name, child in decoder.named_children():
        if isinstance(child, torch.nn.ModuleList) and len(child) == total:
            return decoder, name, child
    raise ConfigError(
        f"{type(decoder).__name__} has no list of {total} decoder layers; drop_layers knows decoders that keep "
        "their layers in one ModuleList: make the student another way"
    )


def _keep_in_config(config: PretrainedConfig, keep: Sequence[int]) -> None:
    present = config.to_dict()
    position_of = {index: position for position, index in enumerate(keep)}
    for name in ONE_ENTRY_A_LAYER:
        if present.get(name):
            setattr(config, name, [present[name][index] for index in keep])
    for name in LAYER_INDEX_LISTS:
        if present.get(name):
            setattr(config, name, [position_of[index] for index in present[name] if index in position_of])
    config.num_hidden_layers = len(keep)
