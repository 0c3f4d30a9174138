"""The sample queue as the views show it: a read-only look at the ledger of a run folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStatus:
    """Samples by where they are.

    live       by live state, the names in `keys.LIVE_STATES`
    trained    samples consumed by an optimizer step
    dropped    by reason
    admitted   all samples that ever entered: trained + dropped + live
    policy_version   version of the last committed step
    """

    live: Mapping[str, int] = field(default_factory=dict)
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    admitted: int = 0
    policy_version: int = 0


class QueueFollower:
    """Reads the ledger of a run again and again; None while there is none."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = Path(run_dir)

    def read(self) -> QueueStatus | None:
        return None
