"""The vLLM engine on a real model, in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.rollout.vllm_config import VllmEngineConfig
from asyncopd.rollout.vllm_engine import VllmEngine
from asyncopd.types import RolloutRequest
from recipes.prepare_smollm2 import student_path

pytestmark = pytest.mark.vllm

QUESTIONS = ("Name three fruits.", "Why is the sky blue?", "Give me a tip for sleeping better.")
NEW_TOKENS = 16


def other_weights(student: Path, folder: Path) -> Path:
    """Published weights a little beside the student's, in float32."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: tensor.float() for name, tensor in load_file(student / "model.safetensors").items()}
    moved = {
        name: tensor + 0.05 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }
    save_file(moved, folder / "model.safetensors")
    return folder


def test_greedy_text_and_logprobs_of_smollm2_are_those_of_transformers_over_swaps(tmp_path: Path) -> None:
    student = student_path()
    tokenizer = AutoTokenizer.from_pretrained(student)
    settings = {
        "vocabulary": len(tokenizer), "eos_token_ids": (tokenizer.eos_token_id,), "run_seed": 0, "version": 0,
        "sampling": SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=1e-4),
    }  # fmt: skip
    ours = VllmEngine(student, slots=4, config=VllmEngineConfig(kv_cache_gb=0.2, max_context=256), **settings)
    theirs = TransformersEngine(student, **settings)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) for chat in chats]
    texts = []
    for version, directory in enumerate((student, other_weights(student, tmp_path), student), start=1):
        done: dict[int, dict[str, list[int]]] = {}
        for place, engine in enumerate((ours, theirs)):
            engine.load_weights(directory, version)
            engine.submit([RolloutRequest(uid=str(i), prompt_ids=p, min_version=0) for i, p in enumerate(prompts)])
            done[place] = {}
            while engine.in_flight:
                done[place] |= {rollout.uid: rollout.response_ids_T.tolist() for rollout in engine.step()}
        assert done[0] == done[1]
        texts.append(done[0])
        text = [*prompts[0], *done[0]["0"]]
        torch.testing.assert_close(ours.logprobs(text), theirs.logprobs(text), atol=1e-4, rtol=0)
    assert texts[0] == texts[2] != texts[1]
