"""Makes the lab's teacher and student, supervised on right answers, and the prompts of its runs.

    python recipes/lab/make_models.py              # into recipes/lab/models and recipes/lab/data

The teacher is trained until it is nearly always right. The student has a tenth of its size and is stopped when it
speaks the format and is mostly wrong. Both are ordinary checkpoints in bf16, exact in float32.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from addition import (
    DATA,
    DIGITS,
    EOS,
    SYMBOLS,
    answer,
    draw_prompts,
    greedy_accuracy,
    make_tokenizer,
    prompt,
    write_prompts,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

MODELS = Path(__file__).parent / "models"
TRAINED_ON, HELD_OUT = 4096, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """How one of the two is made; ``steps`` of ``batch`` fresh sums each."""

    layers: int
    hidden: int
    heads: int
    steps: int
    seed: int
    batch: int = 128
    lr: float = 2e-3


TEACHER = Making(layers=3, hidden=128, heads=4, steps=400, seed=0)
STUDENT = Making(layers=2, hidden=64, heads=4, steps=270, seed=1)


def make(making: Making, log_every: int = 0) -> LlamaForCausalLM:
    """A model trained on right answers alone, with linear warm-up and decay of the rate."""
    torch.manual_seed(making.seed)
    rng = random.Random(making.seed)
    eos = SYMBOLS.index(EOS)
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=making.hidden,
        intermediate_size=2 * making.hidden,
        num_hidden_layers=making.layers,
        num_attention_heads=making.heads,
        num_key_value_heads=making.heads,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=making.lr, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = min(50, making.steps // 2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (making.steps - step) / (making.steps - warm_up))
    )
    began = time.monotonic()
    for step in range(making.steps):
        loss = _loss(model, rng, making.batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if log_every and (step + 1) % log_every == 0:
            accuracy = greedy_accuracy(model, draw_prompts(200, 99))["held_out/accuracy"]
            sys.stdout.write(f"{step + 1} loss {loss:.4f} right {accuracy:.1%} {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()
    return model.to(torch.bfloat16).eval()


def _loss(model: LlamaForCausalLM, rng: random.Random, count: int) -> Tensor:
    largest = 10**DIGITS - 1
    pairs = [(rng.randint(0, largest), rng.randint(0, largest)) for _ in range(count)]
    start = len(prompt(0, 0))
    rows = [[SYMBOLS.index(symbol) for symbol in prompt(a, b) + answer(a, b)] for a, b in pairs]
    ids_BL = torch.tensor(rows)
    logits_BLV = model(input_ids=ids_BL[:, :-1]).logits[:, start - 1 :]
    return cross_entropy(logits_BLV.flatten(0, 1), ids_BL[:, start:].flatten())


def save(model: LlamaForCausalLM, path: Path) -> None:
    """An ordinary checkpoint with its tokenizer."""
    model.generation_config = GenerationConfig(eos_token_id=SYMBOLS.index(EOS), pad_token_id=SYMBOLS.index(EOS))
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def main() -> int:
    """Make both, and say on the way how good they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the two checkpoints")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the prompts")
    parser.add_argument("--steps", type=int, help="train each for so many steps only, to try the script")
    asked = parser.parse_args()
    prompts = draw_prompts(TRAINED_ON + HELD_OUT, seed=1)
    asked.data.mkdir(parents=True, exist_ok=True)
    write_prompts(asked.data / "train.jsonl", prompts[:TRAINED_ON])
    write_prompts(asked.data / "held_out.jsonl", prompts[TRAINED_ON:])
    for name, making in (("teacher", TEACHER), ("student", STUDENT)):
        sys.stdout.write(f"{name}\n")
        save(make(replace(making, steps=asked.steps or making.steps), log_every=100), asked.models / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
