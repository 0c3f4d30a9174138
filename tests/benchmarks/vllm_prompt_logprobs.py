"""How fast vLLM gives the top K logprobs of prompt tokens: what ``tests.benchmarks.teacher`` compares with.

    python -m tests.benchmarks.vllm_prompt_logprobs --model models/smollm2-135m-instruct --ids ids.json --k 8 64

Prints CPU seconds of the fastest round as JSON, by K: ``default`` is what ``prompt_logprobs=K`` gives, ``flat`` without
detokenisation and in flat lists. In vLLM's favour: in process without HTTP, one thread on one core, all sequences at
once.
"""

import argparse
import json
import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Threads that share its one core would be counted while they wait for each other.
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--ids", type=Path, required=True)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--k", type=int, nargs="+", default=[8, 64])
    options.add_argument("--rounds", type=int, default=2)
    chosen = options.parse_args()
    # One core, as many threads as the benchmark has.
    core = str(min(os.sched_getaffinity(0)))
    os.environ.update({**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": core})
    # vLLM writes to stdout, which is this program's answer.
    with redirect_stdout(sys.stderr):
        spent = measure(chosen)
    print(json.dumps(spent))


def measure(chosen: argparse.Namespace) -> dict[str, dict[str, float]]:
    from vllm import LLM, SamplingParams

    sequences = json.loads(chosen.ids.read_text())
    tokens = sum(map(len, sequences))
    engine = LLM(
        str(chosen.model),
        dtype=chosen.dtype,
        enforce_eager=True,
        max_logprobs=-1,
        max_model_len=max(map(len, sequences)) + 1,
        max_num_batched_tokens=tokens,
        max_num_seqs=len(sequences),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": ids} for ids in sequences]
    kinds = {"default": {}, "flat": {"flat_logprobs": True, "detokenize": False}}
    spent: dict[str, dict[str, list[float]]] = {kind: {str(k): [] for k in chosen.k} for kind in kinds}
    for _ in range(chosen.rounds + 1):
        for kind, settings in kinds.items():
            for k in chosen.k:
                asked = SamplingParams(max_tokens=1, prompt_logprobs=k, **settings)
                started = time.process_time()
                answers = engine.generate(prompts, asked, use_tqdm=False)
                spent[kind][str(k)].append(time.process_time() - started)
                lengths = [len(answer.prompt_logprobs) for answer in answers]
                assert lengths == [len(ids) for ids in sequences]
    # The first round warms up.
    return {kind: {k: min(seconds[1:]) for k, seconds in by_k.items()} for kind, by_k in spent.items()}


if __name__ == "__main__":
    main()
