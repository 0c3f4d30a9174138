"""The memory of the head follows its budget, measured in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOKENS, HIDDEN, VOCABULARY = 1536, 32, 32_768
WHOLE_MIB = TOKENS * VOCABULARY * 4 / 2**20
"""Of float32 logits of all tokens: 192 MiB."""
AROUND_MIB = 40
"""Blocks between the products, and what the products themselves need."""
CHILD = """
import json, sys
import torch
from asyncopd.learner.head import HeadShape, fused_loss
from asyncopd.learner.selected import selected_logprobs
from tests.resident_memory import forget_peak, peak_mib, resident_mib

form, dtype, mib, tokens, hidden_size, vocabulary = json.loads(sys.argv[1])
torch.set_num_threads(1)


def train(tokens, vocabulary):
    hidden = torch.empty(tokens, hidden_size).normal_().requires_grad_()
    weight = torch.empty(vocabulary, hidden_size).normal_(0, 0.1).requires_grad_()
    ids = torch.randint(vocabulary, (tokens, 4))
    shape = HeadShape(vocabulary=vocabulary, compute_dtype=getattr(torch, dtype), chunk_bytes=int(mib * 2**20))
    before = resident_mib()
    forget_peak()
    if form == "fused":
        loss = fused_loss(hidden, weight, None, ids, shape, lambda rows, log_p: log_p.sum(), entropy=True).loss
    else:
        loss = selected_logprobs(hidden, weight, None, ids, shape, entropy=True, top=2).log_p_TC.sum()
    loss.backward()
    return peak_mib() - before


train(8, 64)
print(train(tokens, vocabulary))
"""


def _growth(form: str, dtype: str, mib: int) -> float:
    """MiB by which the process grows in one forward and backward, both gradients (4 MiB) included."""
    request = json.dumps([form, dtype, mib, TOKENS, HIDDEN, VOCABULARY])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, request], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    )
    return float(done.stdout)


@pytest.mark.parametrize(("form", "dtype"), [("fused", "float32"), ("recompute", "bfloat16")])
def test_the_peak_follows_the_budget_and_never_holds_all_logits(form: str, dtype: str) -> None:
    small, large = _growth(form, dtype, 4), _growth(form, dtype, 48)
    assert small < 4 + AROUND_MIB
    assert large < 48 + AROUND_MIB < WHOLE_MIB
    # In bf16 the longest chunk takes 20 MiB.
    assert large - small > (10 if dtype == "bfloat16" else 30)
