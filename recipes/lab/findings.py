"""What the notebooks and the results page share: the tables of the sweeps, intervals over seeds, and figures.

A table is read from ``docs/results``, or from the folder that ``ASYNCOPD_LAB_TABLES`` names, as ``run_lab.py --smoke``
writes them: figures that show that everything works and nothing else.
"""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes

LAB = Path(__file__).parent
ROOT = LAB.parent.parent
RESULTS = ROOT / "docs" / "results"
TABLES = "ASYNCOPD_LAB_TABLES"
Row: TypeAlias = dict[str, str | float]
_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Two-sided 95% quantiles of Student's t by number of values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Mean over seeds, the half-width of its 95% interval (Student's t; NaN for one seed), and the number of seeds."""

    mean: float
    half: float
    seeds: int

    def text(self, form: str = ".2f") -> str:
        """``mean ± half``."""
        return f"{self.mean:{form}}" + (f" ± {self.half:{form}}" if math.isfinite(self.half) else "")


def interval(values: Sequence[float]) -> Interval:
    """Of the values of some seeds."""
    found = np.asarray(values, dtype=float)
    found = found[np.isfinite(found)]
    if len(found) == 0:
        return Interval(mean=math.nan, half=math.nan, seeds=0)
    half = math.nan if len(found) < 2 else _T95.get(len(found), 1.96) * found.std(ddof=1) / math.sqrt(len(found))
    return Interval(mean=float(found.mean()), half=float(half), seeds=len(found))


def table(name: str, folder: Path | None = None) -> list[Row]:
    """The rows of a sweep, with the lag as a number; a run that failed has no figures, one that was not run no row."""
    rows = read((folder or Path(os.environ.get(TABLES, RESULTS))) / f"{name}.csv")
    rows = [row for row in rows if row["status"] != "missing"]
    for row in rows:
        row["lag"] = _lag(str(row.get("mode", "")))
    return rows


def read(path: Path) -> list[Row]:
    """The rows of a table, numbers as numbers."""
    with path.open() as file:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _lag(mode: str) -> float:
    return 0.0 if mode == "sync" else float(mode.partition(":")[2]) if mode.startswith("lagged:") else math.nan


def by(rows: list[Row], keys: Sequence[str], column: str) -> dict[tuple[str | float, ...], Interval]:
    """The interval of a column over the seeds of each combination of keys, in the table's order."""
    groups: dict[tuple[str | float, ...], list[float]] = {}
    for row in rows:
        value = row.get(column, "")
        groups.setdefault(tuple(row[key] for key in keys), []).append(value if isinstance(value, float) else math.nan)
    return {key: interval(values) for key, values in groups.items()}


def gain_kept(rows: list[Row]) -> list[Row]:
    """What each run kept of its method's on-policy gain, seed by seed: (KL before - after) over the same at lag 0."""
    gains = {
        (row["method"], row["seed"], row["lag"]): float(row["reverse_kl_before"]) - float(row["reverse_kl_after"])
        for row in rows
        if row["status"] == "done"
    }
    return [
        {"method": method, "seed": seed, "lag": lag, "kept": gain / gains[method, seed, 0.0]}
        for (method, seed, lag), gain in gains.items()
        if (method, seed, 0.0) in gains
    ]


def against_lag(axis: Axes, rows: list[Row], column: str, label: str) -> None:
    """One line a method over the lag, with intervals over seeds; lags are drawn at even distances."""
    lags = sorted({float(row["lag"]) for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = by(rows, ["method", "lag"], column)
    for place, method in enumerate(methods):
        points = [(at, found[method, lag]) for at, lag in enumerate(lags) if (method, lag) in found]
        offset = (place - (len(methods) - 1) / 2) * 0.06
        axis.errorbar(
            [at + offset for at, _ in points],
            [point.mean for _, point in points],
            yerr=[0.0 if math.isnan(point.half) else point.half for _, point in points],
            marker="o",
            capsize=3,
            label=str(method),
        )
    axis.set_xticks(range(len(lags)), [f"{lag:g}" for lag in lags])
    axis.set(xlabel="lag, optimizer steps", ylabel=label)


def markdown(rows: list[Row], keys: Sequence[str], columns: Mapping[str, str]) -> str:
    """A table for reading: one line a combination of keys, ``mean ± half-width`` of each column in its format."""
    lines = [" | ".join(["", *keys, *columns, "seeds", ""]).strip(), "|" + " --- |" * (len(keys) + len(columns) + 1)]
    found = {column: by(rows, keys, column) for column in columns}
    for key in next(iter(found.values())):
        cells = [part if isinstance(part, str) else f"{part:g}" for part in key]
        cells += [found[column][key].text(form) for column, form in columns.items()]
        cells.append(str(max(found[column][key].seeds for column in columns)))
        lines.append(" | ".join(["", *cells, ""]).strip())
    return "\n".join(lines)
