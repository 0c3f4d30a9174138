"""What is said of a step's speed: its arithmetic is what torch counts, its update is what the weights did."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralConfig

from asyncopd import pipeline
from asyncopd.errors import ConfigError
from asyncopd.evaluation import EvaluationConfig
from asyncopd.learner.clock import PhaseClock
from asyncopd.learner.model_flops import ModelFlops, peak_flops
from asyncopd.learner.update_size import SAMPLED, UpdateSize
from asyncopd.pipeline import run
from asyncopd.tracking import keys
from asyncopd.tracking.metrics import read_metrics
from asyncopd.tracking.trackers import TrackingConfig
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import ThreadedWorkers, tiny_config


def _counted(model: LlamaForCausalLM, tokens: int) -> int:
    """Operations of forward and backward of one sequence, as torch counts them."""
    model.set_attn_implementation("eager")
    ids = torch.arange(tokens)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_operations_of_a_step_are_those_that_torch_counts(tied: bool) -> None:
    config = copy.deepcopy(make_tiny_llama(0).config)
    config.tie_word_embeddings = tied
    model = LlamaForCausalLM(config)
    flops = ModelFlops.of(model)
    assert flops is not None
    # torch counts products of matrices; norms have parameters too, some hundreds of them.
    assert flops.step([40], 40) == pytest.approx(_counted(model, 40), rel=0.01)


def test_frozen_weights_save_their_gradient() -> None:
    model = make_tiny_llama(0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "mlp" in name
    flops = ModelFlops.of(model)
    assert flops is not None
    assert flops.head_trained == 0
    assert flops.body_trained == sum(p.numel() for n, p in model.named_parameters() if "mlp" in n)


def test_a_mixture_of_experts_gets_no_count_rather_than_a_wrong_one() -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=4,
    )  # fmt: skip
    assert ModelFlops.of(AutoModelForCausalLM.from_config(config)) is None


def test_operations_add_up_over_ranks_and_micro_batches() -> None:
    flops = ModelFlops.of(make_tiny_llama(0))
    assert flops is not None
    assert flops.step([7, 30], 0) + flops.step([11], 0) + flops.step([], 21) == flops.step([7, 30, 11], 21)


def test_a_peak_is_what_was_given_and_unknown_on_a_cpu() -> None:
    assert peak_flops(312.0, torch.device("cpu"), "fp32") == 312e12
    assert peak_flops(0.0, torch.device("cpu"), "bf16") is None
    with pytest.raises(ConfigError, match="peak_tflops is -1"):
        TrackingConfig(peak_tflops=-1.0)


def test_the_update_ratio_of_small_tensors_is_exact_and_frozen_ones_do_not_count() -> None:
    weights = [torch.nn.Parameter(torch.randn(5, 7)), torch.nn.Parameter(torch.randn(3))]
    frozen = torch.nn.Parameter(torch.full((100,), 9.0), requires_grad=False)
    size = UpdateSize([*weights, frozen])
    size.before()
    old = torch.cat([weight.detach().flatten() for weight in weights])
    with torch.no_grad():
        for weight in weights:
            weight.add_(0.01 * torch.randn_like(weight))
    new = torch.cat([weight.detach().flatten() for weight in weights])
    assert size.ratio() == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-5)


def test_the_update_ratio_of_large_tensors_is_close_and_every_tensor_has_its_weight() -> None:
    """A large tensor that stands still beside one that moves: a mean over samples would be far off."""
    generator = torch.Generator().manual_seed(0)
    still = torch.nn.Parameter(torch.randn(1000 * SAMPLED, generator=generator))
    moved = torch.nn.Parameter(torch.randn(30 * SAMPLED, generator=generator))
    size = UpdateSize([still, moved])
    size.before()
    old = torch.cat([still.detach(), moved.detach()])
    with torch.no_grad():
        moved.mul_(1.1)
    change = torch.cat([still.detach(), moved.detach()]) - old
    assert size.ratio() == pytest.approx(float(change.norm() / old.norm()), rel=0.1)


def test_a_phase_that_comes_twice_is_summed() -> None:
    clock = PhaseClock(torch.device("cpu"))
    for name in ("forward_s", "backward_s", "forward_s"):
        with clock.phase(name):
            once = clock.seconds().get("forward_s", 0.0)
    assert list(clock.seconds()) == ["forward_s", "backward_s"]
    assert clock.seconds()["forward_s"] > once > 0


def test_every_step_of_a_run_says_where_its_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    teacher = save_checkpoint(make_tiny_llama(0), tmp_path / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    config = tiny_config(tmp_path, teacher, student, steps=2, evaluation=EvaluationConfig(prompts=0))
    result = run(replace(config, tracking=replace(config.tracking, peak_tflops=0.1)))
    rows = [row.values for row in read_metrics(result.path) if keys.LOSS in row.values]
    assert len(rows) == 2
    for row in rows:
        phases = (keys.READ_SECONDS, keys.FORWARD_SECONDS, keys.BACKWARD_SECONDS, keys.OPTIMIZER_SECONDS)
        assert all(row[name] > 0 for name in (*phases, keys.PUBLISH_SECONDS, keys.MEMORY_GB))
        assert sum(row[name] for name in phases) < row[keys.STEP_SECONDS]
        assert row[keys.TOKENS_PER_SECOND] == pytest.approx(row[keys.TOKENS] / row[keys.STEP_SECONDS])
        assert 0 < row[keys.MFU] < 1
    # The warm-up's first step has the rate 0.
    assert rows[0][keys.UPDATE_RATIO] == 0
    assert 0 < rows[1][keys.UPDATE_RATIO] < 0.1
