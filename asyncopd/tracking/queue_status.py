"""The sample queue as the views and the metrics show it, read from the ledger."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncopd.errors import LedgerError
from asyncopd.queue.ledger import BatchSample, Counts, Ledger
from asyncopd.tracking import keys

LEDGER_FILE = "ledger.sqlite"


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStatus:
    """Samples by where they are; admitted == trained + dropped + live.

    live            by live state, the names in `keys.LIVE_STATES`
    trained         samples consumed by an optimizer step
    dropped         by reason
    admitted        samples that ever entered
    policy_version  optimizer steps committed
    """

    live: Mapping[str, int]
    trained: int
    dropped: Mapping[str, int]
    admitted: int
    policy_version: int


def read_queue(run_dir: Path) -> QueueStatus | None:
    """The queue of a run now; None while it has no ledger, or one that is still being made."""
    path = Path(run_dir) / LEDGER_FILE
    if not path.exists():
        return None
    try:
        ledger = Ledger.open(path)
    except LedgerError:
        return None
    with ledger:
        counts = ledger.counts()
        return QueueStatus(
            live=live_counts(counts),
            trained=counts.trained,
            dropped=dict(counts.dropped_by_reason),
            admitted=counts.admitted,
            policy_version=ledger.policy_version,
        )


def live_counts(counts: Counts) -> dict[str, int]:
    """Samples in each live state, in the order of the data path."""
    numbers = (counts.pending, counts.rolling, counts.rolled, counts.scoring, counts.scored, counts.leased)
    return dict(zip(keys.LIVE_STATES, numbers, strict=True))


def queue_values(ledger: Ledger) -> dict[str, float]:
    """Depth of the queue by state and ages of the samples in it, under their metric names; for a row of metrics."""
    values = {f"{keys.QUEUE}/{state}": float(count) for state, count in live_counts(ledger.counts()).items()}
    staleness = ledger.staleness()
    for place, ages in (("in_flight", staleness.in_flight), ("in_queue", staleness.in_queue)):
        values |= {keys.staleness_key(place, age): float(count) for age, count in ages}
    return values


def batch_values(samples: Sequence[BatchSample], version: int) -> dict[str, float]:
    """Ages of the samples of a batch under their metric names; `version` is the policy's before the step."""
    ages = Counter(version - sample.oldest_version for sample in samples)
    if not ages:
        return {}
    values = {keys.staleness_key("training", age): float(count) for age, count in sorted(ages.items())}
    mean = sum(age * count for age, count in ages.items()) / ages.total()
    return {**values, keys.STALENESS_MEAN: mean, keys.STALENESS_MAX: float(max(ages))}
