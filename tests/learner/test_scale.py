"""Two real processes, sharded or not, train as one does, and go on from each other's checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from tests.learner.ranks import (
    ADAPTERS,
    HELD,
    RUNS,
    SAVED,
    STEPS,
    open_accelerator,
    resumed_run,
    start_ranks,
    whole_run,
)

EXACT = [name for name, (_, config) in RUNS.items() if config.dtype == "fp32"]
TOLD = ("loss", "grad_norm", "tokens", "entropy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs on one process, then on two, which also resume those of the one."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, (model, config) in RUNS.items():
        told = whole_run(folder / "alone" / name, open_accelerator(config), model, config)
        torch.save({"whole": told}, folder / "alone" / f"{name}.pt")
    start_ranks("tests.learner.ranks", 2, folder)
    return folder


def weights(run: Path) -> dict[str, Tensor]:
    (file,) = (run / "weights" / f"v{STEPS:08d}").glob("*.safetensors")
    return load_file(file)


def assert_same(run: Path, other: Path, atol: float) -> None:
    mine, theirs = weights(run), weights(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], atol=atol, rtol=atol)


def assert_same_figures(told: list[dict[str, float]], others: list[dict[str, float]], rel: float) -> None:
    assert len(told) == len(others)
    for mine, theirs in zip(told, others, strict=True):
        assert {name: mine[name] for name in TOLD} == pytest.approx({name: theirs[name] for name in TOLD}, rel=rel)


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_end_with_the_weights_of_one(folder: Path, name: str) -> None:
    two, one = torch.load(folder / f"{name}.pt"), torch.load(folder / "alone" / f"{name}.pt")
    assert_same_figures(two["whole"], one["whole"], 1e-10)
    assert all(step["grad_norm"] > RUNS[name][1].clip for step in one["whole"])  # the global norm is clipped
    assert_same(folder / name, folder / "alone" / name, 1e-10)


@pytest.mark.parametrize("name", RUNS)
def test_what_several_processes_hand_to_engines_is_what_they_write_to_the_file(folder: Path, name: str) -> None:
    assert_same(folder / name / HELD, folder / name, 0)


def test_adapters_that_are_published_alone_are_those_of_one_process(folder: Path) -> None:
    assert all(".lora_" in name for name in weights(folder / "fsdp2_lora" / ADAPTERS))
    assert_same(folder / "fsdp2_lora" / ADAPTERS, folder / "alone" / "fsdp2_lora" / ADAPTERS, 1e-10)


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_spread_where_it_was_asked_for_and_nowhere_else(folder: Path, name: str) -> None:
    two, one = (torch.load(run / f"{name}.pt")["whole"][-1] for run in (folder, folder / "alone"))
    assert (two["sharded"], one["sharded"]) == (float(not name.startswith("replicated")), 0)


@pytest.mark.parametrize("name", EXACT)
def test_logprobs_without_gradient_are_those_of_one_process(folder: Path, name: str) -> None:
    two, one = (torch.load(run / f"{name}.pt")["whole"][-1] for run in (folder, folder / "alone"))
    # The probe's are float32 at the end, whatever the student's dtype.
    assert two["probe"] == pytest.approx(one["probe"], rel=1e-6)
    assert two["candidates"] == pytest.approx(one["candidates"], rel=1e-10)


def test_sharded_bf16_is_the_autocast_of_replicated_processes(folder: Path) -> None:
    sharded, replicated = (torch.load(folder / f"{name}.pt")["whole"] for name in ("fsdp2_bf16", "replicated_bf16"))
    assert_same_figures(sharded, replicated, 1e-5)
    assert_same(folder / "fsdp2_bf16", folder / "replicated_bf16", 1e-5)
    exact = torch.load(folder / "fsdp2.pt")["whole"]
    assert sharded[0]["grad_norm"] != pytest.approx(exact[0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_go_on_from_the_checkpoint_of_one(folder: Path, name: str) -> None:
    resumed, whole = torch.load(folder / f"{name}.pt")["resumed"], torch.load(folder / "alone" / f"{name}.pt")["whole"]
    assert_same_figures(resumed, whole[SAVED:], 1e-10)
    assert_same(folder / f"{name}_resumed", folder / "alone" / name, 1e-10)


@pytest.mark.parametrize("name", EXACT)
def test_one_process_goes_on_from_the_checkpoint_of_two(folder: Path, tmp_path: Path, name: str) -> None:
    model, config = RUNS[name]
    told = resumed_run(tmp_path, folder / name, open_accelerator(config), model, config)
    assert_same_figures(told, torch.load(folder / f"{name}.pt")["whole"][SAVED:], 1e-10)
    assert_same(tmp_path, folder / name, 1e-10)


def test_a_sharded_checkpoint_is_read_without_sharding(folder: Path, tmp_path: Path) -> None:
    model, config = RUNS["fsdp2"]
    resumed_run(tmp_path, folder / "fsdp2", open_accelerator(config), model, replace(config, sharding="none"))
    assert_same(tmp_path, folder / "fsdp2", 1e-10)


def test_a_checkpoint_of_adapters_holds_no_weight_of_the_student(folder: Path) -> None:
    def stored(run: str) -> list[str]:
        state = folder / run / "checkpoints" / f"v{SAVED:08d}" / "state"
        return [name for name in FileSystemReader(state).read_metadata().state_dict_metadata if ".layers." in name]

    assert any("q_proj.weight" in name for name in stored("fsdp2_untied"))
    assert stored("fsdp2_lora")
    assert [name for name in stored("fsdp2_lora") if ".lora_" not in name] == []
