"""The state of a running or finished run, read from its files alone."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from asyncopd.tracking import keys
from asyncopd.tracking.activity import StageActivity, length, measure, run_windows
from asyncopd.tracking.liveness import is_alive
from asyncopd.tracking.metrics import MetricsFollower, MetricsRow, last
from asyncopd.tracking.queue_status import QueueStatus, read_queue
from asyncopd.tracking.run_facts import RunFacts
from asyncopd.tracking.trace import Interval, ProcessRecord, Trace, TraceFollower, read_trace, stage_of

RECENT_S = 30.0
"""Length of the window over which throughput and busy fraction of a running run are taken, seconds."""

RunState = Literal["starting", "running", "finished", "stopped", "dead"]
_LIVE: tuple[RunState, ...] = ("starting", "running")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """One process of the run: whether it lives or ended on purpose, and what it is doing for how long (seconds)."""

    name: str
    pid: int
    alive: bool
    ended: bool
    doing: str | None
    since_s: float

    @property
    def stage(self) -> str:
        return stage_of(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutPoint:
    """Held-out reverse KL at one policy version, nats per token, with the half-width of its 95% interval."""

    policy_version: int
    mean: float
    ci95: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    """What the dashboard shows.

    state           starting: no step yet. stopped: ended on purpose before its last step. dead: the learner is gone
                    and did not say that it ended
    elapsed_s       wall time in which the pipeline flowed, seconds, without pauses between a stop and a resume
    left_s          expected time to the last step from the recent pace, seconds; None when unknown
    activity        over the last `RECENT_S` of a run that is starting or running, over all of any other
    queue           None while there is no ledger
    staleness_mean  of the samples in the last step, optimizer steps; None before the first
    staleness_max   the largest of all steps so far
    divergence      newest estimate on a training batch, nats per token; None where the objective gives none
    losses          the losses, oldest first
    """

    facts: RunFacts
    state: RunState
    policy_version: int
    elapsed_s: float
    left_s: float | None
    activity: StageActivity
    processes: Sequence[ProcessStatus] = ()
    queue: QueueStatus | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    divergence: float | None = None
    losses: Sequence[float] = ()
    held_out: Sequence[HeldOutPoint] = ()

    @staticmethod
    def read(run_dir: Path) -> "RunSnapshot":
        """Read a run folder once; raises AsyncOPDError when it is not one. To watch a run, keep a `RunWatcher`."""
        return RunWatcher(run_dir).snapshot()


_WATCHED = frozenset(
    {
        keys.LOSS,
        keys.DIVERGENCE,
        keys.STALENESS_MEAN,
        keys.STALENESS_MAX,
        f"{keys.HELD_OUT_REVERSE_KL}/mean",
        f"{keys.HELD_OUT_REVERSE_KL}/ci95",
    }
)


class RunWatcher:
    """Takes snapshots of one run; each reads only what was written since the one before."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = Path(run_dir)
        self._facts = RunFacts.read(run_dir)
        self._metrics = MetricsFollower(run_dir, _WATCHED)
        self._trace = TraceFollower(run_dir, keep_s=2 * RECENT_S)

    def snapshot(self) -> RunSnapshot:
        """The state now."""
        now_ns = time.time_ns()
        rows = self._metrics.read()
        trace = self._trace.read()
        queue = read_queue(self._run_dir)
        version = max(queue.policy_version if queue is not None else 0, _last_version(rows))
        processes = [_status(record, trace, now_ns) for _, record in sorted(trace.processes.items())]
        state = _state(processes, version, self._facts.steps)
        windows = run_windows(trace)
        if state in _LIVE and windows:
            windows = [*windows[:-1], (windows[-1][0], now_ns)]
        worst = [row.values[keys.STALENESS_MAX] for row in rows if keys.STALENESS_MAX in row.values]
        return RunSnapshot(
            facts=self._facts,
            state=state,
            policy_version=version,
            elapsed_s=length(windows) / 1e9,
            left_s=_left_s(rows, self._facts.steps, version) if state == "running" else None,
            activity=self._activity(state, trace, windows, now_ns),
            processes=processes,
            queue=queue,
            staleness_mean=last(rows, keys.STALENESS_MEAN),
            staleness_max=max(worst, default=None),
            divergence=last(rows, keys.DIVERGENCE),
            losses=[row.values[keys.LOSS] for row in rows if keys.LOSS in row.values],
            held_out=_held_out(rows),
        )

    def _activity(self, state: RunState, trace: Trace, windows: Sequence[Interval], now_ns: int) -> StageActivity:
        if state in _LIVE:
            begin = windows[-1][0] if windows else now_ns - int(RECENT_S * 1e9)
            return _recent_activity(trace, begin, now_ns)
        whole = read_trace(self._run_dir)
        return measure(whole.spans, run_windows(whole), whole.processes)


def _status(record: ProcessRecord, trace: Trace, now_ns: int) -> ProcessStatus:
    own = [span for (process, _), span in trace.open_spans.items() if process == record.process]
    current = max(own, key=lambda span: span.start_ns, default=None)
    return ProcessStatus(
        name=record.process,
        pid=record.pid,
        alive=not record.ended and is_alive(record.pid, record.birth),
        ended=record.ended,
        doing=current.name if current is not None else None,
        since_s=(now_ns - current.start_ns) / 1e9 if current is not None else 0.0,
    )


def _state(processes: Sequence[ProcessStatus], version: int, steps: int) -> RunState:
    learner = next((process for process in processes if process.name == "learner"), None)
    if learner is not None and learner.ended:
        return "finished" if version >= steps else "stopped"
    # A worker that is gone is started again, or takes the learner with it.
    if any(process.stage == "learner" and not process.alive and not process.ended for process in processes):
        return "dead"
    return "running" if version > 0 else "starting"


def _recent_activity(trace: Trace, begin: int, now_ns: int) -> StageActivity:
    """Over the last seconds since `begin`; an open span counts up to now, its tokens only once it closes."""
    start = max(begin, now_ns - int(RECENT_S * 1e9))
    recent = [span for span in trace.spans if span.end_ns > start]
    recent += [replace(span, end_ns=now_ns) for span in trace.open_spans.values()]
    return measure(recent, [(start, now_ns)], trace.processes)


def _left_s(rows: Sequence[MetricsRow], steps: int, version: int) -> float | None:
    """From the pace of the last steps, which follows a machine that gets slower; evaluations between them count."""
    trained = [row for row in rows if keys.LOSS in row.values][-20:]
    if len(trained) < 2:
        return None
    done = trained[-1].policy_version - trained[0].policy_version
    took = trained[-1].time - trained[0].time
    return took / done * (steps - version) if done > 0 else None


def _held_out(rows: Sequence[MetricsRow]) -> list[HeldOutPoint]:
    name = f"{keys.HELD_OUT_REVERSE_KL}/mean"
    return [
        HeldOutPoint(
            policy_version=row.policy_version,
            mean=row.values[name],
            ci95=row.values.get(f"{keys.HELD_OUT_REVERSE_KL}/ci95", 0.0),
        )
        for row in rows
        if name in row.values
    ]


def _last_version(rows: Sequence[MetricsRow]) -> int:
    return rows[-1].policy_version if rows else 0
