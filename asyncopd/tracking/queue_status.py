"""The sample queue as the views show it, read from the ledger."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncopd.errors import LedgerError
from asyncopd.queue.ledger import Ledger
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
        live = (counts.pending, counts.rolling, counts.rolled, counts.scoring, counts.scored, counts.leased)
        return QueueStatus(
            live=dict(zip(keys.LIVE_STATES, live, strict=True)),
            trained=counts.trained,
            dropped=dict(counts.dropped_by_reason),
            admitted=counts.admitted,
            policy_version=ledger.policy_version,
        )
