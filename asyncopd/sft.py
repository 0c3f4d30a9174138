"""Supervised fine-tuning: the student learns the answers of a data set, as a warm start for distillation.

    asyncopd sft --data.prompts chats.jsonl --student models/student ──> runs/<name>/final
    asyncopd launch recipe.py --student runs/<name>/final

The loss is cross-entropy, which is the forward KL from a teacher that is certain of the data set's token: the record of
each position holds that one token with logprob 0.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError, DataError
from asyncopd.interface import RunResult
from asyncopd.learner.step import LearnerConfig
from asyncopd.objectives import ObjectiveConfig
from asyncopd.offline import Batch, student_checks, train_offline, unsampled
from asyncopd.preflight import outline
from asyncopd.prompt_source import Rows, columns_of, read_rows, require_column
from asyncopd.prompts import DataConfig, load_prompts
from asyncopd.queue.order import permuted
from asyncopd.queue.plan import QueueConfig
from asyncopd.run_folder import TokenIds
from asyncopd.tracking.trackers import TrackingConfig
from asyncopd.types import Rollout, ScoredRollout
from teacher_cache.record import CandidateSet, TeacherRecord

LOG = logging.getLogger(__name__)
CROSS_ENTROPY = ObjectiveConfig(name="forward_kl", design="multi_sample(1)", origin="teacher", form="plain")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sft:
    """Train a student on the answers of a data set: no rollout, no teacher."""

    student: Path
    """Path of the student's HF checkpoint."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts as for a run; held-out options are not read."""
    answer_column: str | None = None
    """Column of the answers' text; None: the assistant's message at the end of each chat."""
    name: str = ""
    """Name of the run folder; empty takes one from the time."""
    runs_dir: Path = Path("runs")
    """Where run folders are."""
    seed: int = 0
    """Seeds the order of the answers."""
    steps: int = 0
    """Optimizer steps; 0: once through the data, as far as whole batches go."""
    batch_size: int = 32
    """Answers of an optimizer step."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch_size < 1:
            raise ConfigError(
                f"steps is {self.steps}, batch_size {self.batch_size}; expected 0 or more steps of at least 1 answer"
            )


def sft_main(argv: Sequence[str]) -> int:
    """The command line; the exit status."""
    result = sft(tyro.cli(Sft, args=argv, prog="asyncopd sft"))
    Console().print(
        f"trained {result.policy_version} steps; the student is {result.final}", markup=False, highlight=False
    )
    return 0


def sft(options: Sft, rows: Rows | None = None) -> RunResult:
    """Train a student on a data set's answers, into a new run folder; ``rows`` in memory go before ``options.data``.

    ConfigError or DataError before anything is written if tokenizer, data or context do not fit.
    """
    config = _run_config(options)
    checks = student_checks(config)
    answers = read_answers(options, checks.tokenizer, checks.ids, rows)
    config = replace(config, steps=options.steps or max(1, len(answers) // options.batch_size))

    def batch(version: int) -> Batch:
        taken = range(version * options.batch_size, (version + 1) * options.batch_size)
        chosen = [
            answers[permuted(turn % len(answers), len(answers), seed=config.seed, epoch=turn // len(answers))]
            for turn in taken
        ]
        return [ScoredRollout(rollout=answer, record=_certain(answer)) for answer in chosen], {}

    source = {"answers of": options.data.prompts or "a data set in memory"}
    return train_offline(config, checks, batch, steps=config.steps, source=source)


def read_answers(
    options: Sft, tokenizer: PreTrainedTokenizerBase, ids: TokenIds, rows: Rows | None = None
) -> list[Rollout]:
    """Prompts with their answers, each ended by EOS; those that the student's context does not hold are left out."""
    data = replace(options.data, held_out=None, held_out_from_end=0)
    if rows is None:
        if data.prompts is None:
            raise ConfigError("data.prompts is None; name a hub id or a local .jsonl, .json or .parquet file")
        rows = read_rows(data.prompts, subset=data.subset, split=data.split)
    if options.answer_column is not None:
        require_column(options.answer_column, columns_of(rows, "the data set"), "the data set", "answer_column")
    context = outline(options.student, "student").get_text_config(decoder=True).max_position_embeddings
    found = load_prompts(data, tokenizer, context, rows)
    skipped = {row.row for row in found.skipped}
    kept = [place for place in range(len(rows)) if place not in skipped]
    if not ids.eos_ids:
        raise DataError(
            f"neither tokenizer nor generation config of {options.student} states an EOS, which is to end the answers; "
            "set tokenizer.eos_token and save the tokenizer"
        )
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ids.eos_ids else ids.eos_ids[0]
    answers = []
    for place, prompt in zip(kept, found.prompts, strict=True):
        text = _answer(rows[place], place, options)
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
        if len(prompt.token_ids) + len(tokens) <= context:
            answers.append(unsampled(f"0-{place}-0-0", prompt.token_ids, torch.tensor(tokens, dtype=torch.int32), ids))
    if not answers:
        raise DataError(f"no answer of {len(kept)} fits into the student's context of {context} with its prompt")
    if len(answers) < len(kept):
        LOG.warning("%d of %d answers are longer than the context of %d", len(kept) - len(answers), len(kept), context)
    return answers


def _answer(row: Mapping[str, Any], place: int, options: Sft) -> str:
    if options.answer_column is not None:
        answer = row[options.answer_column]
    else:
        chat = row[options.data.column]
        last = chat[-1] if isinstance(chat, Sequence) and chat else None
        answer = last["content"] if isinstance(last, Mapping) and last["role"] == "assistant" else None
    if not isinstance(answer, str):
        raise DataError(
            f"row {place} has no answer: expected a chat that ends with the assistant's message, or text in "
            f"answer_column (now {options.answer_column!r})"
        )
    return answer


def _certain(answer: Rollout) -> TeacherRecord:
    """The record of a teacher that knows each token."""
    zeros_T = torch.zeros(len(answer.response_ids_T))
    token = CandidateSet(
        origin="teacher",
        design=CROSS_ENTROPY.design,
        temperature=1.0,
        version=None,
        ids_TC=answer.response_ids_T[:, None],
        log_w_TC=zeros_T[:, None],
        log_q_TC=zeros_T[:, None],
    )
    return TeacherRecord(temperature=1.0, teacher="data set", log_q_T=zeros_T, entropy_T=zeros_T, sets=(token,))


def _run_config(options: Sft) -> RunConfig:
    """The options as a run's configuration, which the learner is made from."""
    config = RunConfig(
        name=options.name,
        runs_dir=options.runs_dir,
        recipe="sft",
        seed=options.seed,
        mode="sync",
        student=options.student,
        data=options.data,
        objective=CROSS_ENTROPY,
        learner=options.learner,
        tracking=options.tracking,
    )
    return replace(config, queue=QueueConfig(batch_size=options.batch_size, max_staleness=0))
