"""The figures of a run in one file, `summary.json`, derived from its metrics, trace and ledger."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from asyncopd.tracking import keys
from asyncopd.tracking.metrics import Evaluation, MetricsRow, series, under
from asyncopd.tracking.queue_status import QueueStatus
from asyncopd.tracking.run_files import RunFiles
from asyncopd.tracking.trace import RESTART, Span

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateFigure:
    """A mean and the half-width of its 95% interval."""

    mean: float | None
    ci95: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAfter:
    """An estimate at the first evaluation and at the last one, which is None while there has been only one."""

    before: EstimateFigure
    after: EstimateFigure | None


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutFigures:
    """Held-out prompts: KL in nats per token, length in tokens; EOS share 0 to 1 (its interval is not estimated)."""

    reverse_kl: BeforeAfter
    forward_kl: BeforeAfter
    mean_length: BeforeAfter
    eos_share: BeforeAfter


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFigures:
    """One number for each stage."""

    rollout: float
    teacher: float
    learner: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessFigures:
    """Age of the trained samples in optimizer steps, over all steps; None without a step."""

    mean: float | None
    max: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFigures:
    """Samples that entered the queue, were trained, and were dropped by reason."""

    admitted: int
    trained: int
    dropped: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerFigures:
    """The learner's steps; what is not known is None.

    seconds      median seconds: step, wait, read, forward, backward, optimizer, publish, as in `tracking.keys`
    mfu          median model FLOPs utilisation, 0 to 1
    memory_gb    most memory, 1e9 bytes
    """

    seconds: Mapping[str, float]
    mfu: float | None
    memory_gb: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFigures:
    """The score cache over all of the run, lost timelines included.

    hits, misses             answers whose score the cache had, and those that the teacher was asked for
    hit_share                hits over both, 0 to 1
    read_bytes, kept_bytes   of the scores found, and of those that were handed to the cache
    """

    hits: int
    misses: int
    hit_share: float
    read_bytes: int
    kept_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The figures of a run; what is not known is None.

    steps                    optimizer steps done, the policy version reached
    wall_s                   seconds in which the pipeline flowed, without pauses between a stop and a resume
    tokens_per_s             response tokens rolled out, scored and trained per second of that time
    busy                     share of that time in which each stage worked (mean over its processes)
    overlap                  share of that time in which at least two stages worked
    cpu_s                    CPU seconds that the processes of each stage took in that time
    logprob_gap_on_policy    mean |log p - log b| over tokens trained at staleness 0, nats; None when there were none
    restarts                 how often a worker that died or hung was started again
    cache                    what the score cache did; None where it was not used
    """

    name: str
    mode: str
    steps: int
    wall_s: float
    held_out: HeldOutFigures | None
    tokens_per_s: StageFigures
    busy: StageFigures
    overlap: float
    cpu_s: StageFigures
    staleness: StalenessFigures
    samples: SampleFigures | None
    logprob_gap_on_policy: float | None
    learner: LearnerFigures
    restarts: int = 0
    cache: CacheFigures | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain nested data, as in the file."""
        return _without_nan(asdict(self))


def summarize(files: RunFiles) -> RunSummary:
    """Work the figures out from the files of a run."""
    rows, activity, queue = files.rows, files.activity, files.queue
    gaps = [(value, row.values.get(keys.ON_POLICY_TOKENS, 1.0)) for row, value in series(rows, keys.LOGPROB_GAP)]
    reached = max((row.policy_version for row in rows), default=0)
    return RunSummary(
        name=files.facts.name,
        mode=files.facts.mode,
        steps=max(reached, queue.policy_version) if queue is not None else reached,
        wall_s=activity.wall_s,
        held_out=_held_out(files.evaluations),
        tokens_per_s=StageFigures(**activity.tokens_per_s),
        busy=StageFigures(**activity.busy),
        overlap=activity.overlap,
        cpu_s=StageFigures(**activity.cpu_s),
        staleness=_staleness(rows),
        samples=_samples(queue),
        logprob_gap_on_policy=_weighted_mean([(gap, weight) for gap, weight in gaps if math.isfinite(gap)]),
        learner=_learner(rows),
        restarts=sum(instant.name.startswith(f"{RESTART} ") for instant in files.trace.instants),
        cache=_cache(files.trace.spans),
    )


def write_summary(run_dir: Path) -> RunSummary:
    """Work the figures out and write `summary.json`; raises AsyncOPDError when the folder is not a run's."""
    summary = summarize(RunFiles.read(run_dir))
    path = Path(run_dir) / SUMMARY_FILE
    path.write_text(json.dumps(summary.as_dict(), indent=2, allow_nan=False) + "\n")
    return summary


def _held_out(evaluations: Sequence[Evaluation]) -> HeldOutFigures | None:
    if not evaluations:
        return None
    first = _estimates(evaluations[0])
    newest = _estimates(evaluations[-1]) if len(evaluations) > 1 else None

    def both(figure: str) -> BeforeAfter:
        return BeforeAfter(before=first[figure], after=newest[figure] if newest is not None else None)

    return HeldOutFigures(
        reverse_kl=both("reverse_kl"),
        forward_kl=both("forward_kl"),
        mean_length=both("mean_length"),
        eos_share=both("eos_share"),
    )


def _estimates(evaluation: Evaluation) -> dict[str, EstimateFigure]:
    return {
        "reverse_kl": EstimateFigure(mean=evaluation.reverse_kl.mean, ci95=evaluation.reverse_kl.ci95),
        "forward_kl": EstimateFigure(mean=evaluation.forward_kl.mean, ci95=evaluation.forward_kl.ci95),
        "mean_length": EstimateFigure(mean=evaluation.mean_length.mean, ci95=evaluation.mean_length.ci95),
        "eos_share": EstimateFigure(mean=evaluation.eos_share, ci95=None),
    }


def _staleness(rows: Sequence[MetricsRow]) -> StalenessFigures:
    """Over samples where the rows count them by age, else over steps."""
    counts = [(float(age), count) for row in rows for age, count in under(row.values, "staleness/training").items()]
    means = counts or [(value, 1.0) for _, value in series(rows, keys.STALENESS_MEAN)]
    worst = [value for _, value in series(rows, keys.STALENESS_MAX)] + [age for age, count in counts if count > 0]
    return StalenessFigures(mean=_weighted_mean(means), max=max(worst, default=None))


def _learner(rows: Sequence[MetricsRow]) -> LearnerFigures:
    parts = {name: [value for _, value in series(rows, name)] for name in keys.TIMES}
    mfu = [value for _, value in series(rows, keys.MFU)]
    return LearnerFigures(
        seconds={name.removesuffix("_s"): median(values) for name, values in parts.items() if values},
        mfu=median(mfu) if mfu else None,
        memory_gb=max((value for _, value in series(rows, keys.MEMORY_GB)), default=None),
    )


def _cache(spans: Sequence[Span]) -> CacheFigures | None:
    sums = {
        name: sum(int(under(span.numbers, keys.CACHE).get(name, 0)) for span in spans) for name in keys.CACHE_COUNTS
    }
    asked = sums["hits"] + sums["misses"]
    return CacheFigures(hit_share=sums["hits"] / asked, **sums) if asked else None


def _samples(queue: QueueStatus | None) -> SampleFigures | None:
    if queue is None:
        return None
    return SampleFigures(admitted=queue.admitted, trained=queue.trained, dropped=dict(queue.dropped))


def _weighted_mean(weighted: Sequence[tuple[float, float]]) -> float | None:
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total > 0 else None


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return value
