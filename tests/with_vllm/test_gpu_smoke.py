"""The smoke test for GPUs says so where it can test nothing, and its checks hold on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.smoke import adapters, swaps, transfers

pytestmark = pytest.mark.vllm


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_smoke_test_ends_at_once_and_says_why() -> None:
    ended = subprocess.run([sys.executable, "-m", "tests.gpu.smoke"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no GPU here" in ended.stderr


def test_the_checks_of_the_smoke_test_hold_on_a_cpu(tmp_path: Path) -> None:
    engine = swaps("tied-llama", tmp_path, device="cpu")
    transfers(engine, "tied-llama", tmp_path, "gloo", torch.device("cpu"))
    adapters("tied-llama", tmp_path, device="cpu")
