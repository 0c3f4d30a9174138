"""The payloads of the batch that follows, read while the current one is trained.

Measured: 12 answers of 48 tokens take 2 ms to read, of a step of seconds; 64 answers of 1,024 tokens 42 ms.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from asyncopd.learner.batching import balanced_shares, unscored
from asyncopd.queue.ledger import Batch, BatchSample, Ledger
from asyncopd.queue.payloads import read_record, read_rollout
from asyncopd.run_folder import RunFolder
from asyncopd.types import ScoredRollout

MOST_BYTES = 2**30
"""A larger batch (whole distributions) is read when its turn comes: two of them may not fit into memory."""


class ReadAhead:
    """One rank's samples, batch by batch, from wherever they are by then.

    What was read ahead and is not asked for is forgotten. Nothing is leased, so a kill loses nothing.
    """

    def __init__(self, run_dir: Path, rank: int, ranks: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._ranks = ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._ahead: Future[dict[BatchSample, ScoredRollout]] | None = None

    def samples(self, batch: Batch) -> list[ScoredRollout]:
        """This rank's samples of ``batch``; the batch that follows is read from here on."""
        ahead = {} if self._ahead is None else self._ahead.result()
        mine = self._share(batch)
        late = [sample for sample in mine if sample not in ahead]
        ahead |= dict(zip(late, read_samples(self._run_dir, late), strict=True))
        self._ahead = self._thread.submit(self._read_following, batch)
        if not mine:
            # Dropped samples may leave fewer than there are ranks: this one goes along and trains no token.
            return [unscored(sample) for sample in read_samples(self._run_dir, batch.samples[:1])]
        return [ahead[sample] for sample in mine]

    def _read_following(self, batch: Batch) -> dict[BatchSample, ScoredRollout]:
        # A view of the ledger belongs to one thread.
        with Ledger.open(RunFolder(self._run_dir).ledger_path) as ledger:
            following = ledger.following_batch(batch)
        mine = [] if following is None else self._share(following)
        if sum(sample.rollout.bytes + sample.record.bytes for sample in mine) > MOST_BYTES:
            return {}
        return dict(zip(mine, read_samples(self._run_dir, mine), strict=True))

    def _share(self, batch: Batch) -> Sequence[BatchSample]:
        shares = balanced_shares([sample.tokens for sample in batch.samples], self._ranks)
        return [batch.samples[place] for place in shares[self._rank]]


def read_samples(run_dir: Path, samples: Sequence[BatchSample]) -> list[ScoredRollout]:
    """The payloads of some samples of a batch, in their order."""
    return [
        ScoredRollout(
            rollout=read_rollout(run_dir, sample.rollout, sample.uid),
            record=read_record(run_dir, sample.record, sample.uid),
        )
        for sample in samples
    ]
