"""Time and memory of the fused head beside the dense path and beside a chunked function that recomputes.

    python -m tests.benchmarks.head --json      # the whole matrix; --quick, --hidden, --vocab, --k, --dtype choose
    python -m tests.benchmarks.head --threads 2

Every method gets the same float32 hidden states and head weight (a step under bf16 autocast holds them so) and computes
the same loss, the weighted Bregman reverse KL at K candidates, forward and backward:

fused     ``learner.head.fused_loss``, with its default memory budget
dense     logits in the compute dtype, float32 log-softmax, gather; autograd does the rest
chunked   an autograd function that goes through the tokens in chunks, keeps nothing and computes the logits of each
          chunk again in backward; of several chunk sizes the fastest

Times are medians of repeats that take the methods in turn, in one process, with freed memory kept for all alike
(``asyncopd.allocator``): CPU seconds on one thread, which a busy machine blurs less, wall time on more. Memory is the
growth of the resident set of a process of its own in one forward and backward, less what every method must have: both
gradients and, in bf16, the bf16 copies of hidden states and weight.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor

from asyncopd.allocator import keep_freed_memory
from asyncopd.learner.head import HeadShape, fused_loss
from tests.resident_memory import forget_peak, peak_mib, resident_mib

TOKENS, HIDDENS, VOCABULARIES, KS = 2048, (576, 2048), (49_152, 151_936), (1, 8, 64)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHUNKS = (256, 512, 1024)
"""Tokens of a chunk of the recomputing function; of about equal speed, the larger taking more memory."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One point of the matrix."""

    tokens: int
    hidden: int
    vocab: int
    k: int
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inputs:
    """What every method gets; shapes [T, H], [V, H], [T, K]."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    log_q: Tensor
    w: Tensor
    dtype: torch.dtype


def make_inputs(case: Case) -> Inputs:
    """Hidden states of unit size and a head with logits of about that size."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.empty(case.tokens, case.hidden).normal_(generator=generator)
    weight = torch.empty(case.vocab, case.hidden).normal_(0, case.hidden**-0.5, generator=generator)
    ids = torch.randint(case.vocab, (case.tokens, case.k), generator=generator)
    log_q = torch.rand(case.tokens, case.k, generator=generator).mul_(-12)
    w = torch.rand(case.tokens, case.k, generator=generator)
    return Inputs(
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        ids=ids,
        log_q=log_q,
        w=w,
        dtype=DTYPES[case.dtype],
    )


def objective(log_p: Tensor, log_q: Tensor, w: Tensor) -> Tensor:
    """``sum w (p log(p/q) - p + q)``, nats."""
    p = log_p.exp()
    return (w * (p * (log_p - log_q) - p + log_q.exp())).sum()


def fused(inputs: Inputs) -> Tensor:
    """This project's."""
    shape = HeadShape(vocabulary=len(inputs.weight), compute_dtype=inputs.dtype)
    return fused_loss(
        inputs.hidden,
        inputs.weight,
        None,
        inputs.ids,
        shape,
        lambda rows, log_p: objective(log_p, inputs.log_q[rows], inputs.w[rows]),
    ).loss


def dense(inputs: Inputs) -> Tensor:
    """Log-softmax of everything, then a gather."""
    logits = inputs.hidden.to(inputs.dtype) @ inputs.weight.to(inputs.dtype).T
    log_p = logits.log_softmax(-1, dtype=torch.float32).gather(1, inputs.ids)
    return objective(log_p, inputs.log_q, inputs.w)


