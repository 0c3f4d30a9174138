"""The learner's side of a run: wait for a batch, train on it, publish, commit, and again.

Every rank runs ``LearnerLoop``; rank 0 also holds the ``Owner``, which speaks with the ledger, the workers and the
trackers. The other ranks learn of a batch by broadcast and read their own payloads.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from asyncopd.errors import DeadlineError, LedgerError
from asyncopd.held_out import HeldOutCollector
from asyncopd.learner.checkpoint import CheckpointConfig, CheckpointStore
from asyncopd.learner.commits import Commits
from asyncopd.learner.pace import Pace
from asyncopd.learner.read_ahead import ReadAhead
from asyncopd.learner.step import Learner
from asyncopd.publish import WeightPublisher, take_part
from asyncopd.publish.probe import Probe, ProbeText
from asyncopd.publishing import Published
from asyncopd.queue.doorbell import Doorbell
from asyncopd.queue.ledger import Batch, Ledger
from asyncopd.queue.payloads import delete_payloads
from asyncopd.queue.rows import Counts
from asyncopd.stage import SLOW_POLL_S
from asyncopd.stop import StopRequest
from asyncopd.supervisor import Supervisor
from asyncopd.tracking import keys
from asyncopd.tracking.trace import Tracer
from asyncopd.tracking.trackers import RunTracking

LOG = logging.getLogger(__name__)
MOST_DROPPED = 8
"""Windows of samples that may be dropped before one batch is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """What only rank 0 holds.

    held_out    what the scoring stage finds out on held-out prompts
    lag         policy versions of a lagged mode whose weights a resume may need; 0 otherwise
    stall_s     seconds without any movement in the queue after which the run fails instead of waiting on
    """

    run_dir: Path
    ledger: Ledger
    supervisor: Supervisor
    publisher: WeightPublisher
    commits: Commits
    tracking: RunTracking
    checkpoints: CheckpointStore
    stop: StopRequest
    doorbell: Doorbell
    held_out: HeldOutCollector
    lag: int
    stall_s: float

    def next_batch(self) -> Batch | None:
        """Wait for the next batch; None when a stop was asked for. Every wait looks at the workers and at progress."""
        before = self.ledger.counts()
        counts, since = before, time.monotonic()
        while not self.stop.asked:
            self.supervisor.check()
            self.commits.check()
            self.held_out.collect()
            trained = self.commits.pending
            batch = self.ledger.lease_batch() if trained is None else self.ledger.following_batch(trained)
            if batch is not None:
                return batch
            self.doorbell.wait(SLOW_POLL_S)
            now = self.ledger.counts()
            if now != counts:
                counts, since = now, time.monotonic()
                self._require_some(before, now)
            elif time.monotonic() - since > self.stall_s:
                raise DeadlineError(
                    f"nothing moved in the sample queue for {self.stall_s:.0f} s; samples by state: {counts}. The "
                    f"stages' logs are in {self.run_dir / 'logs'}; where an answer may take that long, "
                    "resume with a longer supervision.stall_s"
                )
        return None

    def _require_some(self, before: Counts, now: Counts) -> None:
        """LedgerError where so many samples are dropped that the batch may never come."""
        plan = self.ledger.plan
        if now.dropped - before.dropped <= MOST_DROPPED * (plan.max_staleness + 1) * plan.batch_size:
            return
        reasons = {
            reason: count - before.dropped_by_reason.get(reason, 0) for reason, count in now.dropped_by_reason.items()
        }
        raise LedgerError(
            f"{now.dropped - before.dropped} samples were dropped ({reasons}) before one batch of {plan.batch_size} "
            "was there; see the details with `asyncopd ledger show` and repair the prompts or the teacher"
        )

    def tidy(self, keep: int) -> None:
        """Delete checkpoints and payloads that no resume can need any more, and in a lagged mode weights."""
        self.checkpoints.prune(keep)
        oldest = min(self.checkpoints.versions(), default=0)
        delete_payloads(self.run_dir, self.ledger.forget_payloads(oldest))
        if self.lag:
            self.publisher.keep_from(oldest - self.lag, self.held_out.files.waiting(self.publisher.versions()))

    def await_evaluations(self) -> None:
        """Wait for the figures of all published versions that are due, unless a stop is asked for."""
        while self.held_out.files.waiting(self.publisher.versions()) and not self.stop.asked:
            self.supervisor.check()
            self.doorbell.wait(SLOW_POLL_S)
        self.held_out.collect()


