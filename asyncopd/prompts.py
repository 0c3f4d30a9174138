"""Data sets become prompts: read, checked, put through the chat template, tokenised.

What cannot be used is skipped, counted and named, never cut: a prompt that lost its end asks something else.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from asyncopd.errors import ConfigError, DataError
from asyncopd.prompt_source import Rows, columns_of, read_rows, require_column
from asyncopd.types import Prompt

LOG = logging.getLogger(__name__)

SkipReason = Literal["too long", "empty"]
_NAMED_IN_WARNING = 5
_EXCERPT_CHARS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the prompts come from and how they become token ids."""

    prompts: str | None = None
    """Hub id, or a local .jsonl, .json or .parquet file; None where a data set is given in memory."""
    subset: str | None = None
    """The hub data set's configuration, where it has several."""
    split: str = "train"
    """The split of a hub data set."""
    column: str = "messages"
    """Column of chat messages (a list of role and content), or of plain text."""
    text_as_message: bool = True
    """Whether plain text becomes the user's message of a chat; if not, it is continued as it stands."""
    system_prompt: str | None = None
    """System message, put before chats that have none."""
    chat_template_args: str = "{}"
    """A JSON object of further arguments to the chat template, ``{"enable_thinking": false}``."""
    teacher_column: str | None = None
    """Column that names each prompt's teacher; None sends all to the teacher "default"."""
    max_new_tokens_column: str | None = None
    """Column of the longest answer to each prompt, in tokens; more than ``sampling.max_new_tokens`` counts as that."""
    shuffle: bool = True
    """Whether each epoch takes the prompts in a new order; if not, all take that of the data set."""
    max_prompt_tokens: int | None = None
    """Longer prompts are skipped even where the context would hold them."""
    held_out: str | None = None
    """Source of the held-out prompts, read like ``prompts``."""
    held_out_split: str = "train"
    """Split of ``held_out``, on the hub."""
    held_out_from_end: int = 0
    """Rows taken from the end of ``prompts`` instead, before anything is skipped."""

    def __post_init__(self) -> None:
        if self.held_out_from_end < 0:
            raise ConfigError(
                f"data.held_out_from_end is {self.held_out_from_end}; expected a number of rows, 0 or more"
            )
        if self.held_out is not None and self.held_out_from_end:
            raise ConfigError(
                f"data.held_out is {self.held_out!r} and data.held_out_from_end is {self.held_out_from_end}; "
                "set one of them"
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ConfigError(f"data.max_prompt_tokens is {self.max_prompt_tokens}; expected at least 1, or None")
        self.template_args()

    def template_args(self) -> dict[str, Any]:
        """The chat template's further arguments, parsed; raises ConfigError where they are not a JSON object."""
        try:
            parsed = json.loads(self.chat_template_args)
        except json.JSONDecodeError as error:
            parsed = error
        if not isinstance(parsed, dict):
            raise ConfigError(
                f"data.chat_template_args is {self.chat_template_args!r}; expected a JSON object such as "
                "'{\"enable_thinking\": false}'"
            )
        return parsed


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A row that became no prompt: its place in the source, why, its length in tokens, and how it begins."""

    source: str
    row: int
    reason: SkipReason
    tokens: int
    excerpt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """All prompts of a run; ``index`` counts from 0 in ``prompts`` and again in ``held_out``."""

    prompts: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    skipped: tuple[Skipped, ...]


def load_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    context_limit: int,
    dataset: Rows | None = None,
    held_out: Rows | None = None,
) -> PromptSet:
    """Read, check and tokenise the prompts; ``dataset`` and ``held_out`` in memory go before what the config names.

    context_limit   the longest prompt, in tokens, that leaves room for an answer in both models' contexts

    Raises ConfigError where no source is named, DataError for a source that is missing, empty, without the column,
    or in which no prompt is left.
    """
    if dataset is None and config.prompts is None:
        raise ConfigError("data.prompts is None; name a hub id or a local .jsonl or .parquet file, or pass a data set")
    limit = min(context_limit, config.max_prompt_tokens or context_limit)
    name = "the data set in memory" if dataset is not None else f"data set {config.prompts!r}"
    rows = dataset if dataset is not None else read_rows(str(config.prompts), subset=config.subset, split=config.split)
    reader = _Reader(config=config, tokenizer=tokenizer, limit=limit, name=name)
    columns = columns_of(rows, name)
    count = len(rows) - (config.held_out_from_end if held_out is None else 0)
    if count < 1:
        raise DataError(
            f"{name} has {len(rows)} rows and data.held_out_from_end is {config.held_out_from_end}: no row is left to "
            "train on"
        )
    prompts, skipped = reader.read(rows, columns, range(count))
    kept, skipped_too = _load_held_out(config, reader, rows, held_out, range(count, len(rows)))
    found = PromptSet(prompts=tuple(prompts), held_out=tuple(kept), skipped=(*skipped, *skipped_too))
    _report(found, name, limit)
    return found


def _load_held_out(
    config: DataConfig, reader: "_Reader", rows: Rows, held_out: Rows | None, tail: range
) -> tuple[list[Prompt], list[Skipped]]:
    if held_out is None and config.held_out is None:
        return reader.read(rows, columns_of(rows, reader.name), tail)
    name = "the held-out set in memory" if held_out is not None else f"held-out data set {config.held_out!r}"
    if held_out is None:
        held_out = read_rows(str(config.held_out), subset=config.subset, split=config.held_out_split)
    other = _Reader(config=config, tokenizer=reader.tokenizer, limit=reader.limit, name=name)
    return other.read(held_out, columns_of(held_out, name), range(len(held_out)))


def _report(found: PromptSet, name: str, limit: int) -> None:
    """Warn of what was skipped and of overlap; DataError where nothing is left."""
    if not found.prompts:
        reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(each.reason for each in found.skipped).items())
        raise DataError(f"no prompt of {name} can be used ({reasons}); the limit is {limit} tokens")
    if found.skipped:
        named = "; ".join(
            f"row {each.row} of {each.source} ({each.reason}, {each.tokens} tokens): {each.excerpt!r}"
            for each in found.skipped[:_NAMED_IN_WARNING]
        )
        more = len(found.skipped) - _NAMED_IN_WARNING
        LOG.warning(
            "skipped %d prompts (the limit is %d tokens): %s%s",
            len(found.skipped),
            limit,
            named,
            f"; and {more} more" if more > 0 else "",
        )
    trained_on = {prompt.token_ids for prompt in found.prompts}
    seen = [prompt for prompt in found.held_out if prompt.token_ids in trained_on]
    if seen:
        LOG.warning(
            "%d of %d held-out prompts are also trained on, the first is %r: held-out figures will flatter",
            len(seen),
            len(found.held_out),
            seen[0].text[:_EXCERPT_CHARS],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """One source on its way to prompts; ``name`` is what errors call it."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    limit: int
    name: str

    def read(self, rows: Rows, columns: Sequence[str], chosen: range) -> tuple[list[Prompt], list[Skipped]]:
        require_column(self.config.column, columns, self.name, "data.column")
        if self.config.teacher_column is not None:
            require_column(self.config.teacher_column, columns, self.name, "data.teacher_column")
        if self.config.max_new_tokens_column is not None:
            require_column(self.config.max_new_tokens_column, columns, self.name, "data.max_new_tokens_column")
        prompts: list[Prompt] = []
        skipped: list[Skipped] = []
        for place in chosen:
            row = rows[place]
            text, ids = self._tokens(row.get(self.config.column), place)
            reason: SkipReason | None = "empty" if not text.strip() else "too long" if len(ids) > self.limit else None
            if reason is None:
                prompts.append(
                    Prompt(
                        index=len(prompts),
                        text=text,
                        token_ids=ids,
                        teacher=self._teacher(row, place),
                        max_new_tokens=self._max_new_tokens(row, place),
                    )
                )
            else:
                excerpt = text[:_EXCERPT_CHARS]
                skipped.append(Skipped(source=self.name, row=place, reason=reason, tokens=len(ids), excerpt=excerpt))
        return prompts, skipped

    def _tokens(self, value: object, place: int) -> tuple[str, tuple[int, ...]]:
        """What the user asks, and the token ids of the whole prompt."""
        if value is None:
            return "", ()
        if isinstance(value, str):
            if not self.config.text_as_message:
                return value, tuple(self.tokenizer(value)["input_ids"])
            value = [{"role": "user", "content": value}]
        messages = self._messages(value, place)
        if not messages:
            return "", ()
        if self.config.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        if self.tokenizer.chat_template is None:
            raise DataError(
                f"{self.name} needs a chat template and the student's tokenizer has none; give it one, or take a text "
                "column with data.text_as_message false"
            )
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.config.template_args()
            )
        except TemplateError as error:
            raise DataError(f"row {place} of {self.name}: the chat template refuses it: {error}") from error
        # The template has written the special tokens already.
        ids = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return messages[-1]["content"], tuple(ids)

    def _messages(self, value: object, place: int) -> list[dict[str, str]]:
        """The chat up to the point where the student answers: answers at its end are left out."""
        if not isinstance(value, Sequence):
            raise DataError(
                f"row {place} of {self.name}: column {self.config.column!r} holds {type(value).__name__}; expected "
                "text, or a list of messages"
            )
        messages: list[dict[str, str]] = []
        for message in value:
            usable = isinstance(message, Mapping) and all(
                isinstance(message.get(key), str) for key in ("role", "content")
            )
            if not usable:
                raise DataError(
                    f"row {place} of {self.name}: {str(message)[:_EXCERPT_CHARS]!r} is no message; expected a mapping "
                    "with the texts 'role' and 'content'"
                )
            messages.append({"role": message["role"], "content": message["content"]})
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        return messages

    def _teacher(self, row: Mapping[str, Any], place: int) -> str:
        if self.config.teacher_column is None:
            return "default"
        teacher = row.get(self.config.teacher_column)
        if not isinstance(teacher, str) or not teacher:
            raise DataError(
                f"row {place} of {self.name}: {self.config.teacher_column!r} is {teacher!r}; expected a teacher's name"
            )
        return teacher

    def _max_new_tokens(self, row: Mapping[str, Any], place: int) -> int | None:
        if self.config.max_new_tokens_column is None:
            return None
        tokens = row.get(self.config.max_new_tokens_column)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise DataError(
                f"row {place} of {self.name}: {self.config.max_new_tokens_column!r} is {tokens!r}; expected the tokens "
                "of the longest answer, a whole number, 1 or more"
            )
        return tokens


def save_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write tokenised prompts, one JSON object a line, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            row = {"i": prompt.index, "text": prompt.text, "ids": prompt.token_ids, "teacher": prompt.teacher}
            if prompt.max_new_tokens is not None:
                row["max_new_tokens"] = prompt.max_new_tokens
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read what `save_prompts` wrote; raises DataError where the file is missing or something else."""
    try:
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        return tuple(
            Prompt(
                index=row["i"],
                text=row["text"],
                token_ids=tuple(row["ids"]),
                teacher=row["teacher"],
                max_new_tokens=row.get("max_new_tokens"),
            )
            for row in rows
        )
    except FileNotFoundError as error:
        raise DataError(
            f"there are no tokenised prompts at {str(path)!r}; they are written when a run begins"
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{str(path)!r} holds no tokenised prompts of this version: {error!r}") from error
