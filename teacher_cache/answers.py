"""Finished answers in a file, as requests: what is scored once, ahead of training.

One JSON object a line, either token ids, ``{"prompt_ids": [...], "response_ids": [...]}``, or text that the teacher's
tokenizer reads, ``{"prompt": "...", "response": "..."}``. ``uid`` is optional, and seeds what the teacher draws.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from teacher_cache.errors import CodecError
from teacher_cache.scorer import ScoreRequest


def read_answers(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, draw: str | None, run_seed: int
) -> Iterator[ScoreRequest]:
    """Requests in the order of the file; CodecError names the line that is none."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                prompt, response = _ids(row, "prompt", tokenizer), _ids(row, "response", tokenizer)
                yield ScoreRequest(
                    uid=str(row.get("uid", f"0-{number - 1}-0-0")),
                    prompt_ids=tuple(prompt),
                    response_ids_T=torch.tensor(response, dtype=torch.int32),
                    draw=draw,
                    run_seed=run_seed,
                )
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise CodecError(
                    f"line {number} of {path}: {error!r}; expected prompt_ids and response_ids, or prompt and response"
                ) from error


def _ids(row: dict[str, Any], part: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if f"{part}_ids" in row:
        return [int(index) for index in row[f"{part}_ids"]]
    return tokenizer(row[part], add_special_tokens=part == "prompt")["input_ids"]
