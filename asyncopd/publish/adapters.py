"""A version of low-rank adapters alone, as the package peft writes them, in place of the whole weights.

    v00000012/adapter_config.json          rank, alpha, and the checkpoint that they belong to
    v00000012/adapter_model.safetensors    A [rank, in] and B [out, rank] of each layer that has one

An engine applies them beside the weights that it has, or takes the sum, ``W + (alpha / rank) B A``.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncopd.errors import CheckpointError
from asyncopd.publish.stream import Weights, write_safetensors

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the name of a layer."""
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


def holds_adapters(directory: Path) -> bool:
    """Whether a version is adapters alone."""
    return (Path(directory) / WEIGHTS_NAME).exists()


def write_adapters(directory: Path, weights: Weights, config: str) -> None:
    """Into a folder that is there; ``config`` is the text of ``adapter_config.json``."""
    (directory / CONFIG_NAME).write_text(config)
    write_safetensors(directory / WEIGHTS_NAME, weights)


def adapted_layers(names: Iterable[str]) -> list[str]:
    """The layers that adapters of these names belong to."""
    return [name.removeprefix(PREFIX).removesuffix(_DOWN) for name in names if name.endswith(_DOWN)]


def adapted_shapes(directory: Path) -> dict[str, list[int]]:
    """Shape of each weight that has an adapter, by its name without one; CheckpointError where they cannot be read."""
    with _opened(directory) as (file, config):
        shapes = {}
        for layer in adapted_layers(file.keys()):
            rows = file.get_slice(PREFIX + layer + _UP).get_shape()[0]
            columns = file.get_slice(PREFIX + layer + _DOWN).get_shape()[1]
            shapes[f"{layer}.weight"] = [columns, rows] if config["fan_in_fan_out"] else [rows, columns]
        return shapes


def merged_weights_of(
    directory: Path, checkpoint: Path, device: torch.device | str = "cpu", *, others: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Names and values, in the adapters' dtype, of the weights that have an adapter, with it; one at a time.

    With ``others`` come first those that have none, as they are in ``checkpoint``, the folder of the model that the
    adapters belong to; where it is none, the one that ``adapter_config.json`` names. CheckpointError, before the first,
    where it does not have the weights that the adapters belong to.
    """
    with _opened(directory) as (file, config), ExitStack() as opened:
        if not checkpoint.is_dir():
            checkpoint = Path(config["base_model_name_or_path"])
        parts = [opened.enter_context(safe_open(part, framework="pt")) for part in checkpoint.glob("*.safetensors")]
        part_of = {name: part for part in parts for name in part.keys()}  # noqa: SIM118
        layer_of = {f"{layer}.weight": layer for layer in adapted_layers(file.keys())}
        if missing := [name for name in layer_of if name not in part_of]:
            raise CheckpointError(
                f"{directory} has an adapter for {missing[0]}, and no safetensors file in {checkpoint} has that "
                "weight: set publish.adapters to false, so that the learner publishes whole weights"
            )
        if others:
            yield from ((name, part.get_tensor(name)) for name, part in part_of.items() if name not in layer_of)
        scale = config["lora_alpha"] / config["r"]
        for name, layer in layer_of.items():
            up, down = (file.get_tensor(PREFIX + layer + part).to(device) for part in (_UP, _DOWN))
            delta = (up @ down) * scale
            base = part_of[name].get_tensor(name).to(device, delta.dtype)
            yield name, base + (delta.T if config["fan_in_fan_out"] else delta)


@contextmanager
def _opened(directory: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The file of the adapters, and what is said about them."""
    path = Path(directory) / WEIGHTS_NAME
    try:
        with safe_open(path, framework="pt") as file:
            yield file, json.loads((Path(directory) / CONFIG_NAME).read_text())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; was that version published whole?") from error
