"""The table at the end of a run: the student on held-out prompts, before and after."""

import math
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from asyncopd.tracking.metrics import EstimateLike, HeldOutLike
from asyncopd.tracking.theme import ALARM_COLOUR, MINUS, STAGE_COLOURS

_GOOD = STAGE_COLOURS["learner"]


def before_after_table(
    before: HeldOutLike, after: HeldOutLike, *, report: Path | None = None, answers: int = 2
) -> RenderableType:
    """Figures with 95% intervals, some answers side by side, and where the report is.

    The answers are to prompts that both evaluations have kept, in the order of the first.
    """
    figures = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    figures.add_column("held-out prompts", style="dim", no_wrap=True)
    for heading in ("before", "after", "change"):
        figures.add_column(heading, justify="right", no_wrap=True)
    figures.add_row("reverse KL, nats per token", *_row(before.reverse_kl, after.reverse_kl, 3, lower_is_better=True))
    figures.add_row("forward KL, nats per token", *_row(before.forward_kl, after.forward_kl, 3, lower_is_better=True))
    figures.add_row("answer length, tokens", *_row(before.mean_length, after.mean_length, 1))
    share = f"{(after.eos_share - before.eos_share) * 100:+.0f} points".replace("-", MINUS)
    figures.add_row("answers that end with EOS", f"{before.eos_share:.0%}", f"{after.eos_share:.0%}", share)
    parts: list[RenderableType] = [figures, Text()]
    later = dict(after.samples)
    shared = [(prompt, answer, later[prompt]) for prompt, answer in before.samples if prompt in later]
    if shared and answers > 0:
        parts += [_answers(shared[:answers]), Text()]
    if report is not None:
        parts.append(Text.assemble(("report  ", "dim"), str(report)))
    return Group(*parts)


def _answers(shared: list[tuple[str, str, str]]) -> Table:
    table = Table(box=None, expand=True, padding=(0, 2, 1, 0), pad_edge=False)
    table.add_column("prompt", ratio=2, style="dim")
    table.add_column("answer before", ratio=4)
    table.add_column("answer after", ratio=4)
    for prompt, first, second in shared:
        # As Text: an answer may hold what rich reads as markup.
        table.add_row(Text(prompt.strip()), Text(first.strip()), Text(second.strip()))
    return table


def _row(
    before: EstimateLike, after: EstimateLike, digits: int, *, lower_is_better: bool = False
) -> tuple[str, str, Text]:
    change = (after.mean - before.mean) / before.mean if before.mean else 0.0
    style = ""
    if lower_is_better:
        style = f"bold {_GOOD if change < 0 else ALARM_COLOUR}"
    return _estimate(before, digits), _estimate(after, digits), Text(f"{change:+.0%}".replace("-", MINUS), style=style)


def _estimate(estimate: EstimateLike, digits: int) -> str:
    interval = f" ± {estimate.ci95:.{digits}f}" if math.isfinite(estimate.ci95) else ""
    return f"{estimate.mean:.{digits}f}{interval}"
