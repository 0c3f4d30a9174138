"""Held-out figures come from the scoring stage while the run goes on, and are those of an evaluation on its own."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from asyncopd import held_out, pipeline
from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError
from asyncopd.evaluation import Estimate, EvaluationConfig, HeldOut, held_out_kl, held_out_steps
from asyncopd.held_out import HeldOutCollector, HeldOutFiles, HeldOutWorker
from asyncopd.interface import Callbacks
from asyncopd.pipeline import run
from asyncopd.prompts import read_prompts, save_prompts
from asyncopd.queue.ledger import Ledger
from asyncopd.run_folder import RunFolder
from asyncopd.tracking.metrics import read_evaluations, read_metrics
from asyncopd.tracking.trackers import open_tracking
from asyncopd.types import Prompt
from tests.conftest import EOS, make_tiny_llama, make_tiny_tokenizer, save_checkpoint
from tests.tiny_run import ThreadedWorkers, tiny_config

FIGURES = HeldOut(
    reverse_kl=Estimate(mean=1.5, ci95=float("nan")),
    forward_kl=Estimate(mean=1.25, ci95=0.5),
    mean_length=Estimate(mean=12.0, ci95=0.0),
    eos_share=0.25,
    samples=(("Say “x”.", "x"),),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return save_checkpoint(make_tiny_llama(0), folder / "teacher"), save_checkpoint(
        make_tiny_llama(1, layers=2), folder / "student"
    )


def test_the_scoring_stage_finds_the_figures_of_an_evaluation_on_its_own(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    teacher, student = models
    config = tiny_config(tmp_path, *models, mode="async", evaluation=EvaluationConfig(prompts=4, every=4))
    config = replace(config, teacher=replace(config.teacher, cache=tmp_path / "cache"))
    result = run(config)
    prompts = read_prompts(result.path / "held_out.jsonl")
    assert len(prompts) == 4
    assert [evaluation.policy_version for evaluation in read_evaluations(result.path)] == [0, 4, 6]
    assert result.final is not None
    for found, weights in ((result.before, student), (result.after, result.final)):
        alone = held_out_kl(
            weights, teacher, prompts, config.rollout.sampling, tokenizer=make_tiny_tokenizer(), eos_token_ids=(EOS,)
        )
        assert found is not None
        assert found.samples == alone.samples
        for name in ("reverse_kl", "forward_kl", "mean_length"):
            ours, theirs = getattr(found, name), getattr(alone, name)
            assert (ours.mean, ours.ci95) == pytest.approx((theirs.mean, theirs.ci95), abs=1e-6)


def test_the_learner_steps_on_and_answers_are_scored_while_an_evaluation_is_half_done(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation of version 0 ends only after four more steps, so a run that waited for it would never end."""
    config = tiny_config(tmp_path, *models, mode="async", evaluation=EvaluationConfig(prompts=2))
    ended: list[int] = []

    def gated(*arguments: object, **options: object) -> Generator[None, None, HeldOut]:
        with Ledger.open(tmp_path / "runs" / "tiny" / "ledger.sqlite") as ledger:
            while ledger.policy_version < 4:
                yield
            found = yield from held_out_steps(*arguments, **options)
            ended.append(ledger.policy_version)
            return found

    monkeypatch.setattr(held_out, "held_out_steps", gated)
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    result = run(config)
    assert len(ended) == 2
    assert ended[0] >= 4
    assert (result.before is not None, result.after is not None) == (True, True)


def test_weights_are_kept_until_they_are_evaluated_and_no_longer(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = HeldOutWorker.work

    def late(self: HeldOutWorker) -> bool:
        return self.stage.ledger.finished and work(self)

    monkeypatch.setattr(HeldOutWorker, "work", late)
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    told: list[int] = []
    config = tiny_config(tmp_path, *models, mode="async", evaluation=EvaluationConfig(prompts=2, every=2), steps=8)
    result = run(config, callbacks=Callbacks(on_evaluation=lambda version, _: told.append(version)))
    assert told == [0, 2, 4, 6, 8]
    # Those between the evaluated ones are gone.
    assert not {1, 3, 5} & {int(path.name[1:]) for path in (result.path / "weights").glob("v*")}


def _folder(tmp_path: Path, models: tuple[Path, Path], **changes: object) -> tuple[RunFolder, RunConfig]:
    folder, config = RunFolder.create(tiny_config(tmp_path, *models, **changes))
    save_prompts(folder.held_out_path, [Prompt(index=0, text="Say x.", token_ids=(1, 2))])
    return folder, config


def test_figures_that_a_killed_learner_had_not_logged_are_logged_once_and_those_of_a_lost_timeline_never(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, config = _folder(tmp_path, models)
    files = HeldOutFiles(folder)

    def life() -> list[int]:
        tracking = open_tracking(folder.path, "tiny", config.tracking, {})
        logged = {evaluation.policy_version for evaluation in read_evaluations(folder.path)}
        told: list[int] = []
        collector = HeldOutCollector(
            files=files, tracking=tracking, told=lambda version, _: told.append(version), logged=logged
        )
        collector.collect()
        collector.collect()
        tracking.finish({})
        return told

    files.write(0, FIGURES)
    assert life() == [0]
    files.write(2, FIGURES)
    files.write(6, FIGURES)
    files.forget_after(4)
    assert life() == [2]
    assert [row.policy_version for row in read_metrics(folder.path)] == [0, 2]
    (first, _) = read_evaluations(folder.path)
    assert (first.reverse_kl.mean, first.eos_share, first.samples) == (1.5, 0.25, FIGURES.samples)


def test_answers_that_would_outgrow_a_context_in_the_evaluation_are_refused_before_a_model_loads(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    config = tiny_config(tmp_path, *models, evaluation=EvaluationConfig(prompts=2, max_new_tokens=100_000))
    with pytest.raises(ConfigError, match=r"evaluation\.max_new_tokens is 100000; expected at most \d+"):
        run(config)


def test_versions_wait_for_figures_by_the_plan_and_not_without_prompts_or_teacher(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, config = _folder(tmp_path, models, evaluation=EvaluationConfig(every=4))
    files = HeldOutFiles(folder)
    assert files.waiting(range(7)) == [0, 4, 6]
    files.write(4, FIGURES)
    assert files.waiting(range(7)) == [0, 6]
    folder.write_config(replace(config, teacher=replace(config.teacher, scorer="scripted")))
    assert HeldOutFiles(folder).waiting(range(7)) == []
    folder.write_config(config)
    save_prompts(folder.held_out_path, [])
    assert HeldOutFiles(folder).waiting(range(7)) == []
