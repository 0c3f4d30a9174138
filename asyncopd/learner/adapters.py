"""LoRA through ``peft``: the student's weights stand still, low-rank adapters beside its linear layers are trained.

Published are the adapters (``publish.adapters``), or the merged weights, ``W + (alpha / rank) B A``, one layer at a
time; the training weights are not touched.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncopd.errors import ConfigError
from asyncopd.publish import LazyWeight, Weights
from asyncopd.publish.adapters import CONFIG_NAME, PREFIX
from asyncopd.publish.stream import lazily, whole

_ADAPTER = "default"
"""The name that peft gives to the only adapter of a model."""
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters in place of the weights."""

    rank: int = 0
    """Rank of the adapters; 0 trains the weights themselves."""
    alpha: float = 32.0
    """An adapter's product is multiplied by ``alpha / rank``."""
    dropout: float = 0.0
    """Probability with which an input of an adapter is dropped in training."""
    targets: str = ALL_LINEAR
    """Modules that get an adapter: ``all-linear`` (the head excepted), or names such as ``q_proj,v_proj``."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"learner.lora.rank is {self.rank}; expected 0 (no adapters) or a rank such as 16")
        if not self.alpha > 0:
            raise ConfigError(f"learner.lora.alpha is {self.alpha}; expected a positive number such as 32")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"learner.lora.dropout is {self.dropout}; expected 0 or more and less than 1")
        if self.rank and find_spec("peft") is None:
            raise ConfigError(
                f"learner.lora.rank is {self.rank}, which needs the package peft: pip install 'asyncopd[lora]', "
                "or set learner.lora.rank to 0"
            )


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Put adapters into ``model``, in place; nothing else of it is trained. They begin as the identity."""
    peft = import_module("peft")
    model.requires_grad_(False)
    head, source = model.get_output_embeddings(), Path(model.name_or_path)
    targets = ALL_LINEAR if config.targets == ALL_LINEAR else [name.strip() for name in config.targets.split(",")]
    spec = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        # Whole, because others read the adapters in folders of their own.
        base_model_name_or_path=str(source.absolute()) if source.is_dir() else str(source),
    )
    try:
        peft.inject_adapter_in_model(spec, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise ConfigError(f"learner.lora.targets is {config.targets!r}: {error}") from error
    for name, layer in _adapted(model).items():
        # The fused head reads a weight, so an adapter of the head would have no part in the loss.
        if not len(layer.lora_A) or layer.base_layer is head:
            raise ConfigError(
                f"learner.lora.targets is {config.targets!r}, which names {name}; expected linear layers other than "
                f"the head: leave it out, or say {ALL_LINEAR}"
            )


def merged_weights(model: PreTrainedModel) -> Weights:
    """The weights of the student by the names that it has without adapters, tied copies left out.

    A weight that is spread over ranks, or has an adapter, is made whole when it is read.
    """
    layers = _adapted(model)
    seen: set[int] = set()
    weights: dict[str, Tensor | LazyWeight] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or _inside_adapter(name, layers):
            continue
        seen.add(id(tensor))
        module, _, last = name.rpartition(".")
        base, of_layer, _ = module.rpartition(".base_layer")
        if of_layer and base in layers and last == "weight":
            weights[f"{base}.{last}"] = _merged(layers[base])
        else:
            weights[f"{base}.{last}" if of_layer and base in layers else name] = lazily(tensor)
    return weights


def adapter_weights(model: PreTrainedModel) -> Weights:
    """The adapters alone, under peft's names; empty without adapters."""
    layers = _adapted(model)
    return {
        f"{PREFIX}{name.replace(f'.{_ADAPTER}.', '.')}": lazily(tensor)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if _inside_adapter(name, layers)
    }


def adapter_config(model: PreTrainedModel) -> str:
    """What peft writes beside adapters; with ``adapter_weights``, ``peft.PeftModel.from_pretrained`` loads them."""
    spec = model.peft_config[_ADAPTER]
    spec.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        spec.save_pretrained(folder)
        return (Path(folder) / CONFIG_NAME).read_text()


def _adapted(model: PreTrainedModel) -> dict[str, Any]:
    """The layers that carry an adapter, by name."""
    return {
        name: module for name, module in model.named_modules() if {"base_layer", "lora_A"} <= module._modules.keys()
    }


def _inside_adapter(name: str, layers: Mapping[str, Any]) -> bool:
    layer, found, _ = name.rpartition(".lora_")
    return bool(found) and layer in layers


def _merged(layer: Any) -> LazyWeight:
    base, down, up = (layer.base_layer.weight, layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight)

    def read() -> Tensor:
        delta = (whole(up.detach()) @ whole(down.detach())) * layer.scaling[_ADAPTER]
        return whole(base.detach()) + (delta.T if layer.fan_in_fan_out else delta).to(base.dtype)

    return LazyWeight(shape=base.shape, dtype=base.dtype, read=read, collective=isinstance(base, DTensor))
