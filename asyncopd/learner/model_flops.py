"""How much arithmetic a step needs, so that it can be compared with what the hardware could have done."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A10": 125.0,
    "L4": 121.0,
}
"""Dense bf16 peak of a GPU, 1e12 operations a second, by a word of its name; from NVIDIA's data sheets (SXM forms)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Floating point operations that training a dense decoder takes, from its shape.

    For a sequence of length T of which the head sees R positions, after appendix B of PaLM (Chowdhery et al., 2022,
    arXiv 2204.02311), which counts 6 operations a parameter and token and 12 L H Q T a token for attention:

        T * (4 N_body + 2 N_body_trained) + R * (4 N_head + 2 N_head_trained) + 12 L H Q T^2

    N_body are the parameters without input embedding and head, L layers of H heads of size Q. The forward pass takes 2
    operations a parameter and token, the gradient of the activations 2, that of the weights 2, which frozen weights
    save. As there, attention counts as if it were not causal, and what is computed twice (activation checkpointing, a
    chunked head) counts once. Model FLOPs utilisation is this over seconds and peak.
    """

    body: int
    body_trained: int
    head: int
    head_trained: int
    attention: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelFlops | None":
        """The count for ``model``; None for a mixture of experts, where a token meets only some of the parameters."""
        config = model.config.get_text_config(decoder=True)
        shape = config.to_dict()
        if any("experts" in name and shape[name] for name in shape):
            return None
        heads = config.num_attention_heads
        size = shape.get("head_dim") or config.hidden_size // heads
        edges = [model.get_output_embeddings().weight, model.get_input_embeddings().weight]
        outer = {id(weight) for weight in edges}
        body = [parameter for parameter in model.parameters() if id(parameter) not in outer]
        return cls(
            body=_size(body),
            body_trained=_size([parameter for parameter in body if parameter.requires_grad]),
            head=edges[0].numel(),
            head_trained=edges[0].numel() if edges[0].requires_grad else 0,
            attention=12 * config.num_hidden_layers * heads * size,
        )

    def step(self, lengths: Sequence[int], head_positions: int) -> float:
        """Operations of a step over sequences of these lengths (tokens), with ``head_positions`` through the head."""
        tokens, squares = sum(lengths), sum(length**2 for length in lengths)
        return float(
            tokens * (4 * self.body + 2 * self.body_trained)
            + head_positions * (4 * self.head + 2 * self.head_trained)
            + squares * self.attention
        )


def peak_flops(given_tflops: float, device: torch.device, dtype: str) -> float | None:
    """Peak operations a second of ``device``: what is given, else that of a known GPU in bf16, else None."""
    if given_tflops:
        return given_tflops * 1e12
    if device.type != "cuda" or dtype != "bf16":
        return None
    name = torch.cuda.get_device_name(device).upper().replace("-", " ").split()
    return next((peak * 1e12 for word, peak in PEAK_TFLOPS.items() if word in name), None)


def _size(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
