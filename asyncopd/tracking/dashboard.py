"""A run on a terminal: progress, stages, queue, staleness and losses from one snapshot."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncopd.tracking import keys
from asyncopd.tracking.snapshot import RECENT_S, ProcessStatus, RunSnapshot
from asyncopd.tracking.theme import ALARM_COLOUR, IDLE_COLOUR, STAGE_COLOURS, STATE_COLOURS

_STATE_STYLE = {
    "starting": "yellow",
    "running": "green",
    "finished": "green",
    "stopped": "yellow",
    "dead": ALARM_COLOUR,
}
_SPARKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 14
_LABEL_CELLS = 14
_LOSSES = 200
"""Steps that the loss curve on the terminal goes back."""


def render(snapshot: RunSnapshot) -> RenderableType:
    """The whole view, about 20 lines; as wide as the console it is printed on."""
    facts = snapshot.facts
    title = Text.assemble(
        (facts.name, "bold default"), (f"  {facts.mode}  ", "default"), (snapshot.state, _STATE_STYLE[snapshot.state])
    )
    body = Group(_progress(snapshot), Text(), _stages(snapshot), Text(), _queue(snapshot), Text(), _learning(snapshot))
    return Panel(body, title=title, title_align="left", border_style="grey42", padding=(0, 1))


def status(run_dir: Path, console: Console) -> None:
    """Print the state of a running or finished run; raises AsyncOPDError when the folder is not a run's."""
    console.print(render(RunSnapshot.read(run_dir)))


def plain_line(snapshot: RunSnapshot) -> str:
    """The state in one line of plain text, for logs."""
    facts, rates = snapshot.facts, snapshot.activity.tokens_per_s
    parts = [f"step {snapshot.policy_version}/{facts.steps}", duration(snapshot.elapsed_s)]
    if snapshot.left_s is not None:
        parts[-1] += f" (about {duration(snapshot.left_s)} left)"
    if snapshot.losses:
        parts.append(f"loss {snapshot.losses[-1]:.3f}")
    if snapshot.divergence is not None:
        parts.append(f"divergence {snapshot.divergence:.3f}")
    if snapshot.held_out:
        point = snapshot.held_out[-1]
        parts.append(f"held-out KL {point.mean:.3f} at {point.policy_version}")
    if snapshot.staleness_mean is not None:
        parts.append(f"staleness {snapshot.staleness_mean:.1f}")
    busy = snapshot.activity.busy
    parts.append("tokens/s (busy) " + ", ".join(f"{stage} {rates[stage]:.0f} ({busy[stage]:.0%})" for stage in rates))
    if snapshot.queue is not None:
        held = ", ".join(f"{count} {state.lower()}" for state, count in snapshot.queue.live.items() if count)
        parts.append("queue: " + (held or "empty"))
    return "  |  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as people write them: "42 s", "3:07", "1:02:09"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _progress(snapshot: RunSnapshot) -> RenderableType:
    steps = snapshot.facts.steps
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    left = f"   about {duration(snapshot.left_s)} left" if snapshot.left_s is not None else ""
    grid.add_row(
        Text.assemble("step ", (f"{snapshot.policy_version}", "bold"), f"/{steps}"),
        ProgressBar(total=max(steps, 1), completed=snapshot.policy_version, complete_style=STAGE_COLOURS["learner"]),
        f"{duration(snapshot.elapsed_s)}{left}",
    )
    return grid


def _stages(snapshot: RunSnapshot) -> RenderableType:
    live = snapshot.state in ("starting", "running")
    extent = f"{RECENT_S:.0f} s" if live else "whole run"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("stage")
    table.add_column("tokens/s", justify="right")
    table.add_column(f"busy, {extent}", min_width=_BAR_CELLS + 6)
    table.add_column("processes" if live else "")
    for stage in keys.STAGES:
        busy = snapshot.activity.busy[stage]
        members = [process for process in snapshot.processes if process.stage == stage]
        table.add_row(
            Text(stage, style=STAGE_COLOURS[stage]),
            f"{snapshot.activity.tokens_per_s[stage]:,.0f}",
            _bar(busy, STAGE_COLOURS[stage]),
            Text("\n").join(_process(process) for process in members) if live or snapshot.state == "dead" else "",
        )
    note = Text(f"at least two stages at work: {snapshot.activity.overlap:.0%} of the time", style="dim")
    return Group(table, note)


