"""A quantised teacher is another teacher: near, and never taken for the full one."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from teacher_cache.errors import ScoringError
from teacher_cache.local_teacher import LocalTeacherConfig
from teacher_cache.quantization import QUANTIZATIONS
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from tests.conftest import HEAD_ROWS, VOCABULARY, save_checkpoint


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for the blocks of 64 weights that 4 bits come in."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=HEAD_ROWS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip
    return save_checkpoint(LlamaForCausalLM(config), tmp_path_factory.mktemp("quantised"))


def scored(config: LocalTeacherConfig) -> TeacherRecord:
    ids = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1))
    request = ScoreRequest(uid="0-0-0-0", prompt_ids=(1, 2, 3), response_ids_T=ids.int(), draw="full")
    (record,) = config.load(VOCABULARY).score([request])
    assert isinstance(record, TeacherRecord), record
    return record


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_quantised_teacher_scores_near_the_full_one_and_has_another_fingerprint(teacher_dir: Path, name: str) -> None:
    package = name.partition("-")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    full = LocalTeacherConfig(model=teacher_dir, dtype="fp32", device="cpu")
    quantised = LocalTeacherConfig(model=teacher_dir, dtype="fp32", device="cpu", quantization=name)
    assert quantised.identity().fingerprint != full.identity().fingerprint
    found = [scored(config).of_origin("teacher").log_q_TC for config in (full, quantised)]
    assert found[0] is not None
    assert found[1] is not None
    apart = (found[1] - found[0]).abs().mean()
    assert 0 < apart < (1.0 if "4bit" in name else 0.1)
    torch.testing.assert_close(found[1].exp().sum(-1), torch.ones(40), atol=1e-5, rtol=0)


def test_an_unknown_quantisation_and_a_missing_package_are_named(
    teacher_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ScoringError, match="torchao-int8"):
        LocalTeacherConfig(model=teacher_dir, quantization="int3")
    monkeypatch.setattr("teacher_cache.quantization.find_spec", lambda name: None)
    with pytest.raises(ScoringError, match="pip install bitsandbytes"):
        LocalTeacherConfig(model=teacher_dir, quantization="bitsandbytes-8bit")
