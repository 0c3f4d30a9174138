"""How busy the stages of a run were, and how much they overlapped, by an exact sweep over the spans' end points."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from asyncopd.tracking.keys import STAGES
from asyncopd.tracking.trace import Interval, Span, Trace, stage_of

THROUGHPUT_SPAN = {"rollout": "decode", "teacher": "score", "learner": "step"}
"""The span whose tokens are the stage's output; tokens of other spans (an evaluation, say) are not throughput."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageActivity:
    """Activity of the stages over a stretch of wall time.

    wall_s         length of the stretch, seconds
    busy           share of it that each stage worked, 0 to 1; the mean over its processes where it has several
    tokens_per_s   response tokens that each stage finished per second of wall time; a span that reaches over the edge
                   counts in proportion
    overlap        share of it in which at least two stages worked
    cpu_s          CPU seconds that the processes of each stage took in it, all their threads
    """

    wall_s: float
    busy: Mapping[str, float]
    tokens_per_s: Mapping[str, float]
    overlap: float
    cpu_s: Mapping[str, float]


def measure(spans: Iterable[Span], windows: Sequence[Interval], processes: Iterable[str] = ()) -> StageActivity:
    """Activity within the windows taken together. A window of no length gives zeros.

    processes   count in the mean of their stage even if they have no span; the others are those that have one
    """
    windows = union(windows)
    wall_ns = length(windows)
    spans = list(spans)
    if wall_ns == 0:
        nothing = dict.fromkeys(STAGES, 0.0)
        return StageActivity(wall_s=0.0, busy=nothing, tokens_per_s=nothing, overlap=0.0, cpu_s=nothing)
    work: dict[str, list[Interval]] = {process: [] for process in processes}
    work |= {process: intersect(intervals, windows) for process, intervals in work_by_process(spans).items()}
    busy: dict[str, float] = {}
    by_stage: list[list[Interval]] = []
    for stage in STAGES:
        members = [intervals for process, intervals in work.items() if stage_of(process) == stage]
        busy[stage] = sum(map(length, members)) / wall_ns / len(members) if members else 0.0
        by_stage.append(union(interval for member in members for interval in member))
    return StageActivity(
        wall_s=wall_ns / 1e9,
        busy=busy,
        tokens_per_s={stage: _tokens(stage, spans, windows) / (wall_ns / 1e9) for stage in STAGES},
        overlap=length(covered_at_least(2, by_stage)) / wall_ns,
        cpu_s=_cpu_s(spans, windows),
    )


def busy_along(spans: Iterable[Span], pieces: Sequence[Interval]) -> list[dict[str, float]]:
    """Busy fraction of each stage in each piece of time; work is prepared once, whatever the number of pieces."""
    work = work_by_process(spans)
    members = {stage: [found for process, found in work.items() if stage_of(process) == stage] for stage in STAGES}
    return [
        {
            stage: sum(length(_clip(intervals, piece)) for intervals in found) / length([piece]) / max(1, len(found))
            for stage, found in members.items()
        }
        for piece in pieces
    ]


def run_windows(trace: Trace) -> list[Interval]:
    """The stretches of wall time that the figures of a run are about: `Trace.flow`.

    Without any "run" instant, all of the trace.
    """
    if trace.flow:
        return trace.flow
    times = [time for span in trace.spans for time in (span.start_ns, span.end_ns)]
    return [(min(times), max(times))] if times else []


def flowed_s(time_ns: int, windows: Sequence[Interval]) -> float:
    """Seconds of the windows that lie before a point in time: wall time without the pauses between them."""
    return sum(max(0, min(end, time_ns) - start) for start, end in windows) / 1e9


def work_by_process(spans: Iterable[Span]) -> dict[str, list[Interval]]:
    """For each process the intervals in which some thread of it worked.

    A "wait" span takes its time out of the work around it, in its own thread only.
    """
    work: dict[tuple[str, str], list[Interval]] = {}
    waits: dict[tuple[str, str], list[Interval]] = {}
    for span in spans:
        kind = waits if span.is_wait else work
        kind.setdefault((span.process, span.thread), []).append((span.start_ns, span.end_ns))
        work.setdefault((span.process, span.thread), [])
    by_process: dict[str, list[Interval]] = {}
    for (process, thread), intervals in work.items():
        active = subtract(union(intervals), union(waits.get((process, thread), [])))
        by_process.setdefault(process, []).extend(active)
    return {process: union(intervals) for process, intervals in by_process.items()}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The points in both; each argument disjoint in itself."""
    return covered_at_least(2, [first, second])


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The points of the first that are not in the second; each argument disjoint in itself."""
    if not first or not second:
        return list(first)
    low = min(first[0][0], second[0][0])
    high = max(first[-1][1], second[-1][1])
    edges = [low, *(edge for interval in second for edge in interval), high]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    return intersect(first, union(gaps))


def covered_at_least(depth: int, layers: Sequence[Sequence[Interval]]) -> list[Interval]:
    """The points that lie in at least `depth` of the layers, as disjoint intervals; each layer disjoint in itself."""
    changes = sorted(
        change for layer in layers for start, end in layer if end > start for change in ((start, 1), (end, -1))
    )
    covered: list[Interval] = []
    level, since = 0, 0
    for time, change in changes:
        before, level = level, level + change
        if before < depth <= level:
            since = time
        elif level < depth <= before and time > since:
            covered.append((since, time))
    return union(covered)


def length(intervals: Iterable[Interval]) -> int:
    """Total length of disjoint intervals, nanoseconds."""
    return sum(end - start for start, end in intervals)


def _clip(intervals: Sequence[Interval], piece: Interval) -> list[Interval]:
    """The part of disjoint, ordered intervals that lies within one piece."""
    first = bisect.bisect_right(intervals, piece[0], key=lambda interval: interval[1])
    behind = bisect.bisect_left(intervals, piece[1], key=lambda interval: interval[0])
    return [(max(start, piece[0]), min(end, piece[1])) for start, end in intervals[first:behind]]


def _cpu_s(spans: Iterable[Span], windows: Sequence[Interval]) -> dict[str, float]:
    """What each process's CPU clock went on by from the end of one span to the end of the next, by stage."""
    clocks: dict[str, list[tuple[int, int]]] = {}
    for span in spans:
        if span.cpu_ns is not None:
            clocks.setdefault(span.process, []).append((span.end_ns, span.cpu_ns))
    taken = dict.fromkeys(STAGES, 0.0)
    for process, readings in clocks.items():
        for (start, before), (end, after) in pairwise(sorted(readings)):
            # A clock that goes back is that of a process started again.
            if end > start and after > before and stage_of(process) in taken:
                inside = sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in windows)
                taken[stage_of(process)] += (after - before) * inside / (end - start) / 1e9
    return taken


def _tokens(stage: str, spans: Sequence[Span], windows: Sequence[Interval]) -> float:
    total = 0.0
    for span in spans:
        tokens = span.numbers.get("tokens", 0.0)
        if span.stage != stage or span.name != THROUGHPUT_SPAN[stage] or not tokens:
            continue
        whole = span.end_ns - span.start_ns
        inside = sum(max(0, min(span.end_ns, end) - max(span.start_ns, start)) for start, end in windows)
        total += tokens * (inside / whole if whole else 1.0)
    return total
