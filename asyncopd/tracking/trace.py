"""Spans of work by process, on one wall clock.

Each process appends to `trace/<process>.jsonl`. Times are `time.time_ns`, so that the processes of one machine line up;
durations come from the monotonic clock, so that a clock correction cannot make a span negative. A span is announced
when it opens and written when it closes: a SIGKILL costs the open span its numbers, and readers still see what the
process was doing.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from asyncopd.tracking.jsonl import JsonLinesFollower, JsonLinesWriter
from asyncopd.tracking.liveness import process_birth

TRACE_FOLDER = "trace"
LEARNER = "learner"
"""The process that says when the pipeline flows."""
WAIT = "wait"
RUN = "run"
RUN_END = "run_end"
RESTART = "restart"
"""First word of an instant of the learner: a worker, named after it, is started again."""

Interval = tuple[int, int]
"""Start and end in nanoseconds since the epoch; the end is not part of it."""
_STAGE_OF_PREFIX = {"rollout": "rollout", "scorer": "teacher", "learner": "learner"}


def stage_of(process: str) -> str:
    """Stage of a process: "rollout-0" is rollout, "scorer-0" is teacher, "learner-1" is learner, others themselves."""
    prefix = process.partition("-")[0]
    return _STAGE_OF_PREFIX.get(prefix, prefix)


_SPANS_AT_ONCE = 10_000
"""Spans that a follower reads before it looks which it may forget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A closed stretch of time in one thread of one process; times in nanoseconds since the epoch.

    cpu_ns   CPU time that the process had taken when the span ended, all its threads, nanoseconds; None in a trace
             that does not say
    """

    process: str
    thread: str
    name: str
    start_ns: int
    end_ns: int
    numbers: dict[str, float] = field(default_factory=dict)
    cpu_ns: int | None = None

    @property
    def stage(self) -> str:
        return stage_of(self.process)

    @property
    def is_wait(self) -> bool:
        """A "wait" span is idle time, in whatever process."""
        return self.name == WAIT


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """A point in time, such as "run" (the pipeline starts to flow) in the learner."""

    process: str
    thread: str
    name: str
    time_ns: int
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRecord:
    """The newest incarnation of a process that traces: its pid, and whether it said that it had ended."""

    process: str
    pid: int
    birth: float | None
    ended: bool


class OpenSpan:
    """Handle of a span in progress; numbers that are only known at its end are added here."""

    def __init__(self, numbers: dict[str, float]) -> None:
        self.numbers = numbers

    def add(self, **numbers: float) -> None:
        """Add to the span's numbers: a name given twice is summed."""
        for name, value in numbers.items():
            self.numbers[name] = self.numbers.get(name, 0) + value


