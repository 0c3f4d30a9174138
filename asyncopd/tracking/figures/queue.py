"""What lay between the stages: age of the samples, and depth of the queue."""

from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from asyncopd.tracking import keys
from asyncopd.tracking.activity import flowed_s, length
from asyncopd.tracking.figures.canvas import MUTED, draw, legend_above, time_unit, whole_numbers
from asyncopd.tracking.metrics import MetricsRow, under
from asyncopd.tracking.theme import STAGE_COLOURS, STATE_COLOURS
from asyncopd.tracking.trace import Interval

MOST_POINTS = 2000
"""Steps that the figure of the depth shows, evenly taken; more only make the page heavy."""
_PLACES = {
    "in_flight": ("in flight", STAGE_COLOURS["rollout"]),
    "in_queue": ("in queue", STAGE_COLOURS["teacher"]),
    "training": ("at training", STAGE_COLOURS["learner"]),
}


def staleness_figure(rows: Sequence[MetricsRow], max_staleness: int) -> str | None:
    """Histogram of the ages of samples in each place, over all steps, with the bound; None where none were counted."""
    counts = {place: _ages(rows, place) for place in _PLACES}
    oldest = max([max_staleness, *(age for ages in counts.values() for age in ages)])
    if not any(counts.values()):
        return None

    def paint(axes: Sequence[Axes]) -> None:
        for axis, (place, (title, colour)) in zip(axes, _PLACES.items(), strict=True):
            ages = counts[place]
            total = sum(ages.values())
            if total:
                axis.bar(list(ages), [count / total for count in ages.values()], width=0.72, color=colour)
                mean = sum(age * count for age, count in ages.items()) / total
                title += f", mean {mean:.2f}"
            axis.axvline(max_staleness + 0.5, color=MUTED, linewidth=1.0, linestyle=(0, (3, 3)))
            axis.set_title(title)
            axis.set_xlabel("age, optimizer steps")
            axis.set_xlim(-0.6, oldest + 0.9)
            whole_numbers(axis)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes[0].set_ylabel("share of samples")

    return draw(
        paint, name="staleness", alt="Histogram of sample ages in flight, in queue and at training",
        columns=3, share_y=True, height=2.3,
    )  # fmt: skip


def depth_figure(rows: Sequence[MetricsRow], windows: Sequence[Interval]) -> str | None:
    """Samples in each live state of the ledger over wall time; None where the queue was not logged."""
    logged = [row for row in rows if under(row.values, keys.QUEUE)]
    if len(logged) < 2:
        return None
    logged = logged[:: len(logged) // MOST_POINTS + 1]
    unit_s, unit = time_unit(length(windows) / 1e9)
    times = [flowed_s(int(row.time * 1e9), windows) / unit_s for row in logged]
    layers = {state: [row.values.get(f"{keys.QUEUE}/{state}", 0.0) for row in logged] for state in keys.LIVE_STATES}
    present = {state: layer for state, layer in layers.items() if any(layer)}
    if not present:
        # In sync mode nothing is left in the queue after a step.
        return None

    def paint(axes: Sequence[Axes]) -> None:
        axis = axes[0]
        axis.stackplot(
            times,
            list(present.values()),
            labels=[state.lower() for state in present],
            colors=[STATE_COLOURS[state] for state in present],
            linewidth=0,
        )
        axis.set_xlim(times[0], max(times[-1], times[0] + 1e-3))
        axis.set_ylim(bottom=0)
        axis.set_xlabel(f"wall time, {unit}")
        axis.set_ylabel("samples")
        legend_above(axis)

    return draw(paint, name="queue", alt="Samples in the queue by state over wall time", height=2.6)


def _ages(rows: Sequence[MetricsRow], place: str) -> Counter[int]:
    ages: Counter[int] = Counter()
    for row in rows:
        for age, count in under(row.values, f"staleness/{place}").items():
            if count:
                ages[int(age)] += int(count)
    return ages
