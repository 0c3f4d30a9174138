"""Teachers whose weights are quantised while they are loaded, by the libraries that transformers knows."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from teacher_cache.errors import ScoringError


def _bitsandbytes_8bit(dtype: torch.dtype) -> QuantizationConfigMixin:
    return BitsAndBytesConfig(load_in_8bit=True)


def _bitsandbytes_4bit(dtype: torch.dtype) -> QuantizationConfigMixin:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _torchao_int8(dtype: torch.dtype) -> QuantizationConfigMixin:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


QUANTIZATIONS: Mapping[str, Callable[[torch.dtype], QuantizationConfigMixin]] = MappingProxyType(
    {
        "bitsandbytes-8bit": _bitsandbytes_8bit,
        "bitsandbytes-4bit": _bitsandbytes_4bit,
        "torchao-int8": _torchao_int8,
    }
)
"""By name, which begins with the package that does it. The head stays as it is in each."""


def require_quantization(name: str) -> None:
    """ScoringError for an unknown quantisation, or one whose package is missing; nothing for an empty name."""
    if not name:
        return
    if name not in QUANTIZATIONS:
        raise ScoringError(f"quantization is {name!r}; expected one of {list(QUANTIZATIONS)}, or empty for none")
    package = name.partition("-")[0]
    if find_spec(package) is None:
        raise ScoringError(f"quantization {name} needs the package {package}: pip install {package}")


def load_quantised(
    path: Path, name: str, *, dtype: torch.dtype, device: str, device_map: str | None
) -> PreTrainedModel:
    """A checkpoint with the weights of its body quantised; ``dtype`` is that of what is not."""
    require_quantization(name)
    # bitsandbytes places the weights while it quantises them, and refuses to move them afterwards.
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, device_map=device_map or {"": device}, quantization_config=QUANTIZATIONS[name](dtype)
    )
