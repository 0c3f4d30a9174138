"""A version that is adapters alone: whoever reads it has the student that the learner trains."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from asyncopd import pipeline
from asyncopd.errors import CheckpointError, ConfigError
from asyncopd.evaluation import EvaluationConfig
from asyncopd.learner.adapters import LoraConfig, adapter_config, adapter_weights, add_adapters, merged_weights
from asyncopd.pipeline import run
from asyncopd.publish import WeightStore, materialised
from asyncopd.publish.config import PublishConfig
from asyncopd.publishing import Published, check_publishing
from asyncopd.rollout.vllm_config import LORA_RANKS, VllmEngineConfig
from asyncopd.rollout.weights import load_weights_into, published_weights
from tests.conftest import VOCABULARY, make_tiny_llama, make_tiny_qwen3, save_checkpoint
from tests.tiny_run import ThreadedWorkers, final_weights, tiny_config


def tiny_gpt2() -> PreTrainedModel:
    """Its linear layers hold their weights transposed."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied-llama": lambda: make_tiny_llama(1, layers=2),
    "untied-qwen3": lambda: make_tiny_qwen3(1, layers=2),
    "transposed-gpt2": tiny_gpt2,
}


def adapted(checkpoint: Path, seed: int = 0) -> PreTrainedModel:
    """The model of a checkpoint with adapters that change much."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    add_adapters(model, LoraConfig(rank=4, alpha=8.0))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def published(model: PreTrainedModel, folder: Path, version: int = 1) -> Path:
    return WeightStore(folder, None, adapter_config(model)).publish(version, adapter_weights(model))


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 12)[None]).logits


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_reads_them_holds_the_merged_weights_to_the_last_bit(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    checkpoint = tmp_path / kind
    MODELS[kind]().save_pretrained(checkpoint, max_shard_size="20KB")
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    engine = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    before = logits(engine)
    for version, seed in enumerate((1, 2, 1), start=1):
        learner = adapted(checkpoint, seed)
        directory = published(learner, tmp_path, version)
        assert sorted(path.name for path in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        load_weights_into(engine, directory)
        own = engine.state_dict()
        for name, weight in merged_weights(learner).items():
            assert torch.equal(own[name], materialised(weight).to(dtype)), name
        if dtype == torch.float32:
            torch.testing.assert_close(logits(engine), logits(learner), atol=1e-5, rtol=1e-5)
    assert (logits(engine) - before).abs().max() > 0.1


def test_adapters_that_do_not_fit_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(MODELS["untied-qwen3"](), tmp_path / "student")
    engine = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    learner = adapted(checkpoint)
    whole = load_file(published(learner, tmp_path) / "adapter_model.safetensors")
    up = next(name for name in whole if name.endswith("q_proj.lora_B.weight"))
    foreign = {name.replace(".layers.1.", ".layers.7."): tensor for name, tensor in whole.items()}
    for place, (message, tensors) in enumerate(
        {"which the model has as": {**whole, up: torch.zeros(3, 4)}, "which the model does not have": foreign}.items()
    ):
        directory = tmp_path / f"wrong-{place}"
        directory.mkdir()
        (directory / "adapter_config.json").write_text(adapter_config(learner))
        save_file(tensors, directory / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_weights_into(engine, directory)
    directory = published(learner, tmp_path, 2)
    one_layer = save_checkpoint(make_tiny_qwen3(1, layers=1), tmp_path / "one_layer")
    with pytest.raises(CheckpointError, match=r"no safetensors file in .*one_layer has that weight: set publish\.adap"):
        published_weights(directory, one_layer)
    engine.name_or_path = "moved"
    (directory / "adapter_config.json").write_text(
        adapter_config(learner).replace(str(checkpoint), str(tmp_path / "one_layer"))
    )
    with pytest.raises(CheckpointError, match=r"no safetensors file in .*one_layer has that weight"):
        load_weights_into(engine, directory)
    (directory / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot read"):
        load_weights_into(engine, directory)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())


def test_a_run_that_publishes_adapters_ends_as_one_that_publishes_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    teacher = save_checkpoint(make_tiny_llama(0), tmp_path / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    ended, sizes = [], []
    for adapters in (True, False):
        config = tiny_config(tmp_path, teacher, student, evaluation=EvaluationConfig(prompts=4, every=3))
        learner = replace(config.learner, lora=LoraConfig(rank=4))
        name = "adapters" if adapters else "whole"
        asked = replace(config, name=name, learner=learner, publish=PublishConfig(adapters=adapters))
        run(asked)
        # The last steps again, from a checkpoint.
        result = run(asked, resume=True, resume_version=4)
        (newest,) = {path.parent for path in result.path.glob(f"weights/v{config.steps:08d}/*.safetensors")}
        assert sorted(path.name for path in newest.iterdir() if path.suffix == ".safetensors") == [
            "adapter_model.safetensors" if adapters else "model.safetensors"
        ]
        sizes.append(sum(path.stat().st_size for path in newest.iterdir()))
        assert result.before is not None
        assert result.after is not None
        ended.append((final_weights(result.path), result.before.reverse_kl, result.after.reverse_kl))
    (ours, *our_figures), (theirs, *their_figures) = ended
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert our_figures == their_figures
    assert our_figures[0] != our_figures[1]
    assert sizes[0] < sizes[1]


def test_what_a_version_is_follows_from_the_way_it_goes(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path, tmp_path)
    lora = replace(config.learner, lora=LoraConfig(rank=4))

    def told(
        engine: str,
        way: str = "auto",
        gpus: bool = True,
        learner: object = lora,
        dtype: str = "bf16",
        **publish: object,
    ) -> tuple[bool, bool, torch.dtype | None]:
        rollout = replace(config.rollout, engine=engine, dtype=dtype, vllm=VllmEngineConfig(adapters=way))
        asked = replace(config, learner=learner, publish=PublishConfig(**publish), rollout=rollout)
        is_ = Published.of(asked, gpus)
        return is_.adapters, is_.applied, is_.dtype

    assert told("vllm", dtype="fp32") == (True, False, None)
    whole, merged, applied = (False, False, torch.bfloat16), (True, False, None), (True, True, None)
    assert told("vllm") == told("vllm", "apply", gpus=False) == applied
    assert told("vllm", gpus=False) == told("vllm", "merge") == merged
    assert told("transformers") == told("vllm_server") == told("vllm_server", "apply") == merged
    assert told("vllm", adapters=False) == told("vllm", backend="gloo") == whole
    assert told("transformers", learner=config.learner) == told("vllm", learner=config.learner) == whole


def test_adapters_that_vllm_would_not_apply_are_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path, tmp_path)

    def check(rank: int, way: str, dtype: str, gpus: bool) -> None:
        rollout = replace(config.rollout, engine="vllm", dtype=dtype, vllm=VllmEngineConfig(adapters=way))
        learner = replace(config.learner, lora=LoraConfig(rank=rank))
        check_publishing(replace(config, learner=learner, rollout=rollout), gpus=gpus)

    most = LORA_RANKS[-1]
    with pytest.raises(ConfigError, match=rf"learner\.lora\.rank is {most + 1}.*rollout\.vllm\.adapters to merge"):
        check(most + 1, "auto", "bf16", gpus=True)
    with pytest.raises(ConfigError, match="rollout.dtype fp32, in which vLLM applies none on GPUs"):
        check(most, "apply", "fp32", gpus=True)
    check(most + 1, "auto", "bf16", gpus=False)
    check(most, "apply", "fp32", gpus=False)
    check(most, "auto", "bf16", gpus=True)


def test_a_student_whose_weights_readers_would_not_find_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    teacher = save_checkpoint(make_tiny_llama(0), tmp_path / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    torch.save(load_file(student / "model.safetensors"), student / "pytorch_model.bin")
    (student / "model.safetensors").unlink()
    config = tiny_config(tmp_path, teacher, student, steps=1)
    config = replace(config, learner=replace(config.learner, lora=LoraConfig(rank=4)))
    with pytest.raises(
        ConfigError, match="no safetensors file in .*student has a weight.*set publish.adapters to false"
    ):
        run(config)
    assert run(replace(config, name="whole", publish=PublishConfig(adapters=False))).policy_version == 1
