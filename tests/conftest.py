"""Tiny models and a tiny tokenizer, saved once a session as ordinary HF checkpoints.

The tokenizer is byte-level: 256 byte tokens and three special ones, so any text round-trips. As in SmolLM2, pad == eos.
The models' heads have five rows more than the tokenizer has ids, as padded heads do.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config
from transformers.models.qwen3 import Qwen3ForCausalLM

collect_ignore = [] if find_spec("vllm") else ["with_vllm"]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(SPECIAL)
HEAD_ROWS = VOCABULARY + 5
EOS = VOCABULARY - 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_llama(seed: int = 0, layers: int = 3) -> LlamaForCausalLM:
    """Tied head; weights large enough that the next-token distributions are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=HEAD_ROWS, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
        bos_token_id=EOS - 1, eos_token_id=EOS, pad_token_id=EOS,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_tiny_qwen3(seed: int = 1, layers: int = 3) -> Qwen3ForCausalLM:
    """Untied head and a per-layer list in its config."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=HEAD_ROWS, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=False,
        initializer_range=0.2, bos_token_id=EOS - 1, eos_token_id=EOS, pad_token_id=EOS,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def save_checkpoint(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return make_tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_tiny_llama(), tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_tiny_qwen3(), tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session", params=["tiny_llama_dir", "tiny_qwen3_dir"])
def tiny_model_dir(request: pytest.FixtureRequest) -> Path:
    """Each tiny checkpoint in turn."""
    return request.getfixturevalue(request.param)
