"""Everything that a run has written, read once, for the summary and the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncopd.tracking.activity import StageActivity, measure, run_windows
from asyncopd.tracking.metrics import Evaluation, MetricsRow, read_evaluations, read_metrics
from asyncopd.tracking.queue_status import QueueStatus, read_queue
from asyncopd.tracking.run_facts import RunFacts
from asyncopd.tracking.trace import Interval, Trace, read_trace


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """The files of a run.

    windows    the stretches of wall time in which the pipeline flowed
    activity   of the stages over them
    queue      None where there is no ledger
    """

    facts: RunFacts
    rows: Sequence[MetricsRow]
    evaluations: Sequence[Evaluation]
    trace: Trace
    windows: Sequence[Interval]
    activity: StageActivity
    queue: QueueStatus | None

    @staticmethod
    def read(run_dir: Path) -> "RunFiles":
        """Raises AsyncOPDError when the folder is not a run's."""
        facts = RunFacts.read(run_dir)
        trace = read_trace(run_dir)
        windows = run_windows(trace)
        return RunFiles(
            facts=facts,
            rows=read_metrics(run_dir),
            evaluations=read_evaluations(run_dir),
            trace=trace,
            windows=windows,
            activity=measure(trace.spans, windows, trace.processes),
            queue=read_queue(run_dir),
        )
