"""Whole runs whose teacher is a service, or several teachers."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from asyncopd import held_out, pipeline
from asyncopd.config import RunConfig, from_yaml, to_yaml
from asyncopd.errors import ConfigError
from asyncopd.interface import RunResult
from asyncopd.objectives import ObjectiveConfig
from asyncopd.queue.ledger import Ledger
from asyncopd.scoring import TeacherConfig
from asyncopd.tracking.metrics import read_metrics
from teacher_cache import vllm_scorer
from teacher_cache.errors import ScoringError
from teacher_cache.local_teacher import LocalTeacherConfig
from teacher_cache.record import TeacherRecord
from teacher_cache.routed_scorer import RoutedScorer
from teacher_cache.scorer import ScoreRequest
from teacher_cache.transformers_scorer import TransformersScorer
from tests.conftest import VOCABULARY, make_tiny_llama, make_tiny_tokenizer, save_checkpoint
from tests.teacher_cache.build_requests import CountingScorer, make_request
from tests.teacher_cache.serving import ThreadedService
from tests.teacher_cache.stock_server import StockServer
from tests.tiny_run import QUESTIONS, ThreadedWorkers, tiny_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("service-pair")
    return save_checkpoint(make_tiny_llama(0), folder / "teacher"), save_checkpoint(
        make_tiny_llama(1, layers=2), folder / "student"
    )


def served(model: Path, temperature: float = 1.0, port: int = 0, **settings: int) -> ThreadedService:
    teacher = LocalTeacherConfig(model=model, dtype="fp32", device="cpu", temperature=temperature)
    return ThreadedService(teacher.load(VOCABULARY), identity=teacher.identity(), port=port, **settings)


def losses(result: RunResult) -> list[float]:
    return [row.values["loss"] for row in read_metrics(result.path) if "loss" in row.values]


def with_teacher(config: RunConfig, **changes: object) -> RunConfig:
    return replace(config, steps=2, teacher=replace(config.teacher, **changes))


def test_a_run_whose_teacher_is_a_service_has_the_losses_of_one_that_loads_it(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here = pipeline.run(with_teacher(tiny_config(tmp_path / "here", *models)))
    with served(models[0]) as service:
        away = with_teacher(tiny_config(tmp_path / "there", *models), urls=(service.url,), model=Path("nowhere"))
        there = pipeline.run(away)
        assert service.service._batcher is not None
        assert service.service._batcher.scored_tokens > 0
    assert losses(there) == pytest.approx(losses(here), abs=1e-5)
    for away_found, found in ((there.before, here.before), (there.after, here.after)):
        assert away_found is not None
        assert found is not None
        assert away_found.samples == found.samples
        assert away_found.reverse_kl.mean == pytest.approx(found.reverse_kl.mean, abs=1e-5)
        assert away_found.forward_kl.mean == pytest.approx(found.forward_kl.mean, abs=1e-5)
        assert away_found.reverse_kl.ci95 == pytest.approx(found.reverse_kl.ci95, abs=1e-5)


def test_held_out_figures_that_would_ask_too_much_of_a_service_are_left_out_and_said(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    monkeypatch.setattr(held_out, "MOST_ASKED_GB", 1e-6)
    with served(models[0]) as service:
        config = with_teacher(tiny_config(tmp_path, *models), urls=(service.url,), model=Path("nowhere"))
        result = pipeline.run(config)
    assert (len(losses(result)), result.before) == (2, None)
    assert "no held-out figures: an evaluation would ask up to 0.0 GB" in caplog.text
    assert "lower evaluation.prompts" in caplog.text


def test_a_service_that_refuses_whole_distributions_costs_the_held_out_figures_and_not_the_run(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    with served(models[0], max_record_bytes=8192) as service:
        config = with_teacher(tiny_config(tmp_path, *models), urls=(service.url,), model=Path("nowhere"))
        result = pipeline.run(config)
    assert (len(losses(result)), result.before) == (2, None)
    assert "no held-out figures from now on: the teacher refuses whole distributions" in caplog.text


@pytest.mark.slow
def test_a_run_goes_on_from_the_queue_when_its_service_was_killed_and_started_again(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    first = served(models[0])
    second = threading.Event()

    def kill_and_restart() -> None:
        while first.service._batcher is None or not first.service._batcher.scored_tokens:
            time.sleep(0.005)
        first.server.force_exit = True
        first.stop()
        with served(models[0], port=first.port) as again:
            second.set()
            ended.wait(120)
            assert again.service._batcher is not None
            scored.append(again.service._batcher.scored_tokens)

    ended, scored = threading.Event(), []
    with first:
        config = with_teacher(tiny_config(tmp_path, *models), urls=(first.url,), model=Path("nowhere"))
        killer = threading.Thread(target=kill_and_restart)
        killer.start()
        result = pipeline.run(replace(config, steps=4))
        ended.set()
        killer.join(60)
    assert second.is_set()
    assert scored[0] > 0
    assert len(losses(result)) == 4
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        assert ledger.verify() == []
        assert ledger.counts().trained == 32


def test_a_service_at_another_temperature_is_refused_before_anything_is_loaded(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    with served(models[0], temperature=0.6) as service:
        config = with_teacher(tiny_config(tmp_path, *models), urls=(service.url,))
        with pytest.raises(ConfigError, match=r"temperature: 1\.0 here, 0\.6 at the teacher"):
            pipeline.run(config)


def test_each_prompt_is_scored_by_the_teacher_that_it_names(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    asked: dict[str, int] = {}
    score = TransformersScorer.score

    def counting(self: TransformersScorer, requests: Sequence[ScoreRequest]) -> list[TeacherRecord | ScoringError]:
        asked[self._teacher] = asked.get(self._teacher, 0) + len(requests)
        assert all(request.teacher == self._teacher for request in requests)
        return score(self, requests)

    monkeypatch.setattr(TransformersScorer, "score", counting)
    config = with_teacher(tiny_config(tmp_path, *models), named=(f"other={models[1]}",))
    rows = [
        {"messages": [{"role": "user", "content": question}], "teacher": "other" if place % 3 else "default"}
        for place, question in enumerate(QUESTIONS)
    ]
    Path(str(config.data.prompts)).write_text("\n".join(map(json.dumps, rows)))
    config = replace(config, data=replace(config.data, teacher_column="teacher"))
    result = pipeline.run(config)
    assert sum(asked.values()) == 16
    assert set(asked) == {"default", "other"}
    assert result.policy_version == 2

    unknown = with_teacher(replace(config, name="again"), named=())
    with pytest.raises(ConfigError, match="names the teacher 'other'"):
        pipeline.run(unknown)


def test_a_request_for_an_unknown_teacher_is_refused_and_costs_no_other() -> None:
    routed = RoutedScorer({"a": CountingScorer(teacher="a"), "b": CountingScorer(teacher="b")})
    requests = [replace(make_request(n), teacher=name) for n, name in enumerate(["b", "c", "a", "b"])]
    results = routed.score(requests)
    assert isinstance(results[1], ScoringError)
    assert "no teacher 'c'" in str(results[1])
    assert [r.teacher for r in results if isinstance(r, TeacherRecord)] == ["b", "a", "b"]
    assert routed.max_context == 64


def test_teachers_that_cannot_work_are_refused() -> None:
    for named in (("math",), ("=x",), ("math=",), ("a=x", "a=y"), ("default=x",)):
        with pytest.raises(ConfigError, match=r"teacher\.named"):
            TeacherConfig(named=named)
    with pytest.raises(ConfigError, match="scripted"):
        TeacherConfig(scorer="scripted", urls=("http://127.0.0.1:1",))
    with pytest.raises(ConfigError, match="deadline_s"):
        TeacherConfig(deadline_s=0)
    several = TeacherConfig(urls=("http://a:1",), named=("math=models/math", "code=http://b:1,http://c:1"))
    assert several.sources == {
        "default": ("http://a:1",),
        "math": Path("models/math"),
        "code": ("http://b:1", "http://c:1"),
    }
    config = RunConfig(teacher=several)
    assert from_yaml(to_yaml(config), "here") == config


def test_stock_servers_that_cannot_be_the_teacher_are_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no URL for \['default'\]"):
        TeacherConfig(scorer="openai")
    with pytest.raises(ConfigError, match=r"no URL for \['math'\]"):
        TeacherConfig(scorer="openai", urls=("http://a:1",), named=("math=models/math",))
    with pytest.raises(ConfigError, match="do not say which weights"):
        TeacherConfig(scorer="openai", urls=("http://a:1",), cache=tmp_path)
    config = with_teacher(tiny_config(tmp_path, *models), scorer="openai", urls=("http://127.0.0.1:9",))
    with pytest.raises(ConfigError, match="student-drawn systematic"):
        pipeline.run(config)


def test_a_run_learns_from_a_stock_servers_likeliest_tokens(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    with StockServer(make_tiny_tokenizer(), context=128) as server:
        config = with_teacher(
            tiny_config(tmp_path, *models), scorer="openai", urls=(server.url,), model=Path("nowhere")
        )
        objective = ObjectiveConfig(name="forward_kl", design="top_k_tail(8)")
        result = pipeline.run(replace(config, objective=objective))
    assert len(losses(result)) == 2
    assert all(loss > 0 for loss in losses(result))


def test_a_run_that_wants_vllm_where_there_is_none_is_told_how_to_install_it(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_scorer, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"teacher 'default': .*not installed: pip install 'asyncopd\[vllm\]'"):
        pipeline.run(with_teacher(tiny_config(tmp_path, *models), scorer="vllm"))
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_held_out_answer_is_compared_with_the_teacher_that_its_prompt_names(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the student itself, from which it is no nats away before the first step."""
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    config = with_teacher(tiny_config(tmp_path, *models), named=(f"other={models[1]}",))
    rows = [
        {"messages": [{"role": "user", "content": question}], "teacher": "other" if place >= 24 else "default"}
        for place, question in enumerate(QUESTIONS)
    ]
    Path(str(config.data.prompts)).write_text("\n".join(map(json.dumps, rows)))
    result = pipeline.run(replace(config, data=replace(config.data, teacher_column="teacher")))
    assert result.before is not None
    assert result.before.reverse_kl.mean == pytest.approx(0, abs=1e-5)
