"""Seconds of the demo's learner step: with the head of this tree, with a dense one, and in an earlier commit.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.learner_step models/smollm2-student --before 60c60a3

12 answers of 48 tokens after prompts of 30 to 50, reverse KL on systematic(16), bf16 autocast, one thread, AdamW over
all weights. Ids and scores are made up: no value changes the work. Each tree runs in processes of its own, in turn; the
figures are medians of the CPU seconds of all steps but the first of each process.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncopd.allocator import keep_freed_memory
from asyncopd.learner import module
from asyncopd.learner.head import FusedLoss, HeadShape
from asyncopd.learner.step import Learner, LearnerConfig
from asyncopd.objectives import ObjectiveConfig, build_objective
from asyncopd.types import Rollout, ScoredRollout
from teacher_cache.record import CandidateSet, TeacherRecord

ANSWERS, TOKENS, CANDIDATES = 12, 48, 16
DESIGN = f"systematic({CANDIDATES})"


def sample(index: int, vocabulary: int) -> ScoredRollout:
    """One answer with candidates and scores."""
    generator = torch.Generator().manual_seed(index)

    def logprobs(*shape: int) -> Tensor:
        return -9 * torch.rand(*shape, generator=generator)

    def ids(*shape: int) -> Tensor:
        return torch.randint(vocabulary, shape, generator=generator, dtype=torch.int32)

    drawn = CandidateSet(
        origin="student",
        design=DESIGN,
        temperature=1.0,
        version=0,
        ids_TC=ids(TOKENS, CANDIDATES),
        log_w_TC=-logprobs(TOKENS, CANDIDATES),
        log_q_TC=logprobs(TOKENS, CANDIDATES),
    )
    rollout = Rollout(
        uid=str(index),
        prompt_ids=tuple(ids(30 + index * 20 // ANSWERS).tolist()),
        response_ids_T=ids(TOKENS),
        versions_T=torch.zeros(TOKENS, dtype=torch.int32),
        log_b_T=logprobs(TOKENS),
        finish="length",
        candidates=drawn,
    )
    record = TeacherRecord(
        temperature=1.0, teacher="default", log_q_T=logprobs(TOKENS), entropy_T=-logprobs(TOKENS), sets=(drawn,)
    )
    return ScoredRollout(rollout=rollout, record=record)


def dense_loss(hidden_TH, weight_VH, bias_V, ids_TC, shape, chunk_loss, **_):  # type: ignore[no-untyped-def]
    """In place of ``fused_loss``: logits and log-softmax of all tokens at once, the rest left to autograd."""
    dtype = shape.compute_dtype
    log_p_TV = (hidden_TH.to(dtype) @ weight_VH.to(dtype).T).log_softmax(-1, dtype=torch.float32)
    with torch.no_grad():
        entropy_T = -(log_p_TV.exp() * log_p_TV).sum(-1)
    return FusedLoss(loss=chunk_loss(slice(0, len(hidden_TH)), log_p_TV.gather(1, ids_TC)), entropy_T=entropy_T)


def step_seconds(student: Path, head: str, steps: int) -> list[float]:
    """Seconds of each step but the first."""
    torch.set_num_threads(1)
    keep_freed_memory()
    if head == "dense":
        module.fused_loss = dense_loss
    config = LearnerConfig()
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    vocabulary = model.config.vocab_size
    learner = Learner(
        model,
        build_objective(ObjectiveConfig(name="reverse_kl", design=DESIGN)),
        config,
        accelerator=Accelerator(cpu=True, mixed_precision="bf16"),
        steps=steps + 1,
        shape=HeadShape.of(model.config, vocabulary=vocabulary, chunk_bytes=config.head_chunk_mb * 2**20),
        pad_id=0,
    )
    samples = [sample(index, vocabulary) for index in range(ANSWERS)]
    seconds = []
    for version in range(steps + 1):
        started = time.process_time()
        learner.step(samples, version)
        seconds.append(time.process_time() - started)
    return seconds[1:]


def in_tree(tree: Path, student: Path, head: str, steps: int) -> list[float]:
    """The same in a process that imports ``tree``."""
    done = subprocess.run(
        # -P, because a module of this folder has the name of one of Python's.
        [sys.executable, "-P", __file__, str(student.resolve()), "--child", head, "--steps", str(steps)],
        env={**os.environ, "PYTHONPATH": str(tree)},
        check=True,
        capture_output=True,
        text=True,
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("student", type=Path)
    parser.add_argument("--before", metavar="COMMIT", help="also the learner of an earlier commit")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", choices=("own", "dense"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(step_seconds(options.student, options.child, options.steps)))
        return
    here = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        trees = {"fused": (here, "own"), "dense head": (here, "dense")}
        if options.before:
            archive = subprocess.run(["git", "archive", options.before], cwd=here, check=True, capture_output=True)
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(folder, filter="data")
            trees[options.before] = (Path(folder), "own")
        seconds: dict[str, list[float]] = {name: [] for name in trees}
        for _ in range(options.rounds):
            for name, (tree, head) in trees.items():
                seconds[name] += in_tree(tree, options.student, head, options.steps)
    print(json.dumps({name: round(statistics.median(found), 2) for name, found in seconds.items()}))


if __name__ == "__main__":
    main()
