"""Selection policies on long-tailed answer lengths, in simulated time, against the real ledger.

A pool of slots decodes one token a unit of time each. Lengths are lognormal up to a limit, so a few answers are many
times the median. An answer takes the newest weights when it starts; scoring takes a fixed time; the learner takes a
fixed time a step, about what the pool needs for a batch at full use. Only order and waiting differ between policies.
"""

import heapq
import math
import random
import shutil
import tempfile
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from asyncopd.queue.ledger import LeasedSample, Ledger, LedgerPlan, PayloadRef

SLOTS = 32
BATCH = 64
STEPS = 40
MEDIAN_TOKENS = 200.0
LIMIT_TOKENS = 2000
SIGMA = 1.0
SCORING = 20.0
STEP = BATCH * MEDIAN_TOKENS * math.exp(SIGMA**2 / 2) / SLOTS
HOUR_S = 3600.0
PAYLOAD = PayloadRef(path="payloads/none", offset=0, bytes=0, checksum="crc32:0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a policy cost and gained.

    throughput      steps a unit of time, over those of a learner that never waits
    staleness_mean, staleness_max   policy versions, of the samples trained
    dropped         share of the generated answers that were dropped for age
    length_bias     mean length of trained answers over that of all that left the queue, minus 1
    short_first     mean length of the answers trained in the first half of the run over the second half's, minus 1
    prompts_a_batch     different prompts in a batch, mean
    """

    policy: str
    max_staleness: int
    throughput: float
    staleness_mean: float
    staleness_max: int
    dropped: float
    length_bias: float
    short_first: float
    prompts_a_batch: float


class Simulation:
    """Events in simulated time; the ledger sees the calls in their order."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.ledger = ledger
        self.random = random.Random(seed)
        self.events: list[tuple[float, int, str, int, LeasedSample | None]] = []
        self.serial = count()
        self.now = 0.0
        self.free = SLOTS
        self.training = False
        self.prompts: list[int] = []

    def run(self) -> float:
        """The time at which the last step is committed."""
        self.ledger.publish(0)
        while self.start_work():
            pass
        while not self.ledger.finished:
            self.now, _, kind, token, sample = heapq.heappop(self.events)
            if kind == "trained":
                batch = self.ledger.lease_batch()
                assert batch is not None
                self.ledger.commit_step(batch, self.ledger.policy_version + 1, True)
                self.training = False
            elif sample is not None and kind == "rolled":
                self.free += 1
                version = sample.min_version
                self.ledger.put_rollout(token, sample.uid, PAYLOAD, self.length(sample), version, version, "eos")
            elif sample is not None:
                self.ledger.put_record(token, sample.uid, PAYLOAD, 1, disagreement=self.random.random())
            # A drop for age in one look leaves room that only the next look finds.
            while self.start_work():
                pass
        return self.now

    def length(self, sample: LeasedSample) -> int:
        """Of the uid alone, so that every policy meets the same answers."""
        normal = random.Random(sample.uid).gauss(0.0, SIGMA)
        return min(LIMIT_TOKENS, max(1, int(MEDIAN_TOKENS * math.exp(normal))))

    def start_work(self) -> bool:
        """Every stage looks for work once; whether the ledger may have more by now."""
        before = self.ledger.counts()
        if self.free:
            lease = self.ledger.lease_rollouts("pool", self.free, HOUR_S)
            for sample in lease.samples if lease else ():
                self.free -= 1
                self.at(self.length(sample), "rolled", lease.token, sample)
        lease = self.ledger.lease_scoring("teacher", 1000, HOUR_S)
        for sample in lease.samples if lease else ():
            self.at(SCORING, "scored", lease.token, sample)
        if not self.training:
            batch = self.ledger.lease_batch()
            if batch is not None:
                self.training = True
                self.prompts.append(len({sample.prompt_index for sample in batch.samples}))
                self.at(STEP, "trained", 0, None)
        return self.ledger.counts() != before

    def at(self, after: float, kind: str, token: int, sample: LeasedSample | None) -> None:
        heapq.heappush(self.events, (self.now + after, next(self.serial), kind, token, sample))


def simulate(policy: str, max_staleness: int, seed: int = 0) -> Outcome:
    """One run of ``STEPS`` steps."""
    folder = Path(tempfile.mkdtemp(prefix="queue-policies-"))
    plan = LedgerPlan(
        seed=seed, prompts=1000, samples_per_prompt=4, batch_size=BATCH, steps=STEPS, max_staleness=max_staleness,
        lag=None, group_size=1, shuffle=True, selection=policy,
    )  # fmt: skip
    try:
        with Ledger.create(folder / "ledger.sqlite", plan) as ledger:
            simulation = Simulation(ledger, seed)
            took = simulation.run()
            staleness, counts = ledger.staleness(), ledger.counts()
            half = STEPS // 2
            first, second = (
                sum(step.trained_length for step in part) / len(part)
                for part in (staleness.steps[:half], staleness.steps[half:])
            )
            too_old = counts.dropped_by_reason.get("too_old", 0)
            return Outcome(
                policy=policy,
                max_staleness=max_staleness,
                throughput=STEPS * STEP / took,
                staleness_mean=sum(step.mean for step in staleness.steps) / STEPS,
                staleness_max=max(step.max for step in staleness.steps),
                dropped=too_old / (counts.trained + too_old),
                length_bias=staleness.length_bias,
                short_first=first / second - 1,
                prompts_a_batch=sum(simulation.prompts) / len(simulation.prompts),
            )
    finally:
        shutil.rmtree(folder)


def simulate_all() -> list[dict[str, object]]:
    """Every policy at two bounds; strict order at more."""
    cases = [("strict", bound) for bound in (0, 1, 2, 4, 8)]
    policies = ("oldest_ready", "freshest", "windowed", "prompt_coverage", "disagreement_first")
    cases += [(policy, bound) for bound in (1, 4) for policy in policies]
    return [asdict(simulate(policy, bound)) for policy, bound in cases]