class LearnerLoop:
    """Trains from one policy version to the last; the same on every rank."""

    def __init__(
        self,
        learner: Learner,
        accelerator: Accelerator,
        *,
        run_dir: Path,
        steps: int,
        checkpoint: CheckpointConfig,
        tracer: Tracer,
        pace: Pace,
        owner: Owner | None,
        published: Published,
        probe_text: ProbeText,
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
        on_checkpoint: Callable[[int, Path], None] | None = None,
        evaluate: Callable[[int], None] | None = None,
    ) -> None:
        """``evaluate`` is the caller's own, on rank 0 after each step; it decides itself whether a version is due.

        probe_text   by which engines are checked after an update
        """
        self.learner = learner
        self.accelerator = accelerator
        self.run_dir = run_dir
        self.steps = steps
        self.checkpoint_config = checkpoint
        self.tracer = tracer
        self.pace = pace
        self.owner = owner
        self.published = published
        self.probe_text = probe_text
        self.updates = 0
        self.on_step = on_step
        self.on_checkpoint = on_checkpoint
        self.evaluate = evaluate
        self.checkpoints = CheckpointStore(run_dir)
        self.ahead = ReadAhead(run_dir, accelerator.process_index, accelerator.num_processes)

    def run(self, version: int) -> int:
        """Train from ``version`` on; the version reached, below ``steps`` when a stop was asked for."""
        while version < self.steps:
            waited = time.monotonic()
            with self.tracer.span("wait"):
                batch = self._next_batch()
            if batch is None:
                break
            version = self._step(batch, version, time.monotonic() - waited)
            if self.checkpoint_config.every and version % self.checkpoint_config.every == 0:
                self.save(version)
        self.save(version)
        return version

    def save(self, version: int) -> None:
        """Checkpoint ``version``, unless there is one; nothing is left to commit then."""
        if self.owner is not None:
            self.owner.commits.settle()
        # Every rank must come to the same answer before rank 0 changes what is on disk.
        present = version in self.checkpoints.versions()
        self.accelerator.wait_for_everyone()
        if present:
            return
        with self.tracer.span("checkpoint"):
            ids: Mapping[str, str] = {}
            if self.owner is not None:
                self.owner.publisher.settle(version - self.owner.lag)
                ids = self.owner.tracking.ids
            path = self.checkpoints.save(version, self.learner, ids)
        if self.owner is not None:
            self.owner.tidy(self.checkpoint_config.keep)
            if self.on_checkpoint is not None:
                self.on_checkpoint(version, path)

    def _next_batch(self) -> Batch | None:
        batch = None if self.owner is None else self.owner.next_batch()
        if self.accelerator.num_processes > 1:
            batch = broadcast_object_list([batch])[0]
        return batch

    def _step(self, batch: Batch, version: int, wait_s: float) -> int:
        """One optimizer step and its commit; the new version."""
        began = time.monotonic()
        with self.tracer.span("step", version=version + 1, samples=len(batch.samples)) as span:
            samples = self.ahead.samples(batch)
            read_s = time.monotonic() - began
            metrics = self.learner.step(samples, version)
            span.add(tokens=sum(len(s.rollout.response_ids_T) for s in samples))
        step_s = time.monotonic() - began
        metrics |= self.pace.values(samples, metrics[keys.TOKENS], step_s)
        version += 1
        probe = self._probe()
        if self.owner is None:
            take_part(self.published.weights(self.learner), self.published.dtype)
        else:
            published = time.monotonic()
            with self.tracer.span("publish"):
                self.owner.commits.start(batch, version, self.published.weights(self.learner), probe)
            values = _values(metrics, batch, version - 1, self.owner.ledger) | {
                keys.STEP_SECONDS: step_s,
                keys.WAIT_SECONDS: wait_s,
                keys.READ_SECONDS: read_s,
                keys.PUBLISH_SECONDS: time.monotonic() - published,
                keys.RESTARTS: float(self.owner.supervisor.restarts),
            }
            self.owner.tracking.log(version, values)
            if self.on_step is not None:
                self.on_step(version, values)
            if self.evaluate is not None:
                self.evaluate(version)
        return version

    def _probe(self) -> Probe | None:
        """The probe that goes with the update just made; on every rank, because a sharded student needs them all."""
        self.updates += 1
        text = self.probe_text
        if not text.due(self.updates):
            return None
        log_p_T = self.learner.published_logprobs(text.ids, text.dtype, merged=not self.published.applied)
        return None if log_p_T is None else Probe(text.ids, tuple(log_p_T.tolist()))


def _values(metrics: Mapping[str, float], batch: Batch, version: int, ledger: Ledger) -> dict[str, float]:
    """The step's metrics under the names of ``tracking.keys``; ``version`` is the one the batch was trained at."""
    values = {**metrics, **batch_ages(batch, version)}
    counts = ledger.counts()
    live = (counts.pending, counts.rolling, counts.rolled, counts.scoring, counts.scored, counts.leased)
    values |= {f"{keys.QUEUE}/{state}": float(n) for state, n in zip(keys.LIVE_STATES, live, strict=True)}
    values["length_bias"] = ledger.staleness().length_bias
    return values


def batch_ages(batch: Batch, version: int) -> dict[str, float]:
    """Staleness of the samples of a batch that is trained at ``version``, under the names of ``tracking.keys``.

    Those that no student wrote have none.
    """
    born = [(sample.oldest_version, sample.rolled_at) for sample in batch.samples if sample.oldest_version is not None]
    ages = [version - oldest for oldest, _ in born]
    aged = {
        "in_flight": [rolled - oldest for oldest, rolled in born],
        "in_queue": [version - rolled for _, rolled in born],
        "training": ages,
    }
    values = {
        keys.staleness_key(place, age): float(count)
        for place, places_ages in aged.items()
        for age, count in Counter(places_ages).items()
    }
    values[keys.UNSAMPLED] = (len(batch.samples) - len(born)) / len(batch.samples)
    if not ages:
        return values
    return {**values, keys.STALENESS_MEAN: sum(ages) / len(ages), keys.STALENESS_MAX: max(ages)}
