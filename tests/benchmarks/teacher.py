"""The scoring service beside the raw forward pass, and bytes beside an OpenAI-style server's JSON.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.teacher --json --model models/smollm2-135m-instruct

service_fraction        scored tokens a CPU second through client, HTTP and service, over those of ``model(ids).logits``
                        on the same padded batch, which computes logits at every position
service_fraction_lean   the same over a forward pass with logits at response positions only, as the scorer needs them
json_bytes_ratio_*      bytes of ``prompt_logprobs`` in JSON over ours for the same top-K. Wire: answer against answer
                        (request_bytes_per_token is what goes the other way). Disk: all files of a store of 2048 answers
max_abs_error           nats, of every logprob that the service returns for a float32 teacher and its own candidates,
                        against a float64 log-softmax of the model's float32 logits in the same batch, at temperatures
                        0.6, 1.0 and 1.5; _alone: each answer's logits from a batch of its own, which float32 rounds
                        otherwise; _unlikely: candidates of a flat student, whose logprobs of -100 float32 itself rounds
hit_ms                  median milliseconds for one cached answer
vllm_prompt_logprobs_tokens_per_cpu_s    where vLLM is installed: response tokens a CPU second of ``prompt_logprobs``
                        for the same sequences and dtype on one core, by K, in a process of its own. It has no choice
                        but to give them for the prompt's tokens as well. _flat: without detokenisation, in flat lists
service_top_k_tokens_per_cpu_s           of the service, when the teacher draws ``top_k(K)``: the same numbers
service_tokens_per_cpu_s_over_vllm       the one over the other

CPU seconds of the whole process (client and service are in it) are counted, not wall time, so that a busy machine blurs
the comparison less; rounds alternate and the best of each counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from teacher_cache.bundle import PackedRecord
from teacher_cache.cached_scorer import CachedScorer
from teacher_cache.causal_head import HEAD_ROWS, CausalHead
from teacher_cache.client import ClientConfig, TeacherClient
from teacher_cache.codec import pack_record
from teacher_cache.designs import draw_candidates, parse_design
from teacher_cache.identity import TeacherIdentity, identify_checkpoint
from teacher_cache.noise import noise_for
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import Scorer, ScoreRequest
from teacher_cache.store import RecordStore
from teacher_cache.transformers_scorer import TransformersScorer
from teacher_cache.wire import encode_requests, encode_results
from tests.teacher_cache.serving import ThreadedService

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VLLM_K = (8, 64)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    options.add_argument("--json", action="store_true")
    options.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    options.add_argument("--answers", type=int, default=8)
    options.add_argument("--prompt", type=int, default=40)
    options.add_argument("--tokens", type=int, default=120)
    options.add_argument("--k", type=int, default=8)
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=DTYPES[chosen.dtype]).eval()
    identity = identify_checkpoint(chosen.model, temperature=1.0, dtype=chosen.dtype)
    texts = answers(model, chosen, identity.tokenizer.vocabulary)
    figures: dict[str, object] = {
        **speed(model, identity, texts, chosen),
        **sizes(model, tokenizer, identity, texts, chosen),
        **errors(chosen, texts),
        **against_vllm(model, identity, texts, chosen),
    }
    if chosen.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:40}{value:.4g}" if isinstance(value, float) else f"{name:40}{value}")


def answers(model: PreTrainedModel, chosen: argparse.Namespace, vocabulary: int) -> torch.Tensor:
    """Token ids [answers, prompt + tokens] that the teacher samples after random prompts: text of its own."""
    prompts = torch.randint(0, vocabulary, (chosen.answers, chosen.prompt))
    sampled = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=chosen.tokens,
        min_new_tokens=chosen.tokens,
        do_sample=True,
        top_k=0,
    )
    # A padded head may give ids beyond the tokenizer's.
    return sampled.clamp(max=vocabulary - 1)


def requests_of(
    texts: torch.Tensor, chosen: argparse.Namespace, vocabulary: int, *, draw: str | None, temperature: float = 1.0
) -> list[ScoreRequest]:
    """With ``draw`` the teacher's own candidates; without, ``systematic(K)`` of a flat student, as a run sends them."""
    made = []
    for number, ids in enumerate(texts):
        uid = f"0-{number}-0-0"
        candidates = None
        if draw is None:
            candidates = draw_candidates(
                parse_design(f"systematic({chosen.k})"),
                log_g_TV=torch.randn(chosen.tokens, vocabulary).log_softmax(-1),
                noise=noise_for(0, [(uid, t) for t in range(chosen.tokens)], "candidates"),
                sampled_T=None,
                origin="student",
                temperature=temperature,
                version=0,
            )
        made.append(
            ScoreRequest(
                uid=uid,
                prompt_ids=tuple(ids[: chosen.prompt].tolist()),
                response_ids_T=ids[chosen.prompt :].int(),
                candidates=candidates,
                draw=draw,
            )
        )
    return made


