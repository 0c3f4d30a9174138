"""Append-only files of JSON lines that survive a SIGKILL of the writer.

Every record is one `write` system call on an O_APPEND descriptor, so there is no buffer to lose, and a writer that dies
in the middle leaves at most one torn last line. Readers skip it; the next writer starts on a fresh line.
JSON has no NaN, so numbers that are not finite are stored as the strings "nan", "inf" and "-inf", and read back as
floats.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonLinesWriter:
    """Appends records to one file; safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        torn = _ends_in_mid_line(path)
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if torn:
            os.write(self._descriptor, b"\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; raises OSError when the disk is full and ValueError after `close`."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed; open a new writer to append to it")
        line = json.dumps(spell_not_finite(record), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        os.write(self._descriptor, line.encode() + b"\n")

    def close(self) -> None:
        """Release the descriptor; calling it again does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class JsonLinesFollower:
    """Reads what was appended since the last call, so that watching a long run costs the same as a short one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """New whole records, oldest first; none while the file does not exist. A line still being written waits."""
        return list(self.follow())

    def follow(self) -> Iterator[dict[str, Any]]:
        """As ``read``, one by one, for who needs not all of them at once."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                record = _record(line)
                if record is not None:
                    yield record


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole record of the file, oldest first; an absent file has none, a torn line is skipped."""
    return JsonLinesFollower(path).read()


def spell_not_finite(value: Any) -> Any:
    """The value with floats that are not finite replaced by their names, through mappings and sequences."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: spell_not_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell_not_finite(item) for item in value]
    return value


def as_float(value: Any) -> float | None:
    """A number as stored in a record, or None for anything that is not a number."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    if isinstance(value, int | float):
        return float(value)
    return None


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # a torn line, completed by the newline of the next writer
        return None
    return record if isinstance(record, dict) else None


def _ends_in_mid_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
