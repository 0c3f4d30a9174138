"""Rows of prompts from a hub id, a local file or an object in memory, with errors that say what to do instead."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from asyncopd.errors import DataError

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}

Rows: TypeAlias = Dataset | Sequence[Mapping[str, Any]]
"""What may be given in memory: a `datasets.Dataset`, or any sequence of mappings."""


def read_rows(source: str, *, subset: str | None, split: str) -> Dataset:
    """The rows of a local .jsonl, .json or .parquet file, or of one split of a hub data set.

    Raises DataError where there is no such file, data set, subset or split, or where it cannot be parsed.
    """
    path = Path(source).expanduser()
    looks_local = path.suffix in READERS or source.startswith((".", "/", "~"))
    if not path.is_file() and looks_local:
        raise DataError(_no_such_file(source, path))
    if path.is_file() and path.suffix not in READERS:
        raise DataError(f"prompts file {source!r} ends in {path.suffix!r}; expected one of {', '.join(READERS)}")
    try:
        with _quiet():
            if path.is_file():
                return datasets.load_dataset(READERS[path.suffix], data_files={"train": str(path)}, split=split)
            return datasets.load_dataset(source, subset, split=split)
    except StopIteration as error:
        # What datasets lets through for a file without a row.
        raise DataError(f"prompts file {source!r} is empty; expected at least one row") from error
    except DatasetGenerationError as error:
        raise DataError(f"prompts {source!r} cannot be parsed: {error.__cause__ or error}") from error
    except (DatasetNotFoundError, ConnectionError) as error:
        raise DataError(
            f"prompts {source!r} are neither a local file (.jsonl, .json, .parquet) nor a data set that can be reached "
            f"on the hub or in its local cache: {error}"
        ) from error
    except ValueError as error:
        # What datasets raises for an unknown subset or split; its message lists those there are.
        raise DataError(f"prompts {source!r} (subset {subset!r}, split {split!r}): {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, which would break into the live view."""
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _no_such_file(source: str, path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"there is no prompts file {source!r}: its folder {str(folder)!r} does not exist"
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in READERS)
    near = difflib.get_close_matches(path.name, names, n=3) or names[:3]
    there = f"near it are {', '.join(near)}" if near else "its folder holds no .jsonl, .json or .parquet file"
    return f"there is no prompts file {source!r}; {there}"


def columns_of(rows: Rows, name: str) -> list[str]:
    """The names of the columns; raises DataError for what holds no rows, or has none that can be counted."""
    if isinstance(rows, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise DataError(f"{name} holds the splits {', '.join(rows)}; give one of them, for example dataset['train']")
    if isinstance(rows, datasets.IterableDataset):
        raise DataError(f"{name} is a stream, whose length is unknown; make a Dataset of the part to train on")
    if len(rows) == 0:
        raise DataError(f"{name} is empty; expected at least one row")
    return list(rows.column_names) if isinstance(rows, Dataset) else list(rows[0])


def require_column(column: str, columns: Sequence[str], name: str, setting: str) -> None:
    """DataError saying which columns there are unless ``column`` is one; ``setting`` is the option to mend."""
    if column in columns:
        return
    near = difflib.get_close_matches(column, columns, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    there = ", ".join(repr(each) for each in columns)
    raise DataError(f"{name} has no column {column!r}{hint}; it has {there}: set {setting} to one of them")
