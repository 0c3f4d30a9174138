"""The head of a checkpoint without its body, for a body that runs elsewhere.

Shape suffixes: R rows (positions), H hidden size, V head rows.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from teacher_cache.causal_head import LogitHead
from teacher_cache.errors import ScoringError

_PROBE_ROWS = 8


class _Said(MoeModelOutputWithPast):
    """What a body says, with every field that an architecture's last lines may read."""

    cross_attentions = None


def load_head(folder: Path, *, vocabulary: int, dtype: torch.dtype, device: torch.device) -> LogitHead:
    """The head of an HF checkpoint; no other weight is read.

    ScoringError where the weights are not in safetensors, or where the architecture does more to its logits than
    LogitHead knows of.
    """
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    head = outline.get_output_embeddings()
    weight_VH = _read(folder, _names(outline, head.weight))[:vocabulary].to(device, dtype)
    bias_V = None
    if head.bias is not None:
        bias_V = _read(folder, _names(outline, head.bias))[:vocabulary].to(device, dtype)
    _check(outline, config)
    return LogitHead(partial(_project, weight_VH=weight_VH, bias_V=bias_V), config, vocabulary)


def _project(hidden_RH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    return nn.functional.linear(hidden_RH.to(weight_VH.device, weight_VH.dtype), weight_VH, bias_V)


def _names(outline: PreTrainedModel, parameter: Tensor) -> list[str]:
    """What a checkpoint may call a parameter of the head; where it is tied, the embedding's name comes first."""
    named = dict(outline.named_parameters(remove_duplicate=False))
    names = [name for name, other in named.items() if other is parameter]
    embedding = outline.get_input_embeddings().weight
    if parameter is outline.get_output_embeddings().weight and outline.config.get_text_config().tie_word_embeddings:
        names = [name for name, other in named.items() if other is embedding] + names
    return list(dict.fromkeys(names))


def _read(folder: Path, names: Sequence[str]) -> Tensor:
    """The first of the tensors ``names`` that the checkpoint holds, as it is or under one prefix."""
    files = sorted(folder.glob("*.safetensors"))
    held = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                held.update(dict.fromkeys(opened.keys(), file))
        for name in names:
            found = [name] if name in held else [stored for stored in held if stored.endswith(f".{name}")]
            if len(found) == 1:
                with safe_open(held[found[0]], framework="pt") as opened:
                    return opened.get_tensor(found[0])
    except (OSError, SafetensorError) as error:
        raise ScoringError(f"cannot read the head's weights in {folder}: {error}; is the checkpoint whole?") from error
    raise ScoringError(
        f"the head is none of {list(names)} in the {len(files)} safetensors files of {folder}; save the checkpoint in "
        "safetensors, its head unquantised, or take the transformers scorer"
    )


@torch.no_grad()
def _check(outline: PreTrainedModel, config: PreTrainedConfig) -> None:
    """The architecture's own last lines, run behind a body that only says ``hidden``, against LogitHead."""
    kind = type(outline).__name__
    width = outline.get_output_embeddings().weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    hidden_RH = torch.randn(3, width, generator=generator)
    probe = nn.Linear(width, _PROBE_ROWS, bias=False)
    probe.weight.copy_(torch.randn(_PROBE_ROWS, width, generator=generator))
    outline.get_decoder().forward = lambda *_, **__: _Said(last_hidden_state=hidden_RH[None])
    outline.set_output_embeddings(probe)
    try:
        ids = torch.zeros((1, 3), dtype=torch.int64)
        given_RV = outline(input_ids=ids, use_cache=False).logits[0].float()
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ScoringError(
            f"how {kind} makes its logits cannot be told without its body ({error}); take the transformers scorer"
        ) from error
    own_RV = LogitHead(probe, config, min(_PROBE_ROWS, config.get_text_config().vocab_size)).logits(hidden_RH)
    apart = float((own_RV - given_RV[:, : own_RV.shape[1]]).abs().max())
    if not apart <= 1e-3 * float(given_RV.abs().max()):
        raise ScoringError(
            f"the logits of {kind} are not head(hidden) with its config's scale and soft-cap (they differ by "
            f"{apart:.3g}); take the transformers scorer, or teach LogitHead what this architecture does to them"
        )
