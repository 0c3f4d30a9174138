"""What the documents show works as shown."""

import configparser
import re
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

import asyncopd.pipeline
from asyncopd import RunConfig
from asyncopd.objectives.divergences.divergence import linear_part
from asyncopd.queue.selection import QueueRow
from teacher_cache.causal_scorer import CausalModel
from teacher_cache.designs import Draw

ROOT = Path(__file__).parent.parent
PREAMBLE = """
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
import torch
from torch import Tensor
from asyncopd.types import Rollout, RolloutRequest
from teacher_cache.logit_rows import LogitRows
from teacher_cache.noise import Noise
from teacher_cache.record import Origin
"""


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """The classes that the contributor guide shows, executed in turn."""
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"linear_part": linear_part, "Draw": Draw, "QueueRow": QueueRow}
    exec(PREAMBLE + "\n".join(shown), names)
    return names


def test_the_guides_divergence_is_the_one_it_names(guide: dict[str, Any]) -> None:
    log_p, log_q = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    affinity = ((log_p + log_q) / 2).exp().sum()
    for linear in (0.0, 1.0):
        assert torch.isclose(guide["Hellinger"]().phi(log_p, log_q, linear).sum(), 2 - 2 * affinity)


def test_the_guides_design_draws_what_it_says(guide: dict[str, Any]) -> None:
    draw = guide["FirstK"](3).draw(torch.randn(2, 9).log_softmax(-1), None, None)
    assert draw.ids_TC.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_the_guides_model_has_what_a_causal_model_must_have(guide: dict[str, Any]) -> None:
    shown = guide["MyModel"]
    wanted = {name for name in vars(CausalModel) if not name.startswith("_")}
    methods = [name for name in vars(shown) if not name.startswith("_")]
    assert wanted == {*shown.__annotations__, *methods}
    for name in methods:
        ours, theirs = (signature(getattr(kind, name)).parameters.keys() for kind in (shown, CausalModel))
        assert ours == theirs


def test_the_guides_policy_takes_the_shortest_that_are_ready(guide: dict[str, Any]) -> None:
    rows = [
        QueueRow(
            ordinal=ordinal, ready=tokens > 1, prompt=ordinal, oldest_version=0, tokens=tokens, disagreement=None,
            scored_at=None,
        )
        for ordinal, tokens in enumerate((9, 1, 5, 3))
    ]  # fmt: skip
    assert guide["Shortest"]().choose(rows, 2) == [3, 2]
    assert guide["Shortest"]().choose(rows, 4) is None


def test_every_extra_and_make_target_that_the_documents_name_exists() -> None:
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {extra for group in re.findall(r"'\.\[([\w,]+)\]'", text) for extra in group.split(",")}
    assert extras <= set(setup["options.extras_require"])
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ((?:demo|test|check|format|clean)[\w-]*)", text)) <= targets


def test_every_pin_satisfies_the_range_that_the_package_states() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    pins = {name.lower(): version for name, version in pins.items()}
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = [setup["options.extras_require"][extra] for extra in ("smollm2", "wandb", "notebooks", "dev")]
    stated = "\n".join([setup["options"]["install_requires"], *extras])
    for line in filter(None, map(str.strip, stated.splitlines())):
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), line


def test_the_readmes_python_builds_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    started: list[RunConfig] = []

    def start(config: RunConfig) -> SimpleNamespace:
        started.append(config)
        return SimpleNamespace(path=Path("runs/example"), final=Path("runs/example/final"))

    monkeypatch.setattr(asyncopd.pipeline, "run", start)
    exec(compile(shown, "README.md", "exec"), {})
    assert started[0].steps == 100
