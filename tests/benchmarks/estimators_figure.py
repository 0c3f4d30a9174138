"""The figure of the estimator benchmark: gradient error against bytes cached per token."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

COLOURS = {
    "multi_sample": "#7f7f7f",
    "gumbel": "#bcbd22",
    "systematic": "#1f77b4",
    "two_phase": "#2ca02c",
    "two_phase_centred": "#d62728",
    "top_k": "#c49c94",
    "top_k_tail": "#8c564b",
}
LINES = {"none": "-", "mean": ":", "hajek": "--"}


def draw_figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Reverse and forward KL, fresh proposals, near and far from the teacher; log-log; biased designs are thin."""
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), sharex=True)
    for across, pair in enumerate(("near", "far")):
        for down, direction in enumerate(("reverse", "forward")):
            axis = axes[down][across]
            chosen = [r for r in rows if (r["pair"], r["direction"], r["stale"]) == (pair, direction, False)]
            for key in dict.fromkeys((r["design"], r["centring"], r["form"]) for r in chosen):
                line = [r for r in chosen if (r["design"], r["centring"], r["form"]) == key]
                design, centring, form = key
                label = design + (f", {centring}" if centring != "none" else "")
                label += f", {form}" if design == "top_k" else ""
                constant = design.startswith("top_k")
                axis.plot(
                    [r["bytes_per_token"] for r in line],
                    [r["rel_mse"] for r in line],
                    LINES[centring] if form != "plain" else "-.",
                    color=COLOURS[design],
                    linewidth=1.0 if constant else 2.0,
                    marker="x" if constant else "o",
                    markersize=4,
                    label=label + (" (biased)" if constant else ""),
                )
                low, high = zip(*(r["rel_mse_ci"] for r in line), strict=True)
                axis.fill_between([r["bytes_per_token"] for r in line], low, high, color=COLOURS[design], alpha=0.1)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"{direction} KL, {pair} the teacher" if pair == "near" else f"{direction} KL, far from it")
            axis.grid(True, which="major", alpha=0.3)
            sizes = sorted({r["bytes_per_token"] for r in chosen})
            axis.set_xticks(sizes, [str(size) for size in sizes])
    for axis in axes[1]:
        axis.set_xlabel("bytes cached a token")
    for row in axes:
        row[0].set_ylabel("relative squared error of the gradient")
        row[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
