"""Supervised fine-tuning: cross-entropy of a data set's answers, and a student that a run can start from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncopd import cli
from asyncopd.errors import ConfigError, DataError
from asyncopd.learner.step import LearnerConfig
from asyncopd.prompts import DataConfig
from asyncopd.run_folder import TokenIds
from asyncopd.sft import Sft, read_answers, sft
from asyncopd.tracking.metrics import read_metrics
from asyncopd.tracking.trackers import TrackingConfig
from asyncopd.tracking.wandb_run import WandbConfig
from tests.conftest import EOS, VOCABULARY, make_tiny_llama, save_checkpoint

IDS = TokenIds(vocabulary=VOCABULARY, eos_ids=(EOS,), pad_id=EOS)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_tiny_llama(1, layers=2), tmp_path_factory.mktemp("sft") / "student")


def write_chats(folder: Path) -> Path:
    """Twelve chats that end with an answer, the last of them longer than the context."""
    path = folder / "chats.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{number} plus 1?"},
                {"role": "assistant", "content": "x" * 200 if number == 11 else f"It is {number + 1}."},
            ],
            "short": str(number + 1),
        }
        for number in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def options(folder: Path, student: Path, **changes: object) -> Sft:
    return replace(
        Sft(
            student=student,
            data=DataConfig(prompts=str(write_chats(folder))),
            runs_dir=folder / "runs",
            name="warm",
            batch_size=4,
            learner=LearnerConfig(lr=3e-3, warmup_steps=0, dtype="fp32", threads=1),
            tracking=TrackingConfig(live_view=False, wandb=WandbConfig(enabled="off")),
        ),
        **changes,
    )


def test_an_answer_is_the_chats_own_or_a_columns_ended_by_eos_and_too_long_ones_are_left_out(
    tmp_path: Path, student: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(student)
    asked = options(tmp_path, student)
    answers = read_answers(asked, tokenizer, IDS)
    assert len(answers) == 11
    assert tokenizer.decode(answers[3].response_ids_T[:-1]) == "It is 4."
    assert all(answer.response_ids_T[-1] == EOS for answer in answers)
    assert tokenizer.decode(answers[3].prompt_ids).endswith("<|im_start|>assistant\n")
    short = read_answers(replace(asked, answer_column="short"), tokenizer, IDS)
    assert len(short) == 12
    assert tokenizer.decode(short[11].response_ids_T[:-1]) == "12"


def test_the_loss_is_the_cross_entropy_of_the_answers_by_hand(tmp_path: Path, student: Path) -> None:
    result = sft(options(tmp_path, student, steps=1, batch_size=11))
    (row,) = [row.values for row in read_metrics(result.path) if "loss" in row.values]
    model = AutoModelForCausalLM.from_pretrained(student)
    total, tokens = 0.0, 0
    for answer in read_answers(options(tmp_path, student), AutoTokenizer.from_pretrained(student), IDS):
        ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids_T.tolist()]])
        first = len(answer.prompt_ids)
        with torch.no_grad():
            logits = model(ids).logits[0, first - 1 : -1, :VOCABULARY].double()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, first:], reduction="sum"))
        tokens += ids.shape[1] - first
    assert row["tokens"] == tokens
    assert row["loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_the_command_leaves_a_student_that_knows_the_answers_better(
    tmp_path: Path, student: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.prompts", str(write_chats(tmp_path)), "--student", str(student), "--name", "warm", "--steps", "30"]
    words += ["--runs-dir", str(tmp_path / "runs"), "--batch-size", "6", "--answer-column", "short"]
    words += ["--learner.lr", "5e-3", "--learner.dtype", "fp32", "--learner.threads", "1"]
    assert cli.main(["sft", *words, "--tracking.no-live-view", "--tracking.wandb.enabled", "off"]) == 0
    final = tmp_path / "runs" / "warm" / "final"
    assert str(final) in capsys.readouterr().out.replace("\n", "")
    losses = [row.values["loss"] for row in read_metrics(final.parent) if "loss" in row.values]
    assert losses[-1] < 0.5 * losses[0]
    again = read_answers(options(tmp_path, final), AutoTokenizer.from_pretrained(final), IDS)
    assert len(again) == 11


def test_a_row_without_an_answer_is_named(tmp_path: Path, student: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "Why?"}]}]
    with pytest.raises(DataError, match="row 0 has no answer"):
        sft(options(tmp_path, student), rows)
    assert not (tmp_path / "runs").exists()


def test_a_student_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no HF checkpoint"):
        sft(options(tmp_path, Path("misspelt")), [])


def test_one_of_several_processes_is_refused(tmp_path: Path, student: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2; .* start it without a launcher"):
        sft(options(tmp_path, student))
    assert not (tmp_path / "runs").exists()


def test_a_student_without_an_eos_is_refused_because_its_answers_would_have_no_end(
    tmp_path: Path, student: Path
) -> None:
    with pytest.raises(DataError, match="states an EOS"):
        read_answers(options(tmp_path, student), AutoTokenizer.from_pretrained(student), replace(IDS, eos_ids=()))
