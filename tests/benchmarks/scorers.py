"""Tokens per second of the teacher scorers, and what a proposal pass costs beside the rollout engine's own drawing.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.scorers models/smollm2-135m-instruct --student models/smollm2-student

One thread and CPU seconds, so that a busy machine blurs the comparison less; the best of ``--rounds`` rounds. A
scorer's tokens are those that its body reads, prompt and response; 16 given candidates are scored at each response
position. The pass and the engine draw systematic(16) for as many answers of the same length.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from asyncopd.proposal import ProposalPass
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.types import RolloutRequest
from teacher_cache.record import CandidateSet
from teacher_cache.scorer import Scorer, ScoreRequest
from teacher_cache.transformers_scorer import TransformersScorer
from teacher_cache.vllm_scorer import VllmModel, VllmScorer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROMPT, CANDIDATES = 40, 16
DESIGN = f"systematic({CANDIDATES})"
TEXT = Path(__file__).parent.parent.parent / "CONTRIBUTING.md"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("teacher", type=Path)
    options.add_argument("--student", type=Path, required=True)
    options.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    options.add_argument("--answers", type=int, default=12)
    options.add_argument("--tokens", type=int, default=120)
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(chosen.teacher)
    requests = natural_requests(tokenizer(TEXT.read_text())["input_ids"], chosen.answers, chosen.tokens)
    tokens = chosen.answers * (PROMPT + chosen.tokens)
    for name, scorer in scorers(chosen.teacher, len(tokenizer), DTYPES[chosen.dtype]):
        spent = best(chosen.rounds, lambda scorer=scorer: scorer.score(requests))
        print(
            f"{chosen.dtype} {name:13}{tokens / spent:7.0f} tokens/s{1000 * spent / chosen.answers:7.0f} ms an answer"
        )
    proposal(chosen, requests, len(tokenizer))


def scorers(model: Path, vocabulary: int, dtype: torch.dtype) -> list[tuple[str, Scorer]]:
    """vLLM last: it changes its process."""
    return [
        ("transformers", TransformersScorer(model, vocabulary=vocabulary, dtype=dtype)),
        ("vllm", VllmScorer(VllmModel(model, vocabulary=vocabulary, dtype=dtype), vocabulary=vocabulary)),
    ]


def proposal(chosen: argparse.Namespace, requests: list[ScoreRequest], vocabulary: int) -> None:
    """What drawing the candidates costs, as answers are sampled and as a pass over them."""
    dtype = DTYPES[chosen.dtype]
    passing = ProposalPass(chosen.student, design=DESIGN, vocabulary=vocabulary, dtype=dtype)
    asked = [replace(request, candidates=None) for request in requests]
    spent = best(chosen.rounds, lambda: passing.draw(asked))
    print(f"{chosen.dtype} proposal pass   {1000 * spent / chosen.answers:6.0f} ms an answer of {chosen.tokens} tokens")
    rolled = {}
    for design in (None, DESIGN):
        engine = TransformersEngine(
            chosen.student,
            vocabulary=vocabulary,
            eos_token_ids=(),
            sampling=SamplingConfig(max_new_tokens=chosen.tokens),
            run_seed=0,
            design=design,
            dtype=dtype,
            version=0,
        )
        rolled[design] = best(chosen.rounds, lambda engine=engine: generate(engine, requests))
        print(f"{chosen.dtype} rollout, {design or 'no candidates'}: {1000 * rolled[design] / chosen.answers:.0f} ms")
    drawing = rolled[DESIGN] - rolled[None]
    print(f"{chosen.dtype} drawing in the engine {1000 * drawing / chosen.answers:6.0f} ms an answer")


def generate(engine: TransformersEngine, requests: list[ScoreRequest]) -> None:
    engine.submit([RolloutRequest(uid=r.uid, prompt_ids=r.prompt_ids, min_version=0) for r in requests])
    while engine.in_flight:
        engine.step()


def natural_requests(ids: list[int], answers: int, tokens: int) -> list[ScoreRequest]:
    """Pieces of a text, each with candidates that somebody drew."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for place in range(answers):
        piece = ids[place * 37 : place * 37 + PROMPT + tokens]
        drawn = torch.randint(0, 49152, (tokens, CANDIDATES), generator=generator, dtype=torch.int32)
        requests.append(
            ScoreRequest(
                uid=f"0-{place}-0-0",
                prompt_ids=tuple(piece[:PROMPT]),
                response_ids_T=torch.tensor(piece[PROMPT:], dtype=torch.int32),
                candidates=CandidateSet(
                    origin="student", design=DESIGN, temperature=1.0, version=0, ids_TC=drawn,
                    log_w_TC=torch.zeros(drawn.shape),
                ),
            )
        )  # fmt: skip
    return requests


def best(rounds: int, work: Callable[[], object]) -> float:
    """CPU seconds of the fastest round after one that warms up."""
    work()
    spent = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        spent.append(time.process_time() - started)
    return min(spent)


if __name__ == "__main__":
    main()
