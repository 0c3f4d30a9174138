"""`report.html`: one self-contained page about a run, made from the files of its folder and made again at any time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2

from asyncopd.tracking.activity import flowed_s
from asyncopd.tracking.chrome_trace import CHROME_TRACE
from asyncopd.tracking.dashboard import duration
from asyncopd.tracking.figures.learning import kl_figure, loss_figure
from asyncopd.tracking.figures.queue import depth_figure, staleness_figure
from asyncopd.tracking.figures.timeline import busy_figure, steady_window, timeline_figure
from asyncopd.tracking.metrics import Evaluation
from asyncopd.tracking.run_files import RunFiles
from asyncopd.tracking.summary import BeforeAfter, EstimateFigure, LearnerFigures, RunSummary, summarize
from asyncopd.tracking.theme import MINUS, STAGE_COLOURS
from asyncopd.tracking.trace import Interval, Span

REPORT_FILE = "report.html"
CONFIG_FILE = "config.yaml"
_FIRST_S = 60
_ANSWERS_SHOWN = 5
_UNKNOWN = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One figure at the head of the page: a label, the value, and a remark below it."""

    label: str
    value: str
    remark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A figure with its heading and what to see in it; `figures` are SVG elements."""

    heading: str
    text: str
    figures: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """One held-out prompt with the answer of each evaluation that kept it, with its policy version."""

    prompt: str
    before: str
    after: str


def write_report(run_dir: Path) -> Path:
    """Write `report.html` and return its path; raises AsyncOPDError when the folder is not a run's.

    Works at any point of a run: what has not been logged is left out.
    """
    run_dir = Path(run_dir)
    files = RunFiles.read(run_dir)
    summary = summarize(files)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("asyncopd.tracking"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        facts=files.facts,
        summary=summary,
        tiles=_tiles(summary),
        comparison=_comparison(summary),
        sections=_sections(files),
        answers=_answers(files.evaluations),
        answers_shown=_ANSWERS_SHOWN,
        evaluations=files.evaluations,
        config=_config(run_dir),
        stage_colours=STAGE_COLOURS,
        trace_file=CHROME_TRACE if (run_dir / CHROME_TRACE).exists() else None,
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
    )
    path = run_dir / REPORT_FILE
    path.write_text(page, encoding="utf-8")
    return path


def _tiles(summary: RunSummary) -> list[Tile]:
    tiles = []
    if summary.held_out is not None:
        kl = summary.held_out.reverse_kl
        tiles.append(Tile(label="held-out reverse KL", value=_headline(kl), remark=_arrow(kl)))
    rate = summary.tokens_per_s
    tiles.append(
        Tile(
            label="trained",
            value=f"{rate.learner:,.0f} tokens/s",
            remark=f"rolled out {rate.rollout:,.0f}, scored {rate.teacher:,.0f}",
        )
    )
    tiles.append(Tile(label="wall time", value=_in_words(summary.wall_s), remark=f"{summary.steps} optimizer steps"))
    if "step" in summary.learner.seconds:
        tiles.append(_step_tile(summary.learner))
    tiles.append(Tile(label="overlap", value=f"{summary.overlap:.0%}", remark="of the time two stages or more worked"))
    if summary.staleness.mean is not None and summary.staleness.max is not None:
        tiles.append(
            Tile(
                label="staleness at training",
                value=f"{summary.staleness.mean:.2f}",
                remark=f"mean; at most {summary.staleness.max:.0f} steps",
            )
        )
    if summary.logprob_gap_on_policy is not None:
        tiles.append(
            Tile(
                label="logprob gap on policy",
                value=f"{summary.logprob_gap_on_policy:.2g}",
                remark="nats, rollout engine against learner",
            )
        )
    if summary.cache is not None:
        hits, misses = summary.cache.hits, summary.cache.misses
        remark = f"of {hits + misses:,} answers; {misses:,} by the teacher"
        tiles.append(Tile(label="scores from the cache", value=f"{summary.cache.hit_share:.0%}", remark=remark))
    return tiles


def _step_tile(learner: LearnerFigures) -> Tile:
    parts = [f"{name} {seconds:.2g}" for name, seconds in learner.seconds.items() if name != "step"]
    if learner.mfu is not None:
        parts.append(f"{learner.mfu:.0%} of the hardware's peak")
    return Tile(label="optimizer step", value=f"{learner.seconds['step']:.2g} s", remark=", ".join(parts))


def _comparison(summary: RunSummary) -> list[tuple[str, str, str, str]]:
    """Rows of the before-and-after table: what, before, after, change."""
    held_out = summary.held_out
    if held_out is None:
        return []
    rows = []
    for label, pair, digits in (
        ("Reverse KL to the teacher, nats per token", held_out.reverse_kl, 3),
        ("Forward KL to the teacher, nats per token", held_out.forward_kl, 3),
        ("Answer length, tokens", held_out.mean_length, 1),
    ):
        rows.append((label, _estimate(pair.before, digits), _estimate(pair.after, digits), _change(pair)))
    share = held_out.eos_share
    before, after = (_share(figure) for figure in (share.before, share.after))
    rows.append(("Answers that end with EOS", before, after, _points(share)))
    return rows


def _sections(files: RunFiles) -> list[Section]:
    rows, spans, windows, bound = files.rows, files.trace.spans, files.windows, files.facts.max_staleness
    drawn = [
        (
            "Distance to the teacher",
            "Estimated on the training batches, and measured on fresh answers to held-out prompts with 95% intervals.",
            [kl_figure(rows, windows), loss_figure(rows, windows)],
        ),
        (
            "Who worked when",
            "Every bar is one batch decoded or scored, or one optimizer step. Bars above each other ran at once.",
            _timelines(spans, windows),
        ),
        (
            "How busy the stages were",
            "Share of wall time in which a stage worked; waiting is not work. Mean over the processes of a stage.",
            [busy_figure(spans, windows, files.activity)],
        ),
        (
            "Staleness",
            "Optimizer steps that the trained samples aged: in flight, from first token to last; then in the queue; "
            f"and in all. The line is the bound, {bound}.",
            [staleness_figure(rows, bound)],
        ),
        (
            "Queue depth",
            "Samples in each live state of the ledger after every step. Full colour: in work. Pale: waiting.",
            [depth_figure(rows, windows)],
        ),
    ]
    sections = []
    for heading, text, figures in drawn:
        present = [figure for figure in figures if figure is not None]
        if present:
            sections.append(Section(heading=heading, text=text, figures=present))
    return sections


def _timelines(spans: Sequence[Span], windows: Sequence[Interval]) -> list[str | None]:
    if not windows:
        return []
    start = windows[0][0]
    end = min(start + _FIRST_S * 10**9, windows[0][1])
    title = f"the first {(end - start) / 1e9:.0f} of the run"
    figures = [timeline_figure(spans, (start, end), name="start", title=title, labels=False)]
    steady = steady_window(spans, windows)
    if steady is not None:
        at = duration(flowed_s(steady[0], windows))
        title = f"a few steps {at} into the run"
        figures.append(timeline_figure(spans, steady, name="steady", title=title, labels=True))
    return figures


def _answers(evaluations: Sequence[Evaluation]) -> list[Answers]:
    if len(evaluations) < 2:
        return []
    later = dict(evaluations[-1].samples)
    return [
        Answers(prompt=prompt, before=answer, after=later[prompt])
        for prompt, answer in evaluations[0].samples
        if prompt in later
    ]


def _config(run_dir: Path) -> str | None:
    path = run_dir / CONFIG_FILE
    return path.read_text() if path.exists() else None


def _estimate(figure: EstimateFigure | None, digits: int) -> str:
    if figure is None or figure.mean is None:
        return _UNKNOWN
    known = figure.ci95 is not None and math.isfinite(figure.ci95)
    interval = f" ± {figure.ci95:.{digits}f}" if known else ""
    return f"{figure.mean:.{digits}f}{interval}"


def _share(figure: EstimateFigure | None) -> str:
    return _UNKNOWN if figure is None or figure.mean is None else f"{figure.mean:.0%}"


def _points(pair: BeforeAfter) -> str:
    if pair.after is None or pair.after.mean is None or pair.before.mean is None:
        return _UNKNOWN
    return f"{(pair.after.mean - pair.before.mean) * 100:+.0f} points".replace("-", MINUS)


def _change(pair: BeforeAfter) -> str:
    if pair.after is None or pair.after.mean is None or not pair.before.mean:
        return _UNKNOWN
    return f"{(pair.after.mean - pair.before.mean) / pair.before.mean:+.0%}".replace("-", MINUS)


def _headline(pair: BeforeAfter) -> str:
    return _change(pair) if pair.after is not None else _estimate(pair.before, 2)


def _arrow(pair: BeforeAfter) -> str:
    if pair.after is None:
        return "nats per token, before"
    return f"{_estimate(pair.before, 2)} → {_estimate(pair.after, 2)}"


def _in_words(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
