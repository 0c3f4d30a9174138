"""The head of a checkpoint, read without its body, against the whole model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)
from transformers.models.gemma2 import Gemma2ForCausalLM
from transformers.models.granite import GraniteForCausalLM

from teacher_cache.causal_head import CausalHead
from teacher_cache.checkpoint_head import load_head
from teacher_cache.errors import ScoringError
from tests.conftest import VOCABULARY, make_tiny_llama, make_tiny_qwen3
from tests.teacher_cache.test_transformers_scorer import TINY


def saved(model: PreTrainedModel, folder: Path, **settings: object) -> Path:
    model.eval().save_pretrained(folder, **settings)
    return folder


def head(folder: Path, vocabulary: int = VOCABULARY):
    return load_head(folder, vocabulary=vocabulary, dtype=torch.float32, device=torch.device("cpu"))


MODELS = {
    "tied": make_tiny_llama,
    "untied": make_tiny_qwen3,
    "soft-cap": lambda: Gemma2ForCausalLM(Gemma2Config(**TINY, final_logit_softcapping=2.0)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**TINY, logits_scaling=3.0)),
    "multiplied": lambda: CohereForCausalLM(CohereConfig(**TINY, logit_scale=0.25)),
    "biased": lambda: PhiForCausalLM(PhiConfig(**TINY)),
    "cross-attention": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=TINY["vocab_size"], n_embd=32, n_layer=2, n_head=4, n_positions=128)
    ),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=2)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_head_alone_gives_the_logits_of_the_whole_model(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(3)
    whole = MODELS[kind]()
    if kind == "biased":
        torch.nn.init.normal_(whole.lm_head.bias)
    folder = saved(whole, tmp_path)
    expected = CausalHead(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), VOCABULARY)
    hidden_RH = expected.hidden([list(range(12))])[0]
    alone = head(folder)
    torch.testing.assert_close(alone.logits(hidden_RH), expected.logits(hidden_RH), atol=1e-6, rtol=0)
    assert (alone.vocabulary, alone.max_context) == (VOCABULARY, expected.max_context)


def test_the_head_is_found_in_a_checkpoint_of_many_files_and_under_a_prefix(tmp_path: Path) -> None:
    many = saved(make_tiny_llama(), tmp_path / "many", max_shard_size="20KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    prefixed = saved(make_tiny_llama(), tmp_path / "prefixed")
    file = prefixed / "model.safetensors"
    save_file({f"language_model.{name}": tensor for name, tensor in load_file(file).items()}, file)
    hidden_RH = torch.randn(3, 32)
    assert torch.equal(head(many).logits(hidden_RH), head(prefixed).logits(hidden_RH))


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = saved(make_tiny_qwen3(), tmp_path)
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}, file)
    with pytest.raises(ScoringError, match=r"lm_head\.weight.*transformers scorer"):
        head(folder)
    file.write_bytes(b"half of it")
    with pytest.raises(ScoringError, match="cannot read"):
        head(folder)


def test_an_architecture_that_does_more_to_its_logits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(make_tiny_llama(), tmp_path)
    forward = LlamaForCausalLM.forward

    def doubled(self: LlamaForCausalLM, *args: object, **settings: object) -> object:
        output = forward(self, *args, **settings)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(ScoringError, match="teach LogitHead"):
        head(folder)


def test_a_vocabulary_beyond_the_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match="head has 264 rows"):
        head(saved(make_tiny_llama(), tmp_path), vocabulary=500)