class Recompute(torch.autograd.Function):
    """Logprobs at ids, chunk by chunk; backward computes each chunk's logits and softmax again."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, dtype, chunk):  # type: ignore[no-untyped-def]
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        log_p = torch.empty(ids.shape)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows] @ weight.T
            log_p[rows] = logits.log_softmax(-1, dtype=torch.float32).gather(1, ids[rows])
        ctx.save_for_backward(hidden, weight, ids)
        ctx.chunk = chunk
        return log_p

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        hidden, weight, ids = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty(hidden.shape), torch.zeros(weight.shape)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = hidden[rows] @ weight.T
            slope = logits.softmax(-1, dtype=torch.float32)
            del logits
            slope.mul_(-grad[rows].sum(-1, keepdim=True)).scatter_add_(1, ids[rows], grad[rows])
            slope = slope.to(weight.dtype)
            grad_hidden[rows] = slope @ weight
            if weight.dtype == torch.float32:
                grad_weight.addmm_(slope.T, hidden[rows])
            else:
                grad_weight += slope.T @ hidden[rows]
        return grad_hidden, grad_weight, None, None, None


def chunked(inputs: Inputs, chunk: int) -> Tensor:
    """The recomputing function."""
    log_p = Recompute.apply(inputs.hidden, inputs.weight, inputs.ids, inputs.dtype, chunk)
    return objective(log_p, inputs.log_q, inputs.w)


def loss_of(method: str) -> Callable[[Inputs], Tensor]:
    """The method by its name."""
    if method.startswith("chunked_"):
        return lambda inputs: chunked(inputs, int(method.removeprefix("chunked_")))
    return {"fused": fused, "dense": dense}[method]


def seconds(case: Case, methods: Sequence[str], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median time of forward and backward of each method."""
    inputs = make_inputs(case)
    times: dict[str, list[float]] = {method: [] for method in methods}
    for repeat in range(repeats):
        for method in methods if repeat % 2 == 0 else methods[::-1]:
            inputs.hidden.grad = inputs.weight.grad = None
            started = clock()
            loss_of(method)(inputs).backward()
            times[method].append(clock() - started)
    return {method: statistics.median(found) for method, found in times.items()}


def extra_mib(case: Case, method: str) -> float:
    """Peak growth of this process in one forward and backward, less both gradients and bf16 copies, MiB."""
    loss_of(method)(make_inputs(Case(tokens=8, hidden=16, vocab=64, k=1, dtype=case.dtype))).backward()
    inputs = make_inputs(case)
    before = resident_mib()
    forget_peak()
    loss_of(method)(inputs).backward()
    each = 4 if case.dtype == "fp32" else 4 + 2
    return peak_mib() - before - each * (inputs.hidden.numel() + inputs.weight.numel()) / MIB


def in_process(request: dict[str, object]) -> object:
    """``--child``: one measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.head", "--child", json.dumps(request)],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def child(request: dict) -> object:  # type: ignore[type-arg]
    """What ``in_process`` asks for."""
    torch.set_num_threads(request["threads"])
    case = Case(**request["case"])
    if "method" in request:
        return extra_mib(case, request["method"])
    keep_freed_memory()
    methods, clock = request["methods"], time.process_time if request["threads"] == 1 else time.perf_counter
    # What is done once a process is not measured.
    seconds(Case(tokens=64, hidden=case.hidden, vocab=1024, k=case.k, dtype=case.dtype), methods, 1, clock)
    return seconds(case, methods, request["repeats"], clock)


def measure(case: Case, methods: Sequence[str], threads: int, repeats: int) -> dict[str, object]:
    """One row."""
    asked = {"case": asdict(case), "threads": threads}
    times = in_process(asked | {"repeats": repeats, "methods": methods})
    memory = {method: in_process(asked | {"method": method}) for method in methods}
    assert isinstance(times, dict)
    peers = {method: found for method, found in times.items() if method != "fused"}
    best = min(peers, key=peers.__getitem__)
    return {
        **asdict(case),
        "time_ratio_to_best_peer": round(times["fused"] / peers[best], 3),
        "extra_memory_ratio_to_dense": round(memory["fused"] / memory["dense"], 3),
        "best_peer": best,
        "seconds": {method: round(found, 3) for method, found in times.items()},
        "extra_mib": {method: round(found, 1) for method, found in memory.items()},
    }


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The matrix, or what was chosen of it."""
    if options.quick:
        yield from (Case(tokens=512, hidden=256, vocab=16_384, k=8, dtype=dtype) for dtype in DTYPES)
        return
    for hidden, vocab, dtype, k in product(options.hidden, options.vocab, options.dtype, options.k):
        yield Case(tokens=TOKENS, hidden=hidden, vocab=vocab, k=k, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object at the end, rows as they come on stderr")
    parser.add_argument("--quick", action="store_true", help="two small points, in seconds")
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDENS)
    parser.add_argument("--vocab", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--k", type=int, nargs="+", default=KS)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=tuple(DTYPES))
    parser.add_argument("--chunk", type=int, nargs="+", default=CHUNKS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child)))
        return
    methods = ("fused", "dense", *(f"chunked_{chunk}" for chunk in options.chunk))
    rows = []
    for case in cases(options):
        rows.append(measure(case, methods, options.threads, options.repeats))
        print(json.dumps(rows[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
    # Liger's kernels are Triton's and need a GPU; TRL computes this loss inside its trainer only.
    skipped = {
        name: "not installed" if find_spec(name) is None else "no kernel for a CPU" for name in ("liger_kernel",)
    }
    if options.json:
        print(json.dumps({"threads": options.threads, "skipped": skipped, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
