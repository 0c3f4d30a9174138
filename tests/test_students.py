"""Students made by leaving out layers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncopd.errors import ConfigError
from asyncopd.students import drop_layers, middle_layers

IDS = torch.tensor([[5, 9, 200, 41, 7]])


def test_the_middle_layers_are_centred() -> None:
    assert middle_layers(30, 6) == (12, 13, 14, 15, 16, 17)
    assert middle_layers(5, 2) == (1, 2)
    assert middle_layers(4, 0) == ()


def test_leaving_out_nothing_changes_nothing(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    torch.testing.assert_close(drop_layers(model, ())(IDS).logits, model(IDS).logits)


def test_a_student_is_the_teacher_with_that_layer_skipped(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    student = drop_layers(model, [1])
    layer = model.get_decoder().layers[1]
    layer.forward = lambda hidden_states, **kwargs: hidden_states
    torch.testing.assert_close(student(IDS).logits, model(IDS).logits)


def test_a_saved_student_loads_as_an_ordinary_checkpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    student = drop_layers(AutoModelForCausalLM.from_pretrained(tiny_model_dir), [0, 2])
    student.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.num_hidden_layers == 1
    torch.testing.assert_close(loaded(IDS).logits, student(IDS).logits)


def test_a_student_generates_with_a_cache_of_its_own_depth(tiny_model_dir: Path) -> None:
    student = drop_layers(AutoModelForCausalLM.from_pretrained(tiny_model_dir), [0])
    with_cache = student.generate(IDS, max_new_tokens=6, do_sample=False)
    without = student.generate(IDS, max_new_tokens=6, do_sample=False, use_cache=False)
    assert with_cache.tolist() == without.tolist()


def test_lists_of_the_config_follow_the_layers(tiny_qwen3_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3_dir)
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    student = drop_layers(model, [0])
    assert student.config.layer_types == ["sliding_attention", "full_attention"]
    assert [layer.self_attn.layer_idx for layer in student.get_decoder().layers] == [0, 1]


def test_the_teacher_is_left_alone(tiny_llama_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    before = model(IDS).logits
    drop_layers(model, [0])
    assert model.config.num_hidden_layers == 3
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=0)


def test_a_tied_head_stays_tied(tiny_llama_dir: Path) -> None:
    student = drop_layers(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), [1])
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight


@pytest.mark.parametrize(("layers", "says"), [([3], "do not exist"), ([-1], "do not exist"), ([1, 1], "twice")])
def test_a_wrong_index_is_refused_with_the_remedy(tiny_llama_dir: Path, layers: list[int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        drop_layers(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), layers)


def test_leaving_out_every_layer_is_refused(tiny_llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="keep at least one"):
        drop_layers(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), [0, 1, 2])
    with pytest.raises(ConfigError, match="expected 0 to 29"):
        middle_layers(30, 30)
