"""Tokens per second of the transformers engine beside transformers' own ``generate``, on one model.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout models/smollm2-student --dtype bf16 --batch 12 --batch 48

CPU seconds are counted, not wall time, so that a busy machine blurs the comparison less; with ``--threads 2`` they are
those of both threads.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.types import RolloutRequest

TASKS = (
    "Name three fruits.",
    "Write a short note to a friend about the weather today.",
    "Why is the sky blue?",
    "Explain how to boil an egg, step by step, for a child.",
    "Give me a tip for sleeping better.",
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", type=Path)
    options.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    options.add_argument("--batch", type=int, action="append")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--design", default=None, help="also draw candidates, for example systematic(16)")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[chosen.dtype]
    tokenizer = AutoTokenizer.from_pretrained(chosen.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=dtype).eval()
    for batch in chosen.batch or [12, 16, 48]:
        texts = [TASKS[index % len(TASKS)] for index in range(batch)]
        messages = [[{"role": "user", "content": text}] for text in texts]
        prompts = [tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"] for m in messages]
        sampling = SamplingConfig(max_new_tokens=chosen.tokens, min_new_tokens=chosen.tokens)
        engine = TransformersEngine(
            model,
            vocabulary=len(tokenizer),
            eos_token_ids=(tokenizer.eos_token_id,),
            sampling=sampling,
            run_seed=0,
            design=chosen.design,
            version=0,
        )
        own = best(lambda engine=engine, prompts=prompts: answer(engine, prompts))
        padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        theirs = best(
            lambda padded=padded: model.generate(
                **padded, max_new_tokens=chosen.tokens, min_new_tokens=chosen.tokens, do_sample=True, top_k=0
            )
        )
        tokens = batch * chosen.tokens
        print(
            f"{chosen.dtype} batch {batch}: engine {tokens / own:.0f}, generate {tokens / theirs:.0f} tokens per CPU s"
        )


def best(work: Callable[[], object], rounds: int = 2) -> float:
    """Fewest CPU seconds of some rounds."""
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds)


def answer(engine: TransformersEngine, prompts: list[list[int]]) -> None:
    engine.submit(
        [
            RolloutRequest(uid=str(place), prompt_ids=tuple(prompt), min_version=0)
            for place, prompt in enumerate(prompts)
        ]
    )
    while engine.in_flight:
        engine.step()


if __name__ == "__main__":
    main()
