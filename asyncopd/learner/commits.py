"""Publishing and committing a step while the learner is already at the next one.

step v+1 ──copy──> [ write weights v+1 ──> one transaction: batch trained, policy_version v+1 ──> workers wake ]
            └────> step v+2, whose own commit waits for the bracket
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from asyncopd.publish import WeightPublisher, Weights, snapshot
from asyncopd.publish.probe import Probe
from asyncopd.queue.doorbell import ring
from asyncopd.queue.ledger import Batch, Ledger
from asyncopd.tracking.trace import Tracer


class Commits:
    """Commits the steps of a run, one at a time and in order.

    wakes       doorbells to ring after each commit
    behind      commit in a thread of its own; otherwise before ``start`` returns
    tidy        called with each committed version, in the thread that commits

    A commit that failed raises its error from the next ``start``, ``settle`` or ``check``.
    """

    def __init__(
        self,
        ledger_path: Path,
        publisher: WeightPublisher,
        wakes: Sequence[str],
        tracer: Tracer,
        *,
        behind: bool,
        tidy: Callable[[int], None] | None = None,
    ) -> None:
        self._ledger_path = ledger_path
        self._publisher = publisher
        self._wakes = wakes
        self._tracer = tracer
        self._tidy = tidy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit") if behind else None
        self._pending: Future[None] | None = None
        self._batch: Batch | None = None

    @property
    def pending(self) -> Batch | None:
        """The batch that is trained and not committed yet."""
        return self._batch if self._pending is not None and not self._pending.done() else None

    def check(self) -> None:
        """Raise what a commit that is over has failed with; never waits."""
        if self._pending is not None and self._pending.done():
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is pending."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait until nothing is written to the run folder any more, whatever became of what is pending."""
        if self._thread is not None:
            self._thread.shutdown()

    def start(self, batch: Batch, version: int, weights: Weights, probe: Probe | None = None) -> None:
        """Commit ``batch`` and ``version``; ``weights`` may change once this returns, and the ranks have taken part."""
        self.settle()
        if self._thread is None:
            self._commit(batch, version, weights, probe)
            return
        copy = snapshot(weights, self._publisher.dtype)
        self._batch = batch
        self._pending = self._thread.submit(self._commit, batch, version, copy, probe)

    def _commit(self, batch: Batch, version: int, weights: Weights, probe: Probe | None) -> None:
        """Weights durable first, then one transaction for batch and version."""
        with self._tracer.span("commit", version=version):
            self._publisher.publish(version, weights, probe)
            # A view of the ledger belongs to one thread.
            with Ledger.open(self._ledger_path) as ledger:
                # A batch that was trained ahead of its lease is leased now; the commit makes sure that it is this one.
                ledger.lease_batch()
                ledger.commit_step(batch, version, published=True)
        if self._tidy is not None:
            self._tidy(version)
        for name in self._wakes:
            ring(self._ledger_path.parent, name)
