"""What the figures share: small, on transparent ground, in colours that a light and a dark page can both show.

A figure is an SVG whose text stays text. Ink and lines are drawn in stand-in colours that become CSS variables of the
page, so the page decides about light and dark. Figures are made without pyplot: no global state, safe in any thread.
"""

import html
import io
import re
from collections.abc import Callable, Sequence

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, MUTED, LINE, GROUND = "#010101", "#020202", "#030303", "#040404"
"""Stand-in colours: text and strong lines, labels, grid lines, and the ground of the page."""

_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)", GROUND: "var(--ground)"}
_WIDTH_INCHES = 8.4
_STYLE = {
    "font.size": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.titlecolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "asyncopd",
}


def draw(
    paint: Callable[[Sequence[Axes]], None],
    *,
    name: str,
    alt: str,
    height: float = 2.6,
    columns: int = 1,
    rows: int = 1,
    share_y: bool = False,
    width_ratios: Sequence[float] | None = None,
) -> str:
    """An SVG element with `rows` x `columns` axes, painted by `paint`.

    name     unique in the page
    alt      what the figure shows, for those who cannot see it
    height   inches, at a width of `_WIDTH_INCHES`; the page scales it
    """
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, height))
        figure.set_layout_engine("constrained", wspace=0.05)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y, width_ratios=width_ratios)
        axes = [axis for row in grid for axis in row]
        for axis in axes:
            axis.tick_params(length=0)
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(buffer.getvalue(), name, alt)


def time_unit(total_s: float) -> tuple[float, str]:
    """The unit in which a stretch of time reads well: its length in seconds, and its name for an axis label."""
    for unit_s, name in ((3600.0, "hours"), (60.0, "minutes")):
        if total_s >= 3 * unit_s:
            return unit_s, name
    return 1.0, "seconds"


def whole_numbers(axis: Axes) -> None:
    """Ticks on the x axis at whole numbers alone, as counts of steps are."""
    axis.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))


def legend_above(axis: Axes, handles: Sequence[Artist] | None = None) -> None:
    """A legend in one line above all axes, where it hides no data; of what is labelled on `axis`, or of the handles."""
    axis.figure.legend(
        handles=handles if handles is not None else axis.get_legend_handles_labels()[0],
        loc="outside upper left",
        ncols=6,
        borderaxespad=0.2,
        handlelength=1.4,
        columnspacing=1.6,
        handletextpad=0.5,
    )


def _for_page(svg: str, name: str, alt: str) -> str:
    """The element alone, its ids made unique in the page, its size and colours left to the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    opening, _, rest = svg.partition(">")
    opening = re.sub(r'\s(?:width|height)="[^"]*"', "", opening)
    svg = f'{opening} role="img" aria-label="{html.escape(alt, quote=True)}">{rest}'
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    return svg