@contextmanager
def serving(scorer: Scorer, identity: TeacherIdentity) -> Iterator[TeacherClient]:
    config = ClientConfig(chunk_tokens=10**6)
    with ThreadedService(scorer, identity=identity) as service, TeacherClient([service.url], config=config) as client:
        yield client


def speed(
    model: PreTrainedModel, identity: TeacherIdentity, texts: torch.Tensor, chosen: argparse.Namespace
) -> dict[str, float]:
    vocabulary = identity.tokenizer.vocabulary
    scorer = TransformersScorer(model, vocabulary=vocabulary, batch_tokens=texts.numel())
    given = requests_of(texts, chosen, vocabulary, draw=None)
    drawn = requests_of(texts, chosen, vocabulary, draw=f"top_k({chosen.k})")
    read = texts[:, :-1]

    @torch.no_grad()
    def raw() -> None:
        _ = model(read, use_cache=False).logits

    @torch.no_grad()
    def lean() -> None:
        hidden = model.get_decoder()(input_ids=read, use_cache=False).last_hidden_state
        _ = model.get_output_embeddings()(hidden[:, chosen.prompt - 1 :])

    with serving(scorer, identity) as client:
        spent = fewest_cpu_seconds(
            {
                "raw": raw,
                "lean": lean,
                "service": lambda: client.score(given),
                "drawn": lambda: client.score(drawn),
            },
            chosen.rounds,
        )
    tokens = chosen.answers * chosen.tokens
    return {
        "service_fraction": spent["raw"] / spent["service"],
        "service_fraction_lean": spent["lean"] / spent["service"],
        "service_fraction_top_k": spent["raw"] / spent["drawn"],
        "service_tokens_per_cpu_s": tokens / spent["service"],
    }


def against_vllm(
    model: PreTrainedModel, identity: TeacherIdentity, texts: torch.Tensor, chosen: argparse.Namespace
) -> dict[str, object]:
    if find_spec("vllm") is None:
        return {}
    scorer = TransformersScorer(model, vocabulary=identity.tokenizer.vocabulary, batch_tokens=texts.numel())
    asked = {k: requests_of(texts, chosen, identity.tokenizer.vocabulary, draw=f"top_k({k})") for k in VLLM_K}
    with serving(scorer, identity) as client:
        work = {str(k): partial(client.score, requests) for k, requests in asked.items()}
        ours = fewest_cpu_seconds(work, chosen.rounds)
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.json"
        ids.write_text(json.dumps(texts.tolist()))
        words = ["--model", str(chosen.model), "--ids", str(ids), "--rounds", str(chosen.rounds)]
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[chosen.dtype]
        command = [sys.executable, "-m", "tests.benchmarks.vllm_prompt_logprobs", *words, "--dtype", dtype]
        done = subprocess.run([*command, "--k", *map(str, VLLM_K)], stdout=subprocess.PIPE, text=True, check=True)
    tokens = chosen.answers * chosen.tokens
    figures: dict[str, object] = {"service_top_k_tokens_per_cpu_s": {k: tokens / spent for k, spent in ours.items()}}
    for kind, theirs in json.loads(done.stdout.splitlines()[-1]).items():
        suffix = "" if kind == "default" else f"_{kind}"
        figures[f"vllm_prompt_logprobs_tokens_per_cpu_s{suffix}"] = {k: tokens / spent for k, spent in theirs.items()}
        figures[f"service_tokens_per_cpu_s_over_vllm{suffix}"] = {k: theirs[k] / ours[k] for k in theirs}
    return figures


