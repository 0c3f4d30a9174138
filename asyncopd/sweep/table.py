"""The runs of a sweep as one tidy table: one row a run, the swept fields first."""

import csv
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars

from asyncopd.sweep.runner import read_result
from asyncopd.sweep.spec import SEED, Sweep


def rows(sweep: Sweep) -> list[dict[str, Any]]:
    """One row a run, in the order of the sweep; a run that did not end has the status ``missing``."""
    found = []
    for each in sweep.runs:
        point = {axis: value if isinstance(value, int | float) else str(value) for axis, value in each.point.items()}
        seed = point.pop(SEED)
        found.append({**point, SEED: seed, "run": each.name, **(read_result(each) or {"status": "missing"})})
    columns = list(dict.fromkeys(name for row in found for name in row))
    return [{column: row.get(column) for column in columns} for row in found]


def write_table(sweep: Sweep, folder: Path) -> tuple[Path, Path]:
    """Write ``<name>.parquet`` and ``<name>.csv`` into a folder; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found = rows(sweep)
    parquet, text = folder / f"{sweep.name}.parquet", folder / f"{sweep.name}.csv"
    disable_progress_bars()
    Dataset.from_list(found).to_parquet(str(parquet))
    with text.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    return parquet, text
