"""Who worked when: the stages' busy fractions, and the spans of every process on one time axis."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from asyncopd.tracking import keys
from asyncopd.tracking.activity import (
    THROUGHPUT_SPAN,
    StageActivity,
    busy_along,
    flowed_s,
    length,
)
from asyncopd.tracking.figures.canvas import GROUND, INK, MUTED, draw, legend_above, time_unit
from asyncopd.tracking.figures.learning import smooth
from asyncopd.tracking.theme import IDLE_COLOUR, STAGE_COLOURS
from asyncopd.tracking.trace import Interval, Span, stage_of

_PIECES = 60
_REACH = 2
"""Pieces on either side that a point of the curve averages over, so that it does not follow single batches."""
_BAR_HEIGHT = 0.62
_WAIT_HEIGHT = 0.1
_GRAINS = 800
"""Parts of a timeline that can be told apart by eye."""
_OTHER_WORK = 0.5
"""How far the colour of a stage's other work (publish, checkpoint, load_weights ...) goes towards grey."""


def busy_figure(spans: Sequence[Span], windows: Sequence[Interval], overall: StageActivity) -> str | None:
    """Busy fraction of each stage over the run and along it; None when nothing was traced."""
    if not windows or overall.wall_s <= 0:
        return None
    pieces = _pieces(windows)
    busy = busy_along(spans, pieces)
    along = {stage: smooth([share[stage] for share in busy], _REACH) for stage in keys.STAGES}
    unit_s, unit = time_unit(overall.wall_s)
    times = [flowed_s((start + end) // 2, windows) / unit_s for start, end in pieces]

    def paint(axes: Sequence[Axes]) -> None:
        bars, lines = axes
        for row, stage in enumerate(reversed(keys.STAGES)):
            share = overall.busy[stage]
            bars.barh(row, 1.0, height=0.5, color=IDLE_COLOUR, alpha=0.18)
            bars.barh(row, share, height=0.5, color=STAGE_COLOURS[stage])
            bars.text(1.03, row, f"{share:.0%}", va="center", fontweight="bold")
        bars.set_yticks(range(len(keys.STAGES)), list(reversed(keys.STAGES)))
        bars.tick_params(axis="y", labelcolor=INK)
        bars.set_xlim(0, 1.18)
        bars.xaxis.set_visible(False)
        bars.spines["bottom"].set_visible(False)
        bars.grid(visible=False)
        bars.set_title("whole run", color=MUTED)
        for stage, shares in along.items():
            lines.plot(times, shares, color=STAGE_COLOURS[stage], label=stage)
        lines.set_ylim(0, 1.03)
        lines.set_xlim(left=0, right=overall.wall_s / unit_s)
        lines.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        lines.set_xlabel(f"wall time, {unit}")
        lines.set_title("along the run", color=MUTED)

    return draw(
        paint, name="busy", alt="Busy fraction of each stage", columns=2, width_ratios=(1, 2.2), height=2.2
    )  # fmt: skip


def timeline_figure(spans: Sequence[Span], window: Interval, *, name: str, title: str, labels: bool) -> str | None:
    """The spans of each process within a window, in seconds from its start; None when there are none.

    labels   write on a span what it is where there is room: the policy version that a step made, or its name
    """
    inside = [span for span in spans if span.end_ns > window[0] and span.start_ns < window[1]]
    if not inside:
        return None
    grain_ns = (window[1] - window[0]) // _GRAINS
    order = {stage: place for place, stage in enumerate(keys.STAGES)}
    processes = sorted({span.process for span in inside}, key=lambda name: (order.get(stage_of(name), 9), name))

    def paint(axes: Sequence[Axes]) -> None:
        axis = axes[0]
        for row, process in enumerate(processes):
            for span in _joined([span for span in inside if span.process == process], grain_ns):
                _paint_span(axis, span, row, window, labels=labels)
        axis.set_yticks(range(len(processes)), processes)
        axis.tick_params(axis="y", labelcolor=INK)
        axis.set_ylim(len(processes) - 0.45, -0.55)
        axis.set_xlim(0, (window[1] - window[0]) / 1e9)
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
        axis.set_xlabel(f"seconds, {title}")
        _timeline_legend(axis)

    alt = f"Timeline of the processes, {title}"
    return draw(paint, name=name, alt=alt, height=1.15 + 0.36 * len(processes))


def steady_window(spans: Sequence[Span], windows: Sequence[Interval], steps: int = 4) -> Interval | None:
    """A stretch of `steps` optimizer steps in the middle of the run; None when there were not so many."""
    trained = sorted(
        (span for span in spans if span.process == "learner" and span.name == THROUGHPUT_SPAN["learner"]),
        key=lambda span: span.start_ns,
    )
    if len(trained) <= steps:
        return None
    first = min(len(trained) // 2, len(trained) - steps - 1)
    return trained[first].start_ns, trained[first + steps].start_ns


def _paint_span(axis: Axes, span: Span, row: int, window: Interval, *, labels: bool) -> None:
    start = max(span.start_ns, window[0])
    seconds = (min(span.end_ns, window[1]) - start) / 1e9
    left = (start - window[0]) / 1e9
    if span.is_wait:
        axis.barh(row, seconds, left=left, height=_WAIT_HEIGHT, color=IDLE_COLOUR, alpha=0.55, linewidth=0)
        return
    room = seconds / ((window[1] - window[0]) / 1e9)
    # An edge sets neighbours apart, but would hide a narrow bar.
    edge = 0.8 if room > 0.01 else 0.0
    axis.barh(row, seconds, left=left, height=_BAR_HEIGHT, color=_colour(span), edgecolor=GROUND, linewidth=edge)
    text = _label(span)
    if labels and room * 100 > 1.15 * len(text) + 1:
        axis.text(left + seconds / 2, row, text, ha="center", va="center", color="#ffffff", fontsize=8)


def _label(span: Span) -> str:
    if span.name == THROUGHPUT_SPAN["learner"] and "version" in span.numbers:
        return f"v{span.numbers['version']:.0f}"
    return span.name


def _colour(span: Span) -> tuple[float, float, float]:
    colour = to_rgb(STAGE_COLOURS.get(span.stage, IDLE_COLOUR))
    if THROUGHPUT_SPAN.get(span.stage) == span.name:
        return colour
    red, green, blue = (own + (grey - own) * _OTHER_WORK for own, grey in zip(colour, to_rgb(IDLE_COLOUR), strict=True))
    return red, green, blue


def _timeline_legend(axis: Axes) -> None:
    patches = [Patch(color=STAGE_COLOURS[stage], label=f"{stage}: {span}") for stage, span in THROUGHPUT_SPAN.items()]
    patches.append(Patch(color=IDLE_COLOUR, label="greyer: other work; thin: waiting"))
    legend_above(axis, patches)


def _pieces(windows: Sequence[Interval]) -> list[Interval]:
    """The windows cut into about `_PIECES` pieces of one length; none reaches over a pause."""
    piece = max(1, length(windows) // _PIECES)
    return [
        (start, min(start + piece, end))
        for begin, end in windows
        for start in range(begin, end, piece)
        if end - start > piece // 2
    ]


def _joined(spans: Sequence[Span], grain_ns: int) -> list[Span]:
    """The spans of one process in order, short neighbours of one name as one: a page need not hold what none can see.

    grain_ns   what is shorter than this, and what lies closer together, is joined
    """
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        before = joined[-1] if joined else None
        if (
            before is not None
            and before.name == span.name
            and span.start_ns - before.end_ns < grain_ns
            and min(span.end_ns - span.start_ns, before.end_ns - before.start_ns) < grain_ns
        ):
            joined[-1] = replace(before, end_ns=max(before.end_ns, span.end_ns))
        else:
            joined.append(span)
    return joined