def _process(process: ProcessStatus) -> Text:
    if process.ended:
        return Text(f"{process.name} ended", style="dim")
    if not process.alive:
        return Text(f"{process.name} is gone (pid {process.pid})", style=f"bold {ALARM_COLOUR}")
    doing = f"{process.doing} {duration(process.since_s)}" if process.doing is not None else "idle"
    return Text.assemble((process.name + " ", "dim"), doing)


def _bar(share: float, colour: str) -> Text:
    filled = min(_BAR_CELLS, round(share * _BAR_CELLS))
    return Text.assemble(("━" * filled, colour), ("─" * (_BAR_CELLS - filled), "grey42"), f" {share:4.0%}")


def _queue(snapshot: RunSnapshot) -> RenderableType:
    queue = snapshot.queue
    if queue is None:
        return Text("queue: not open yet", style="dim")
    held = Text("  ").join(
        Text.assemble((f"{queue.live.get(state, 0)}\N{NO-BREAK SPACE}", "bold"), (state.lower(), STATE_COLOURS[state]))
        for state in keys.LIVE_STATES
    )
    final = Text.assemble((f"{queue.trained} ", "bold"), "trained")
    if queue.dropped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(queue.dropped.items()))
        final.append(f"   dropped: {reasons}", style=ALARM_COLOUR)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=_LABEL_CELLS)
    grid.add_column()
    grid.add_row("queue", _queue_bar(queue.live))
    grid.add_row("", held)
    grid.add_row("", final)
    return grid


def _queue_bar(live: Mapping[str, int], cells: int = 56) -> Text:
    """The live samples as one bar, a colour for each state; every state that has a sample gets at least one cell."""
    total = sum(live.values())
    bar = Text()
    for state in keys.LIVE_STATES:
        count = live.get(state, 0)
        if count:
            bar.append("━" * max(1, round(count / total * cells)), style=STATE_COLOURS[state])
    return bar if total else Text("empty", style="dim")


def _learning(snapshot: RunSnapshot) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=_LABEL_CELLS)
    grid.add_column()
    grid.add_row("policy version", f"{snapshot.policy_version}")
    grid.add_row("staleness", _staleness(snapshot))
    if snapshot.losses:
        grid.add_row(
            "loss", Text.assemble(f"{snapshot.losses[-1]:.4f}  ", (sparkline(snapshot.losses[-_LOSSES:]), IDLE_COLOUR))
        )
    if snapshot.divergence is not None:
        grid.add_row("divergence", f"{snapshot.divergence:.4f} nats per token, on the last batch")
    if snapshot.held_out:
        first, newest = snapshot.held_out[0], snapshot.held_out[-1]
        interval = f" ± {newest.ci95:.3f}" if math.isfinite(newest.ci95) else ""
        text = f"{newest.mean:.3f}{interval} at version {newest.policy_version}"
        before = f"   {first.mean:.3f} at version {first.policy_version}" if len(snapshot.held_out) > 1 else ""
        grid.add_row("held-out KL", Text.assemble((text, "bold"), (before, "dim")))
    return grid


def _staleness(snapshot: RunSnapshot) -> str:
    bound = f"bound {snapshot.facts.max_staleness}"
    if snapshot.staleness_mean is None or snapshot.staleness_max is None:
        return f"no step yet ({bound})"
    return f"{snapshot.staleness_mean:.2f} mean of the last step, {snapshot.staleness_max:.0f} at most so far ({bound})"


def sparkline(values: Sequence[float], cells: int = 40) -> str:
    """The values, averaged into at most `cells` characters, as block characters between their least and greatest."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    cells = min(cells, len(finite))
    edges = [round(index * len(finite) / cells) for index in range(cells + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)
