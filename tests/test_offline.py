"""Training on answers that a teacher has scored once: two commands in turn, no rollout, no teacher."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from asyncopd import cli
from asyncopd.errors import ConfigError
from asyncopd.objectives import ObjectiveConfig
from asyncopd.scored_data import Offline, offline
from asyncopd.tracking.metrics import read_metrics
from teacher_cache import cli as teacher_cache_cli
from tests.conftest import EOS, make_tiny_llama, make_tiny_qwen3, save_checkpoint
from tests.tiny_run import final_weights

LEARNER = ["--learner.lr", "3e-3", "--learner.dtype", "fp32", "--learner.threads", "1"]
QUIET = ["--tracking.no-live-view", "--tracking.wandb.enabled", "off"]


def write_answers(folder: Path) -> Path:
    """40 answers of different lengths, one of them empty and one longer than a context of 128."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(40):
        ids = torch.randint(0, 250, (4 + number % 9,), generator=generator).tolist()
        rows.append({"prompt_ids": ids[:3], "response_ids": [*ids[3:], EOS]})
    rows[7]["response_ids"] = []
    rows[9]["response_ids"] = [5] * 140
    path = folder / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def score(folder: Path, teacher: Path, draw: str) -> Path:
    out = folder / draw.partition("(")[0]
    words = ["--model", str(teacher), "--dtype", "fp32", "--device", "cpu", "--data", str(write_answers(folder))]
    assert teacher_cache_cli.main(["score", *words, "--out", str(out), "--draw", draw, "--temperature", "1.5"]) == 0
    return out


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_tiny_llama(1, layers=2), tmp_path_factory.mktemp("offline") / "student")


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scored data set whose teacher is gone."""
    folder = tmp_path_factory.mktemp("scored")
    teacher = save_checkpoint(make_tiny_llama(0), folder / "teacher")
    score(folder, teacher, "full")
    made = score(folder, teacher, "systematic( 16 )")
    shutil.rmtree(teacher)
    return made


def losses(path: Path) -> list[float]:
    return [row.values["loss"] for row in read_metrics(path) if "loss" in row.values]


def test_what_teacher_cache_scored_is_trained_on_by_asyncopd_offline(
    scored: Path, student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(scored), "--student", str(student), "--runs-dir", str(tmp_path), "--batch-size", "8", *LEARNER, *QUIET]
    assert cli.main(["offline", *words, "--name", "a", "--steps", "60"]) == 0
    assert "trained 60 steps" in capsys.readouterr().out
    run = tmp_path / "a"
    trained = losses(run)
    assert sum(trained[-5:]) < 0.75 * sum(trained[:5])
    assert cli.main(["offline", *words, "--name", "b", "--steps", "60"]) == 0
    assert losses(tmp_path / "b") == trained
    first, second = final_weights(run), final_weights(tmp_path / "b")
    assert all(torch.equal(first[name], second[name]) for name in first)
    rows = read_metrics(run)
    assert all("logprob_gap" not in row.values and "tokens/staleness_0" not in row.values for row in rows)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["logprob_gap_on_policy"]) == (60, None)
    assert "offline from" in (run / "report.html").read_text()


def test_an_epoch_takes_every_answer_that_fits_once(scored: Path, student: Path, tmp_path: Path) -> None:
    options = Offline(
        scored=scored,
        student=student,
        runs_dir=tmp_path,
        batch_size=19,
        objective=ObjectiveConfig(name="forward_kl", origin="teacher", temperature=1.5),
    )
    tokens = [row.values["tokens"] for row in read_metrics(offline(options).path)]
    rows = map(json.loads, (scored / "answers.jsonl").read_text().splitlines())
    lengths = [len(row["response_ids"]) for row in rows]
    assert len(lengths) == 39  # the teacher refused one
    assert len(tokens) == 2
    assert sum(tokens) == sum(lengths)


def test_the_whole_vocabulary_serves_every_divergence(scored: Path, student: Path, tmp_path: Path) -> None:
    for name in ("reverse_kl", "jsd", "total_variation"):
        objective = ObjectiveConfig(name=name, design="full", temperature=1.5)
        options = Offline(
            scored=scored.parent / "full", student=student, runs_dir=tmp_path, name=name, steps=2, objective=objective
        )
        assert len(losses(offline(options).path)) == 2


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        (ObjectiveConfig(name="reverse_kl"), "reads student-drawn candidates; no student sampled"),
        (ObjectiveConfig(name="pg_cached"), "logprobs of the sampler"),
        (ObjectiveConfig(name="mixed"), "student-drawn candidates and teacher-drawn candidates"),
        (ObjectiveConfig(name="forward_kl", design="systematic(8)"), r"--objective.design \"systematic\(16\)\""),
        (ObjectiveConfig(name="forward_kl", design="systematic(16)"), "--objective.temperature 1.5"),
    ],
)
def test_an_objective_that_needs_what_the_data_cannot_give_is_refused_before_anything_is_written(
    scored: Path, student: Path, tmp_path: Path, objective: ObjectiveConfig, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        offline(Offline(scored=scored, student=student, runs_dir=tmp_path / "runs", objective=objective))
    assert not (tmp_path / "runs").exists()


def test_a_folder_or_a_student_that_does_not_fit_is_a_message(
    scored: Path, student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["offline", str(tmp_path), "--student", str(student)]) == 1
    assert "teacher-cache score --out" in capsys.readouterr().err
    assert cli.main(["offline", str(scored), "--student", "misspelt"]) == 1
    assert "'misspelt' holds no HF checkpoint" in capsys.readouterr().err
    other = save_checkpoint(make_tiny_qwen3(1), tmp_path / "other")
    told = json.loads((other / "tokenizer.json").read_text())
    told["model"]["vocab"] = {symbol: 255 - index for symbol, index in told["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(told))
    assert cli.main(["offline", str(scored), "--student", str(other), "--runs-dir", str(tmp_path / "runs")]) == 1
    assert "tokenizer hash" in capsys.readouterr().err


def test_a_score_that_is_gone_ends_the_training_with_its_remedy(scored: Path, student: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(scored, copy)
    for shard in (copy / "shards").rglob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    options = Offline(
        scored=copy,
        student=student,
        runs_dir=tmp_path,
        objective=ObjectiveConfig(name="forward_kl", temperature=1.5),
    )
    with pytest.raises(ConfigError, match="scores only what is missing"):
        offline(options)
