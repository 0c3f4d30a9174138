"""Whole runs over a score cache."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncopd import pipeline
from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError
from asyncopd.interface import RunResult
from asyncopd.objectives import ObjectiveConfig
from asyncopd.scoring import TeacherConfig
from asyncopd.stage import Stage
from asyncopd.tracking.metrics import read_metrics
from teacher_cache.errors import ScoringError
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.transformers_scorer import TransformersScorer
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import ThreadedWorkers, final_weights, tiny_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("cache-pair")
    return save_checkpoint(make_tiny_llama(0), folder / "teacher"), save_checkpoint(
        make_tiny_llama(1, layers=2), folder / "student"
    )


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each call of a teacher had."""
    counts: list[int] = []
    score = TransformersScorer.score

    def counting(self: TransformersScorer, requests: Sequence[ScoreRequest]) -> list[TeacherRecord | ScoringError]:
        counts.append(len(requests))
        return score(self, requests)

    monkeypatch.setattr(TransformersScorer, "score", counting)
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    return counts


def with_cache(config: RunConfig, cache: Path | None) -> RunConfig:
    return replace(config, steps=2, teacher=replace(config.teacher, cache=cache))


def losses(result: RunResult) -> list[float]:
    return [row.values["loss"] for row in read_metrics(result.path) if "loss" in row.values]


@pytest.mark.parametrize("objective", ["reverse_kl", pytest.param("forward_kl", marks=pytest.mark.slow)])
def test_a_sync_run_over_a_warm_cache_makes_no_teacher_forward_and_has_the_same_losses(
    models: tuple[Path, Path], tmp_path: Path, scored: list[int], objective: str
) -> None:
    chosen = ObjectiveConfig(name=objective, design="systematic(4)")
    results = []
    for name, cache in (("plain", None), ("cold", tmp_path / "cache"), ("warm", tmp_path / "cache")):
        scored.clear()
        (tmp_path / name).mkdir()
        config = tiny_config(tmp_path / name, *models, objective=chosen)
        results.append(pipeline.run(with_cache(config, cache)))
        assert sum(scored) == (0 if name == "warm" else 16)
    plain, cold, warm = results
    told = [json.loads((result.path / "summary.json").read_text())["cache"] for result in results]
    assert told[0] is None
    assert [(cache["hits"], cache["misses"], cache["hit_share"]) for cache in told[1:]] == [(0, 16, 0.0), (16, 0, 1.0)]
    assert told[1]["kept_bytes"] == told[2]["read_bytes"] > told[1]["read_bytes"] == told[2]["kept_bytes"] == 0
    assert "of 16 answers; 0 by the teacher" in (warm.path / "report.html").read_text()
    assert losses(plain) == losses(cold) == losses(warm)
    assert len(losses(warm)) == 2
    first, second = final_weights(plain.path), final_weights(warm.path)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_damaged_cache_is_scored_again_and_the_losses_stay(
    models: tuple[Path, Path], tmp_path: Path, scored: list[int]
) -> None:
    results = []
    for name in ("cold", "warm"):
        scored.clear()
        (tmp_path / name).mkdir()
        results.append(pipeline.run(with_cache(tiny_config(tmp_path / name, *models), tmp_path / "cache")))
        for shard in sorted((tmp_path / "cache" / "shards").rglob("*.safetensors"))[::2]:
            data = shard.read_bytes()
            shard.write_bytes(data[:-5] + bytes([data[-5] ^ 8]) + data[-4:])
    assert 0 < sum(scored) < 16
    assert losses(results[0]) == losses(results[1])
    assert len(list((tmp_path / "cache" / "quarantine").iterdir())) > 0


def test_a_cache_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave the cache out"):
        TeacherConfig(scorer="scripted", cache=Path("cache"))
    with pytest.raises(ConfigError, match="cache_precision"):
        TeacherConfig(cache_precision="fp8")
    with pytest.raises(ConfigError, match="cache_gb"):
        TeacherConfig(cache_gb=-1)


def test_a_teacher_that_loads_at_the_first_miss_says_that_it_is_loading(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be killed as a hang, again and again, where a load takes longer than ``queue.lease_s``."""
    loading: list[str] = []
    seen: list[list[str]] = []
    make = TransformersScorer.__init__

    @contextmanager
    def told(self: Stage) -> Iterator[None]:
        loading.append(self.name)
        yield
        loading.pop()

    def noting(self: TransformersScorer, *arguments: object, **options: object) -> None:
        seen.append(list(loading))
        make(self, *arguments, **options)

    monkeypatch.setattr(Stage, "loading", told)
    monkeypatch.setattr(TransformersScorer, "__init__", noting)
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    config = with_cache(tiny_config(tmp_path, *models), tmp_path / "cache")
    pipeline.run(replace(config, evaluation=replace(config.evaluation, prompts=0)))
    assert seen == [["scorer-0"]]