def fewest_cpu_seconds(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Of some rounds, in turn."""
    spent: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            started = time.process_time()
            call()
            spent[name].append(time.process_time() - started)
    return {name: min(seconds) for name, seconds in spent.items()}


def sizes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    identity: TeacherIdentity,
    texts: torch.Tensor,
    chosen: argparse.Namespace,
) -> dict[str, float]:
    vocabulary, tokens = identity.tokenizer.vocabulary, chosen.answers * chosen.tokens
    asked = requests_of(texts, chosen, vocabulary, draw=f"top_k({chosen.k})")
    scorer = TransformersScorer(model, vocabulary=vocabulary, batch_tokens=texts.numel())
    results = scorer.score(asked)
    pairs = [
        (result, request) for result, request in zip(results, asked, strict=True) if isinstance(result, TeacherRecord)
    ]
    theirs = sum(len(prompt_logprobs(*pair, tokenizer)) for pair in pairs)
    figures = {"json_bytes_per_token": theirs / tokens}
    for precision in ("fp32", "fp16"):
        sent = encode_requests(asked, vocabulary=vocabulary, precision=precision)
        back = encode_results(results, asked, vocabulary=vocabulary, precision=precision)
        suffix = "" if precision == "fp32" else f"_{precision}"
        figures[f"wire_bytes_per_token{suffix}"] = len(back) / tokens
        figures[f"request_bytes_per_token{suffix}"] = len(sent) / tokens
        figures[f"json_bytes_ratio_wire{suffix}"] = theirs / len(back)
        with tempfile.TemporaryDirectory() as folder, RecordStore(Path(folder)) as store:
            cached = CachedScorer(lambda: scorer, store, identity=identity, precision=precision)
            cached.score(asked)
            if precision == "fp32":
                figures["hit_ms"] = hit_ms(cached, asked)
        disk = disk_bytes([pack_record(*pair, vocabulary=vocabulary, precision=precision) for pair in pairs])
        figures[f"disk_bytes_per_token{suffix}"] = disk / chosen.tokens
        figures[f"json_bytes_ratio_disk{suffix}"] = theirs / tokens * chosen.tokens / disk
    return figures


def disk_bytes(records: Sequence[PackedRecord], copies: int = 2048, lease: int = 16) -> float:
    """Bytes of every file of a store, a record, when it holds many that were put in a lease at a time."""
    with tempfile.TemporaryDirectory() as folder:
        with RecordStore(Path(folder)) as store:
            for first in range(0, copies, lease):
                store.put({os.urandom(16): records[(first + n) % len(records)] for n in range(lease)})
        return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / copies


def hit_ms(cached: CachedScorer, asked: Sequence[ScoreRequest]) -> float:
    taken = []
    for number in range(200):
        started = time.perf_counter()
        cached.score([asked[number % len(asked)]])
        taken.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken)


def prompt_logprobs(result: TeacherRecord, request: ScoreRequest, tokenizer: PreTrainedTokenizerBase) -> bytes:
    """The same scores as an OpenAI-style server writes them: the top K and the token itself, each an object."""
    drawn = result.of_origin("teacher")
    assert drawn.log_q_TC is not None
    positions = []
    for t, own in enumerate(request.response_ids_T.tolist()):
        entries = {own: (float(result.log_q_T[t]), 0)}
        for rank, (index, score) in enumerate(
            zip(drawn.ids_TC[t].tolist(), drawn.log_q_TC[t].tolist(), strict=True), start=1
        ):
            entries[index] = (score, rank)
        positions.append(
            {
                str(index): {"logprob": score, "rank": rank, "decoded_token": tokenizer.decode([index])}
                for index, (score, rank) in entries.items()
            }
        )
    return json.dumps({"prompt_logprobs": positions}, separators=(",", ":")).encode()


@torch.no_grad()
def errors(chosen: argparse.Namespace, texts: torch.Tensor) -> dict[str, float]:
    """Largest errors (nats) of what a service with a float32 teacher returns for the first two answers."""
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32).eval()
    worst = {"max_abs_error": 0.0, "max_abs_error_alone": 0.0, "max_abs_error_unlikely": 0.0}
    for temperature in (0.6, 1.0, 1.5):
        identity = identify_checkpoint(chosen.model, temperature=temperature, dtype="fp32")
        vocabulary = identity.tokenizer.vocabulary
        scorer = TransformersScorer(model, vocabulary=vocabulary, temperature=temperature)
        spec = f"systematic({chosen.k})"
        likely = requests_of(texts[:2], chosen, vocabulary, draw=spec, temperature=temperature)
        unlikely = requests_of(texts[:2], chosen, vocabulary, draw=None, temperature=temperature)
        with serving(scorer, identity) as client:
            records, unlikely_records = client.score(likely), client.score(unlikely)
        head = CausalHead(model, vocabulary)
        rows = head.hidden(texts[:2, :-1].tolist())[:, chosen.prompt - 1 :].flatten(0, 1)
        together = torch.cat([head.logits(part) for part in rows.split(HEAD_ROWS)]).unflatten(0, (2, -1))
        for number, (logits, request) in enumerate(zip(together, likely, strict=True)):
            alone = model(texts[number][None], use_cache=False).logits[0, chosen.prompt - 1 : -1, :vocabulary]
            for name, found, against in (
                ("max_abs_error", records[number], logits),
                ("max_abs_error_alone", records[number], alone),
                ("max_abs_error_unlikely", unlikely_records[number], logits),
            ):
                worst[name] = max(worst[name], distance(found, request, against, temperature))
    return worst


def distance(record: object, request: ScoreRequest, logits: torch.Tensor, temperature: float) -> float:
    """Largest difference (nats) from a float64 log-softmax of float32 logits [T, V]."""
    assert isinstance(record, TeacherRecord), record
    log_q = torch.log_softmax(logits.double() / temperature, dim=-1)
    own = log_q.gather(1, request.response_ids_T.long()[:, None])[:, 0]
    (scored,) = record.sets
    assert scored.log_q_TC is not None
    candidates = (scored.log_q_TC - log_q.gather(1, scored.ids_TC.long())).abs().max()
    return max(float((record.log_q_T - own).abs().max()), float(candidates))


if __name__ == "__main__":
    main()
