"""The trace of a run as Perfetto and chrome://tracing open it."""

import json
import logging
from pathlib import Path
from typing import Any

from asyncopd.tracking.jsonl import spell_not_finite
from asyncopd.tracking.trace import Trace, read_trace, stage_of

CHROME_TRACE = "trace.json"
LOG = logging.getLogger(__name__)
MOST_SPANS = 500_000
"""More no viewer opens."""
_ORDER = {"rollout": 0, "teacher": 1, "learner": 2}


def write_chrome_trace(run_dir: Path) -> Path:
    """Write `trace.json` in the Trace Event Format ("JSON Object Format", complete events in microseconds).

    One process row per process of the run, in the order of the data path, one thread row per thread that traced. Of a
    long run only the newest ``MOST_SPANS`` are written.
    """
    trace = read_trace(run_dir)
    if len(trace.spans) > MOST_SPANS:
        LOG.warning("%s holds the last %d of %d spans", CHROME_TRACE, MOST_SPANS, len(trace.spans))
        trace.spans = sorted(trace.spans, key=lambda span: span.start_ns)[-MOST_SPANS:]
        trace.instants = [mark for mark in trace.instants if mark.time_ns >= trace.spans[0].start_ns]
    names = {span.process for span in trace.spans} | {mark.process for mark in trace.instants} | set(trace.processes)
    rows = _Rows(sorted(names, key=lambda name: (_ORDER.get(stage_of(name), len(_ORDER)), name)))
    times = [span.start_ns for span in trace.spans] + [mark.time_ns for mark in trace.instants]
    origin = min(times, default=0)
    events = _events(trace, rows, origin)
    document = {"displayTimeUnit": "ms", "otherData": {"origin_unix_ns": str(origin)}}
    path = Path(run_dir) / CHROME_TRACE
    path.write_text(json.dumps({"traceEvents": rows.metadata() + events, **document}))
    return path


def _events(trace: Trace, rows: "_Rows", origin: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for span in sorted(trace.spans, key=lambda span: span.start_ns):
        event = {"name": span.name, "cat": span.stage, "ph": "X", **rows.place(span.process, span.thread)}
        timing = {"ts": (span.start_ns - origin) / 1e3, "dur": (span.end_ns - span.start_ns) / 1e3}
        events.append({**event, **timing, "args": spell_not_finite(span.numbers)})
    for mark in trace.instants:
        event = {"name": mark.name, "cat": stage_of(mark.process), "ph": "i", "s": "p"}
        event |= rows.place(mark.process, mark.thread)
        events.append({**event, "ts": (mark.time_ns - origin) / 1e3, "args": spell_not_finite(mark.numbers)})
    return events


class _Rows:
    """Numbers of the rows in the trace viewer, and the metadata events that name them."""

    def __init__(self, processes: list[str]) -> None:
        self._pids = {process: number for number, process in enumerate(processes, start=1)}
        self._tids: dict[tuple[str, str], int] = {}

    def place(self, process: str, thread: str) -> dict[str, int]:
        tid = self._tids.setdefault((process, thread), len(self._tids) + 1)
        return {"pid": self._pids[process], "tid": tid}

    def metadata(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for process, pid in self._pids.items():
            row: dict[str, Any] = {"ph": "M", "pid": pid, "tid": 0}
            events.append({**row, "name": "process_name", "args": {"name": process}})
            events.append({**row, "name": "process_sort_index", "args": {"sort_index": pid}})
        for (process, thread), tid in self._tids.items():
            row = {"ph": "M", "pid": self._pids[process], "tid": tid}
            events.append({**row, "name": "thread_name", "args": {"name": thread}})
        return events
