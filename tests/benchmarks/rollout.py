"""Tokens per second of the rollout engines beside transformers' ``generate`` and vLLM's own sampler, on one model.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout models/smollm2-student --dtype bf16 --batch 12 --batch 24
    OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout models/smollm2-student --design "systematic(16)" --vllm
    OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout models/smollm2-student --vllm --lora 16

CPU seconds are counted, not wall time, so that a busy machine blurs the comparison less; with ``--threads 2`` they are
those of both threads. ``--vllm`` adds vLLM: with the engine's draw, and with its own sampler and processed logprobs.
``--lora`` adds vLLM with adapters applied beside its weights, and the update of a transformers engine that merges them.
An update is timed by the wall: it is how long no token comes while new weights are read from their file and taken.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asyncopd.learner.adapters import LoraConfig, adapter_config, adapter_weights, add_adapters
from asyncopd.publish import WeightStore
from asyncopd.rollout.engine import RolloutEngine
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
APPLIED = "vllm, adapters applied"
Prompts = list[list[int]]
Work = Callable[[Prompts], object]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", type=Path)
    options.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    options.add_argument("--batch", type=int, action="append")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--design", default=None, help="also draw candidates, for example systematic(16)")
    options.add_argument("--vllm", action="store_true")
    options.add_argument("--lora", type=int, default=0, help="rank of the adapters")
    options.add_argument("--updates", type=int, default=5)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    tokenizer = AutoTokenizer.from_pretrained(chosen.model, padding_side="left")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[chosen.dtype]
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=dtype).eval()
    batches = chosen.batch or [12, 16, 48]
    workers = dict(contestants(chosen, model, tokenizer, max(batches), dtype))
    for batch in batches:
        texts = [TASKS[index % len(TASKS)] for index in range(batch)]
        messages = [[{"role": "user", "content": text}] for text in texts]
        prompts = [tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"] for m in messages]
        for name, work in workers.items():
            rate = batch * chosen.tokens / best(lambda work=work, prompts=prompts: work(prompts))
            print(f"{chosen.dtype} batch {batch:3}  {name:32} {rate:6.0f} tokens per CPU s", flush=True)


def contestants(
    chosen: argparse.Namespace, model: PreTrainedModel, tokenizer: object, slots: int, dtype: torch.dtype
) -> Iterator[tuple[str, Work]]:
    """What is compared; the engines' updates are timed as they are made."""
    settings = {
        "vocabulary": len(tokenizer), "eos_token_ids": (tokenizer.eos_token_id,), "run_seed": 0, "version": 0,
        "sampling": SamplingConfig(max_new_tokens=chosen.tokens, min_new_tokens=chosen.tokens), "dtype": dtype,
    }  # fmt: skip
    designs = [None] if chosen.design is None else [None, chosen.design]
    engines: dict[str, RolloutEngine] = {
        f"transformers {design or ''}": TransformersEngine(model, **settings, design=design) for design in designs
    }
    if chosen.vllm:
        from asyncopd.rollout.vllm_engine import VllmEngine

        for design in designs:
            engines[f"vllm {design or ''}"] = VllmEngine(chosen.model, slots=slots, **settings, design=design)
        if chosen.lora:
            engines[APPLIED] = VllmEngine(chosen.model, slots=slots, **settings, lora_rank=chosen.lora)
    with tempfile.TemporaryDirectory() as folder:
        whole = WeightStore(Path(folder), dtype).publish(1, untied(model))
        updates = [(name, engine, whole) for name, engine in engines.items() if name != APPLIED]
        if chosen.lora:
            alone = adapters(chosen.model, chosen.lora, Path(folder))
            updates.append(("transformers, merges adapters", engines["transformers "], alone))
            if chosen.vllm:
                updates += [("vllm, merges adapters", engines["vllm "], alone), (APPLIED, engines[APPLIED], alone)]
        for name, engine, directory in updates:
            seconds = [update(engine, directory) for _ in range(chosen.updates)]
            size = sum(path.stat().st_size for path in directory.iterdir()) / 1e6
            print(f"{chosen.dtype} update     {name:32} {min(seconds):.3f} to {max(seconds):.3f} s of {size:.1f} MB")
    for name, engine in engines.items():
        yield name, lambda prompts, engine=engine: answer(engine, prompts)
    if chosen.vllm:
        yield "vllm, its own sampler", own_sampler(chosen, slots)

    def generate(prompts: Prompts) -> None:
        padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        length = {"max_new_tokens": chosen.tokens, "min_new_tokens": chosen.tokens}
        model.generate(**padded, **length, do_sample=True, top_k=0)

    yield "transformers' generate", generate


def adapters(checkpoint: Path, rank: int, folder: Path) -> Path:
    """A version of adapters for every linear layer, as a learner publishes it."""
    student = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    add_adapters(student, LoraConfig(rank=rank))
    return WeightStore(folder, None, adapter_config(student)).publish(2, adapter_weights(student))


def untied(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state without a tied head, as a learner publishes it."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def update(engine: RolloutEngine, directory: Path) -> float:
    """Wall seconds without a token."""
    started = time.perf_counter()
    engine.load_weights(directory, 0)
    return time.perf_counter() - started


def own_sampler(chosen: argparse.Namespace, slots: int) -> Work:
    """vLLM without this project's draw: its sampler, and the logprobs of the sampling distribution."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(chosen.model), dtype={"bf16": "bfloat16", "fp32": "float32"}[chosen.dtype], max_num_seqs=slots,
            enforce_eager=True, skip_tokenizer_init=True, generation_config="vllm", disable_log_stats=True,
            kv_cache_memory_bytes=2**30, logprobs_mode="processed_logprobs",
        )
    )  # fmt: skip
    params = SamplingParams(max_tokens=chosen.tokens, ignore_eos=True, detokenize=False, logprobs=0)

    def work(prompts: Prompts) -> None:
        for place, prompt in enumerate(prompts):
            llm.add_request(str(place), {"prompt_token_ids": prompt}, params)
        while llm.has_unfinished_requests():
            llm.step()

    return work


def best(work: Callable[[], object], rounds: int = 2) -> float:
    """Fewest CPU seconds of some rounds."""
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds)


def answer(engine: RolloutEngine, prompts: Prompts) -> None:
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
