"""How the student came closer to its teacher: KL, loss and gradient norm over steps and over wall time."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from asyncopd.tracking import keys
from asyncopd.tracking.activity import flowed_s, length
from asyncopd.tracking.figures.canvas import INK, MUTED, draw, legend_above, time_unit, whole_numbers
from asyncopd.tracking.metrics import MetricsRow
from asyncopd.tracking.trace import Interval

_SERIES = "#766dd0"
_HELD_OUT = {
    keys.HELD_OUT_REVERSE_KL: ("held-out reverse KL", "#cc4b8c"),
    keys.HELD_OUT_FORWARD_KL: ("held-out forward KL", INK),
}

_INTERVALS = frozenset(f"{name}/ci95" for name in _HELD_OUT)

Points = tuple[list[float], list[float], list[float]]
"""Policy versions, seconds of wall time, values."""


def kl_figure(rows: Sequence[MetricsRow], windows: Sequence[Interval]) -> str | None:
    """Estimated divergence of the training batches, and held-out KL with 95% intervals; None without either."""
    training = {name: _points(rows, windows, name) for name in _divergences(rows)}
    held_out = {name: _points(rows, windows, f"{name}/mean") for name in _HELD_OUT}
    if not any(points[0] for points in (*training.values(), *held_out.values())):
        return None

    unit_s, unit = time_unit(length(windows) / 1e9)

    def paint(axes: Sequence[Axes]) -> None:
        for axis, place, scale in ((axes[0], 0, 1.0), (axes[1], 1, unit_s)):
            for name, points in training.items():
                part = "" if len(training) == 1 else f", {name.removesuffix('/divergence')}"
                x = [value / scale for value in points[place]]
                axis.plot(x, points[2], color=_SERIES, alpha=0.28, linewidth=1.0)
                axis.plot(x, smooth(points[2]), color=_SERIES, label=f"training batch{part}")
            for name, points in held_out.items():
                x = [value / scale for value in points[place]]
                _plot_held_out(axis, name, x, points[2], _points(rows, windows, f"{name}/ci95")[2])
            axis.margins(x=0.02)
        axes[0].set_ylim(bottom=0, top=1.06 * _top(rows, training, held_out))
        axes[0].set_ylabel("nats per token")
        axes[0].set_xlabel("optimizer steps")
        whole_numbers(axes[0])
        axes[1].set_xlabel(f"wall time, {unit}")
        legend_above(axes[0])

    return draw(paint, name="kl", alt="KL divergence against steps and wall time", columns=2, share_y=True, height=2.9)


def loss_figure(rows: Sequence[MetricsRow], windows: Sequence[Interval]) -> str | None:
    """Loss and gradient norm of each step; None before the first."""
    loss, norm = (_points(rows, windows, name) for name in (keys.LOSS, keys.GRAD_NORM))
    if not loss[0]:
        return None

    def paint(axes: Sequence[Axes]) -> None:
        for axis, points, title in zip(axes, (loss, norm), ("loss", "gradient norm, before clipping"), strict=True):
            axis.plot(points[0], points[2], color=_SERIES, alpha=0.28, linewidth=1.0)
            axis.plot(points[0], smooth(points[2]), color=_SERIES)
            axis.set_title(title, color=MUTED)
            axis.set_xlabel("optimizer steps")
            axis.margins(x=0.02)
            whole_numbers(axis)
            axis.set_ylim(bottom=min(0.0, *points[2]) if points[2] else 0.0)

    return draw(paint, name="loss", alt="Loss and gradient norm against steps", columns=2, height=2.2)


def _plot_held_out(
    axis: Axes, name: str, x: Sequence[float], means: Sequence[float], half_widths: Sequence[float]
) -> None:
    if not means:
        return
    label, colour = _HELD_OUT[name]
    axis.errorbar(
        x,
        means,
        yerr=half_widths if len(half_widths) == len(means) else None,
        fmt="o-" if name == keys.HELD_OUT_REVERSE_KL else "o--",
        color=colour,
        label=label,
        markersize=4,
        linewidth=1.2,
        elinewidth=1.0,
        capsize=2.5,
    )


def _top(rows: Sequence[MetricsRow], training: Mapping[str, Points], held_out: Mapping[str, Points]) -> float:
    """The highest value drawn, with its interval; at least a little, so that an axis can be drawn."""
    intervals = [value for row in rows for name, value in row.values.items() if name in _INTERVALS]
    points = [value for series in (*training.values(), *held_out.values()) for value in series[2]]
    return max(points, default=0.0) + max(filter(math.isfinite, intervals), default=0.0) or 1e-3


def smooth(values: Sequence[float], half_width: int | None = None) -> list[float]:
    """Centred running mean over 2 * half_width + 1 values, a window that shrinks at both ends."""
    half = len(values) // 40 + 1 if half_width is None else half_width
    array, means = np.asarray(values), []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        means.append(float(array[index - reach : index + reach + 1].mean()))
    return means


def _divergences(rows: Sequence[MetricsRow]) -> list[str]:
    names = {name for row in rows for name in row.values if name.rpartition("/")[2] == keys.DIVERGENCE}
    return sorted(names)


def _points(rows: Sequence[MetricsRow], windows: Sequence[Interval], name: str) -> Points:
    known = [(row, row.values[name]) for row in rows if math.isfinite(row.values.get(name, math.nan))]
    known.sort(key=lambda pair: pair[0].policy_version)
    seconds = [flowed_s(int(row.time * 1e9), windows) for row, _ in known]
    return [float(row.policy_version) for row, _ in known], seconds, [value for _, value in known]
