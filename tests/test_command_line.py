"""What a person types: options, their errors, and the commands that look at a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from asyncopd import cli, pipeline, recipe
from asyncopd.config import RunConfig, from_yaml
from asyncopd.evaluation import EvaluationConfig
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.tiny_run import ThreadedWorkers, tiny_config


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    teacher = save_checkpoint(make_tiny_llama(0), tmp_path / "teacher")
    student = save_checkpoint(make_tiny_llama(1, layers=2), tmp_path / "student")
    return tiny_config(tmp_path, teacher, student, steps=2, evaluation=EvaluationConfig(prompts=0))


def _words(text: str) -> str:
    """Text as it reads, without the line breaks and frames of a terminal."""
    return " ".join(text.replace("│", " ").split())


def test_a_misspelt_option_is_refused_and_the_nearest_one_named(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        recipe.main(config, ["--queue.max-stalness", "2"])
    assert stopped.value.code == 2
    assert "--queue.max-staleness" in _words(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "asynch"], "mode is 'asynch'; expected sync, async, or lagged:k"),
        (["--queue.max-staleness", "-1"], "max_staleness is -1; expected at least 0"),
        (["--queue.batch-size", "9"], "queue.batch_size is 9; expected a multiple of rollout.samples_per_prompt (2)"),
        (["--objective.design", "sistematic(8)"], "systematic"),
        (["--rollout.sampling.top-p", "0"], "top_p is 0.0"),
        (["--data.column", "question"], "question"),
        (["--student", "nowhere"], "'nowhere' holds no HF checkpoint"),
        (["--resume"], "to resume"),
    ],
)
def test_a_value_that_cannot_work_is_explained_without_a_traceback(
    words: list[str], message: str, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = recipe.main(config, words)
    except SystemExit as stopped:
        status = stopped.code  # type: ignore[assignment]
    shown = capsys.readouterr()
    assert status in (1, 2)
    assert message in _words(shown.err + shown.out)
    assert "Traceback" not in shown.err + shown.out
    assert not (config.runs_dir / config.name).exists()


def test_print_config_prints_what_the_run_would_use(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main(config, ["--print-config", "--mode", "lagged:4", "--learner.lr", "1e-3"]) == 0
    printed = from_yaml(capsys.readouterr().out, "stdout")
    assert printed == replace(config, mode="lagged:4", learner=replace(config.learner, lr=1e-3))


def test_a_dry_run_needs_no_weights(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    for model in (config.student, config.teacher.model):
        (model / "model.safetensors").unlink()
    assert recipe.main(config, ["--dry-run"]) == 0
    assert "24 prompts, 6 held out" in _words(capsys.readouterr().out)
    assert not config.runs_dir.exists()


def test_a_resolved_configuration_repeats_the_run_and_the_views_show_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "Supervisor", ThreadedWorkers)
    assert recipe.main(config, []) == 0
    first = config.runs_dir / "tiny"
    assert cli.main(["train", str(first / "config.yaml")]) == 0
    (second,) = [path for path in config.runs_dir.iterdir() if path != first]
    rows = [(path / "metrics.jsonl").read_text().count('"loss"') for path in (first, second)]
    assert rows == [2, 2]
    capsys.readouterr()
    assert cli.main(["status", str(second)]) == 0
    assert "finished" in capsys.readouterr().out
    (second / "report.html").unlink()
    assert cli.main(["report", str(second)]) == 0
    assert (second / "report.html").exists()


def test_a_folder_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(tmp_path)]) == 1
    assert "is not a run folder" in capsys.readouterr().err
