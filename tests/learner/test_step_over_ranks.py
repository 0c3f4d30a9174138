"""A step's gradient does not depend on how many processes, micro-batches and rows it is spread over."""

import functools

import pytest
import torch
from torch import Tensor

from tests.learner.ranks import start_ranks
from tests.learner.step_ranks import LAYOUTS, OBJECTIVES, step_gradient
from tests.learner.test_step import SAMPLES


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict:  # type: ignore[type-arg]
    """What two processes found."""
    file = tmp_path_factory.mktemp("ranks") / "found.pt"
    start_ranks("tests.learner.step_ranks", 2, file)
    return torch.load(file)


def test_there_were_two_processes(two: dict) -> None:  # type: ignore[type-arg]
    assert two["processes"] == 2


@functools.cache
def _alone(name: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    return step_gradient(name, SAMPLES[::-1], "padded")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_processes_have_the_gradient_of_one(two: dict, name: str, layout: str) -> None:  # type: ignore[type-arg]
    alone, told = _alone(name)
    spread, told_by_two = two["found"][name, layout]
    assert alone.keys() == spread.keys()
    for key in alone:
        torch.testing.assert_close(spread[key], alone[key], atol=1e-10, rtol=1e-10)
    assert told_by_two["loss"] == pytest.approx(told["loss"], rel=1e-10)
    assert max(float(gradient.abs().max()) for gradient in alone.values()) > 1e-3


def test_the_second_moment_masks_some_tokens_of_the_step(two: dict) -> None:  # type: ignore[type-arg]
    _, told = two["found"]["second_moment", "padded"]
    assert 0 < told["clipped"] < 1


@pytest.mark.parametrize("name", ["hajek", "mean"])
@pytest.mark.parametrize("layout", ["padded", "packed", "one by one"])
def test_the_bf16_gradient_is_within_five_percent_of_float64(name: str, layout: str) -> None:
    exact, _ = _alone(name)
    rough, _ = step_gradient(name, SAMPLES, layout, dtype="bf16")
    apart = sum(float((rough[key] - exact[key]).square().sum()) for key in exact)
    size = sum(float(exact[key].square().sum()) for key in exact)
    assert (apart / size) ** 0.5 < 0.05
