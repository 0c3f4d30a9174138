"""The figures of one run as a flat row of a table."""

import math
from typing import Any

from asyncopd.interface import RunResult
from asyncopd.tracking.metrics import MetricsRow, read_metrics
from asyncopd.tracking.summary import BeforeAfter, RunSummary

HELD_OUT = "held_out/"
_ESTIMATED = ("reverse_kl", "forward_kl", "mean_length", "eos_share")


def result_row(result: RunResult) -> dict[str, Any]:
    """Held-out figures before and after, staleness, speed and time of a run that ended; what is unknown is None.

    Values of the caller's own evaluation come in as ``<name>_before`` and ``<name>_after``.
    """
    summary = result.summary
    if summary is None:
        return {}
    return {
        "steps": summary.steps,
        **_held_out(summary),
        **_own(read_metrics(result.path)),
        "staleness_mean": summary.staleness.mean,
        "staleness_max": summary.staleness.max,
        "trained": None if summary.samples is None else summary.samples.trained,
        "dropped": None if summary.samples is None else sum(summary.samples.dropped.values()),
        "restarts": summary.restarts,
        "tokens_per_s": summary.tokens_per_s.learner,
        **{f"busy_{stage}": getattr(summary.busy, stage) for stage in ("rollout", "teacher", "learner")},
        **{f"cpu_{stage}": getattr(summary.cpu_s, stage) for stage in ("rollout", "teacher", "learner")},
        "overlap": summary.overlap,
        "wall_s": summary.wall_s,
    }


def _held_out(summary: RunSummary) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    for name in _ESTIMATED if summary.held_out is not None else ():
        both: BeforeAfter = getattr(summary.held_out, name)
        values[f"{name}_before"] = both.before.mean
        values[f"{name}_after"] = None if both.after is None else both.after.mean
        if name != "eos_share":
            values[f"{name}_after_ci95"] = None if both.after is None else both.after.ci95
    return values


def _own(rows: list[MetricsRow]) -> dict[str, float]:
    """What the caller's evaluation said first and last, apart from what every run's evaluation says."""
    values: dict[str, float] = {}
    for row in rows:
        for name, value in row.values.items():
            short = name.removeprefix(HELD_OUT)
            if name.startswith(HELD_OUT) and short.partition("/")[0] not in _ESTIMATED and math.isfinite(value):
                values.setdefault(f"{short}_before", value)
                values[f"{short}_after"] = value
    return values
