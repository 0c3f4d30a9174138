"""Grouped attention is transformers' own attention, to rounding."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from asyncopd.rollout.grouped_attention import grouped_attention, grouped_attention_forward
from tests.conftest import make_tiny_llama


class Attention(torch.nn.Module):
    """What the function reads of an attention module."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("masked", [True, False])
def test_it_gives_what_repeating_the_keys_gives(new: int, heads: int, masked: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, heads, new, 8), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 8)
    mask = torch.ones(3, 1, new, 9, dtype=torch.bool)
    mask[0, :, :, :3] = False
    arguments = (Attention(heads // 2), query, key, value, mask if masked else None)
    expected, _ = sdpa_attention_forward(*arguments, scaling=0.3)
    actual, _ = grouped_attention_forward(*arguments, scaling=0.3)
    torch.testing.assert_close(actual, expected)


def test_the_model_attends_as_before_after_the_block() -> None:
    model = make_tiny_llama()
    assert model.config._attn_implementation == "sdpa"
    with grouped_attention(model):
        assert model.config._attn_implementation == "asyncopd_grouped"
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_attends_another_way_is_left_alone(tiny_llama_dir: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, attn_implementation="eager")
    with grouped_attention(model):
        assert model.config._attn_implementation == "eager"