class Tracer:
    """Writes the spans of one process. `process` is "learner", "learner-1", "rollout-0", "scorer-0" and so on."""

    def __init__(self, run_dir: Path, process: str) -> None:
        self.process = process
        self._writer = JsonLinesWriter(Path(run_dir) / TRACE_FOLDER / f"{process}.jsonl")
        self._lock = threading.Lock()
        self._spans = 0
        pid = os.getpid()
        self._writer.append({"kind": "process", "time_ns": time.time_ns(), "pid": pid, "birth": process_birth(pid)})

    @contextmanager
    def span(self, name: str, **numbers: float) -> Iterator[OpenSpan]:
        """Record the block as a span, also when it raises. Numbers known later: `span.add(tokens=...)`."""
        with self._lock:
            self._spans += 1
            serial = self._spans
        thread = threading.current_thread().name
        start_ns, began = time.time_ns(), time.perf_counter_ns()
        self._writer.append({"kind": "open", "serial": serial, "name": name, "thread": thread, "start_ns": start_ns})
        handle = OpenSpan(dict(numbers))
        try:
            yield handle
        finally:
            end_ns = start_ns + time.perf_counter_ns() - began
            record = {"kind": "span", "serial": serial, "name": name, "thread": thread, "start_ns": start_ns}
            closed = {"end_ns": end_ns, "cpu_ns": time.process_time_ns(), "numbers": handle.numbers}
            self._writer.append(record | closed)

    def instant(self, name: str, **numbers: float) -> None:
        """Record a point in time."""
        thread = threading.current_thread().name
        record = {"kind": "instant", "name": name, "thread": thread, "time_ns": time.time_ns(), "numbers": numbers}
        self._writer.append(record)

    def close(self) -> None:
        """State that the process ends on purpose, and release the file."""
        self._writer.append({"kind": "end", "time_ns": time.time_ns()})
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; after an error without stating that the process ends on purpose, so that it reads as gone."""
        if error is None:
            self.close()
        else:
            self._writer.close()


@dataclass(kw_only=True, slots=True)
class Trace:
    """What the processes of a run have written so far.

    open_spans   the spans in progress, ending where they start
    processes    the newest incarnation of each process
    flow         the stretches of time in which the pipeline flowed, one for each start or resume: from a "run" instant
                 of the learner to its "run_end", or to the last thing that it traced before the next "run"; so the
                 time between a kill and the resume is left out
    """

    spans: list[Span] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    open_spans: dict[tuple[str, int], Span] = field(default_factory=dict)
    processes: dict[str, ProcessRecord] = field(default_factory=dict)
    flow: list[Interval] = field(default_factory=list)
    _flowing: bool = False

    def take(self, process: str, record: dict[str, Any]) -> None:
        """Add one record of a process's file; a record of an unknown kind is ignored."""
        match record.get("kind"):
            case "process":
                self._forget_open(process)
                self.processes[process] = ProcessRecord(
                    process=process, pid=record["pid"], birth=record["birth"], ended=False
                )
            case "open":
                span = _span(process, {**record, "end_ns": record["start_ns"], "numbers": {}})
                self.open_spans[process, record["serial"]] = span
            case "span":
                self.open_spans.pop((process, record["serial"]), None)
                self.spans.append(_span(process, record))
                self._follow_flow(process, record["name"], record["end_ns"])
            case "instant":
                self.instants.append(_instant(process, record))
                self._follow_flow(process, record["name"], record["time_ns"])
            case "end":
                self._forget_open(process)
                self.processes[process] = replace(self.processes[process], ended=True)

    def _follow_flow(self, process: str, name: str, time_ns: int) -> None:
        if process != LEARNER:
            return
        if name == RUN:
            self.flow.append((time_ns, time_ns))
            self._flowing = True
        elif self._flowing:
            start, end = self.flow[-1]
            self.flow[-1] = (start, max(end, time_ns))
            self._flowing = name != RUN_END

    def _forget_open(self, process: str) -> None:
        for key in [key for key in self.open_spans if key[0] == process]:
            del self.open_spans[key]


class TraceFollower:
    """Reads the trace of a running run bit by bit; `trace` grows with every `read`.

    keep_s   forget closed spans that ended longer ago, seconds, so that watching a long run takes no memory; None keeps
             all
    """

    def __init__(self, run_dir: Path, keep_s: float | None = None) -> None:
        self._folder = Path(run_dir) / TRACE_FOLDER
        self._files: dict[str, JsonLinesFollower] = {}
        self._keep_s = keep_s
        self._forget_at = _SPANS_AT_ONCE
        self.trace = Trace()

    def read(self) -> Trace:
        for path in sorted(self._folder.glob("*.jsonl")):
            follower = self._files.setdefault(path.stem, JsonLinesFollower(path))
            for record in follower.follow():
                self.trace.take(path.stem, record)
                if len(self.trace.spans) >= self._forget_at:
                    self._forget()
        self._forget()
        return self.trace

    def _forget(self) -> None:
        if self._keep_s is not None:
            horizon = time.time_ns() - int(self._keep_s * 1e9)
            self.trace.spans = [span for span in self.trace.spans if span.end_ns >= horizon]
        self._forget_at = 2 * len(self.trace.spans) + _SPANS_AT_ONCE


def read_trace(run_dir: Path) -> Trace:
    """Everything that the processes of a run have traced; empty when there is no trace."""
    return TraceFollower(run_dir).read()


def _span(process: str, record: dict[str, Any]) -> Span:
    return Span(
        process=process,
        thread=record["thread"],
        name=record["name"],
        start_ns=record["start_ns"],
        end_ns=record["end_ns"],
        numbers=record["numbers"],
        cpu_ns=record.get("cpu_ns"),
    )


def _instant(process: str, record: dict[str, Any]) -> Instant:
    return Instant(
        process=process,
        thread=record["thread"],
        name=record["name"],
        time_ns=record["time_ns"],
        numbers=record["numbers"],
    )
