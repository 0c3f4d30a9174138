"""What is done to a student before it is trained changes what it should and nothing else."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from asyncopd.errors import ConfigError
from asyncopd.learner import optimizers, sharding, step
from asyncopd.learner.adapters import LoraConfig
from asyncopd.learner.step import Learner, LearnerConfig
from asyncopd.learner.student import prepare_student
from asyncopd.publish import WeightStore, materialised
from asyncopd.publish.adapters import write_adapters
from asyncopd.rollout.weights import load_weights_into
from tests.conftest import EOS, HEAD_ROWS, make_tiny_llama, make_tiny_qwen3
from tests.learner.ranks import CONFIG, LORA, MODELS, make_learner, open_accelerator, train


def trained(config: LearnerConfig, model: str = "untied") -> tuple[Learner, list[dict[str, float]]]:
    learner = make_learner(open_accelerator(config), model, config)
    return learner, train(learner, 0, 2)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(1, 12)[None]).logits


@pytest.mark.parametrize("targets", ["all-linear", "q_proj, down_proj"])
def test_published_weights_are_those_of_the_merged_model_and_the_student_keeps_its_own(
    tmp_path: Path, targets: str
) -> None:
    learner, _ = trained(replace(CONFIG, lora=replace(LORA, targets=targets)))
    before = copy.deepcopy(learner.student.state_dict())
    store = WeightStore(tmp_path)
    store.publish(2, learner.weights())
    after = learner.student.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine = make_tiny_qwen3(9, layers=2).double()
    load_weights_into(engine, store.directory(2))
    torch.testing.assert_close(logits(engine), logits(learner.student), atol=1e-12, rtol=1e-12)
    start = MODELS["untied"]().double()
    assert (logits(engine) - logits(start)).abs().max() > 1e-3
    changed = {name for name, own in start.state_dict().items() if not torch.equal(own, engine.state_dict()[name])}
    kinds = {name.split(".")[-2] for name in changed}
    assert kinds == ({"q_proj", "down_proj"} if "," in targets else kinds - {"lm_head", "embed_tokens", "norm"})


def test_adapters_are_all_that_is_trained_and_peft_loads_them(tmp_path: Path) -> None:
    learner, _ = trained(replace(CONFIG, lora=LORA), "tied")
    names = {name for name, parameter in learner.student.named_parameters() if parameter.requires_grad}
    assert names
    assert all(".lora_" in name for name in names)
    write_adapters(tmp_path, learner.adapters(), learner.adapter_config())
    loaded = PeftModel.from_pretrained(MODELS["tied"]().double(), tmp_path, autocast_adapter_dtype=False)
    torch.testing.assert_close(logits(loaded), logits(learner.student), atol=1e-12, rtol=1e-12)


def test_a_lora_target_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"learner\.lora\.targets is 'k_prj'"):
        prepare_student(make_tiny_llama(), replace(CONFIG, lora=LoraConfig(rank=2, targets="k_prj")))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_lora_target_that_the_loss_would_not_see_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=f"names [a-z.]*{target}; expected linear layers other than the head"):
        prepare_student(make_tiny_qwen3(), replace(CONFIG, lora=LoraConfig(rank=2, targets=target)))


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_recomputing_activations_changes_no_weight(model: str) -> None:
    kept, told = trained(CONFIG, model)
    recomputed, told_again = trained(replace(CONFIG, gradient_checkpointing=True), model)
    assert recomputed.student.is_gradient_checkpointing
    assert told_again[1]["grad_norm"] == pytest.approx(told[1]["grad_norm"], rel=1e-12)
    for name, weight in kept.student.state_dict().items():
        torch.testing.assert_close(recomputed.student.state_dict()[name], weight, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"fsdp_version": 1}, "fsdp_version: 2"),
        ({"cpu_offload": True}, "fsdp_offload_params: false"),
        ({"activation_checkpointing": True}, "gradient_checkpointing true"),
        ({"reshard_after_forward": False}, ""),
    ],
)
def test_an_fsdp_config_is_read_as_far_as_it_is_served(options: dict[str, object], remedy: str) -> None:
    plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **options})
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin), num_processes=2
    )
    if remedy:
        with pytest.raises(ConfigError, match=remedy):
            sharding.reshard_after_forward(accelerator)
    else:
        assert sharding.reshard_after_forward(accelerator) is False


def test_parameters_that_were_not_sharded_are_an_error_and_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "fully_shard", lambda module, **_: module)
    monkeypatch.setattr(sharding, "init_device_mesh", lambda device, shape: None)
    monkeypatch.setattr(sharding, "register_fsdp_forward_method", lambda module, name: None)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.MULTI_CPU, num_processes=2, device=torch.device("cpu")
    )
    module = torch.nn.Module()
    module.model = make_tiny_llama()
    with pytest.raises(ConfigError, match=r"fsdp2, but 2. parameters were not sharded"):
        sharding.distributed(module, "fsdp2", accelerator)


@pytest.mark.parametrize("end", ["embeddings", "head"])
def test_a_frozen_end_stands_still_and_the_rest_is_trained(end: str) -> None:
    config = replace(CONFIG, freeze_embeddings=end == "embeddings", freeze_head=end == "head")
    learner, _ = trained(config)
    start = MODELS["untied"]().double().state_dict()
    still = {name for name, weight in learner.student.state_dict().items() if torch.equal(weight, start[name])}
    assert still == {"model.embed_tokens.weight" if end == "embeddings" else "lm_head.weight"}


def test_tied_ends_are_frozen_together_or_not_at_all() -> None:
    with pytest.raises(ConfigError, match="one tensor; set both alike"):
        prepare_student(make_tiny_llama(), replace(CONFIG, freeze_head=True))
    model = make_tiny_llama()
    prepare_student(model, replace(CONFIG, freeze_head=True, freeze_embeddings=True))
    assert not model.get_output_embeddings().weight.requires_grad
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_no_router_loss_is_added_for_a_mixture_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixtral(coefficient: float) -> MixtralForCausalLM:
        torch.manual_seed(3)
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=HEAD_ROWS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
                router_aux_loss_coef=coefficient, eos_token_id=EOS, pad_token_id=EOS,
            )
        ).eval()  # fmt: skip

    weights = []
    for coefficient in (0.0, 100.0):
        monkeypatch.setitem(MODELS, "experts", lambda coefficient=coefficient: mixtral(coefficient))
        # Grouped products of experts have no float64 kernel.
        learner, _ = trained(replace(CONFIG, dtype="bf16"), "experts")
        weights.append({name: materialised(weight).clone() for name, weight in learner.weights().items()})
    start = mixtral(0.0).state_dict()
    routers = [name for name in start if "gate.weight" in name]
    assert routers
    assert not any(torch.equal(start[name], weights[0][name]) for name in routers)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_an_optimizer_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="adamw_8bit needs the package torchao"):
        LearnerConfig(optimizer="adamw_8bit")


def test_a_learning_rate_that_an_optimizer_keeps_as_a_tensor_is_logged_as_the_number_that_was_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_tensor(
        name: str, parameters: Iterable[torch.nn.Parameter], *, lr: float, **_: object
    ) -> torch.optim.AdamW:
        return torch.optim.AdamW(parameters, lr=torch.tensor(lr))

    _, expected = trained(CONFIG)
    monkeypatch.setattr(step, "build_optimizer", with_tensor)
    _, metrics = trained(CONFIG)
    assert all(type(value) is float for row in metrics for value in row.values())
    assert [row["lr"] for row in metrics] == pytest.approx([row["lr"] for row in expected])


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.slow
def test_eight_bit_moments_train_nearly_as_whole_ones() -> None:
    config = replace(CONFIG, dtype="bf16")
    _, whole = trained(config)
    learner, small = trained(replace(config, optimizer="adamw_8bit"))
    assert type(learner.optimizer).__name__ == "AdamW8bit"
    assert small[1]["loss"] == pytest.approx(whole[1]["loss"], rel=0.01)


@pytest.mark.slow
def test_compiled_layers_train_as_the_others_do(tmp_path: Path) -> None:
    plain, told = trained(CONFIG)
    compiled, told_compiled = trained(replace(CONFIG, compile=True))
    # The layers' norms are float32 inside, whatever the dtype, and compiled code sums in another order.
    assert told_compiled[1]["grad_norm"] == pytest.approx(told[1]["grad_norm"], rel=1e-6)
    assert compiled.student.state_dict().keys() == plain.student.state_dict().keys()
    for name, weight in plain.student.state_dict().items():
        torch.testing.assert_close(compiled.student.state_dict()[name], weight, atol=1e-4, rtol=1e-4)
    WeightStore(tmp_path).publish(2, compiled.weights())
    assert load_file(tmp_path / "weights" / "v00000002" / "model.safetensors").keys() == plain.weights().keys()
