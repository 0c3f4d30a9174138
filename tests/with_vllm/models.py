"""Tiny models that vLLM can run on a CPU, whose attention wants heads of 32 and more."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config
from transformers.models.qwen3 import Qwen3ForCausalLM

from tests.conftest import EOS, HEAD_ROWS, save_checkpoint

_SHAPE = {
    "vocab_size": HEAD_ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "bos_token_id": EOS - 1,
    "eos_token_id": EOS, "pad_token_id": EOS,
}  # fmt: skip
KINDS = ("tied-llama", "untied-llama", "tied-qwen3", "untied-qwen3")


def make(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model with next-token distributions that are far from uniform."""
    torch.manual_seed(seed)
    tied, _, family = kind.partition("-")
    shape = {**_SHAPE, "tie_word_embeddings": tied == "tied", "initializer_range": 0.2}
    model = LlamaForCausalLM(LlamaConfig(**shape)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    return model.eval()


def save(kind: str, seed: int, folder: Path) -> Path:
    """The model as an HF checkpoint, which is also what a published version looks like."""
    return save_checkpoint(make(kind, seed), folder / f"{kind}-{seed}")
