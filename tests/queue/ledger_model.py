"""The ledger in plain Python: lists and loops instead of tables, for the tests to compare with.

It restates the architecture: the admission window in its words (final prefix, dropped samples behind it), what a lease
hands out, what each call does to a sample.
"""

from dataclasses import dataclass

from asyncopd.queue.ledger import LedgerPlan
from asyncopd.queue.selection import POLICIES, QueueRow

PENDING, ROLLING, ROLLED, SCORING, SCORED, LEASED, TRAINED, DROPPED = range(8)


@dataclass
class Sample:
    """The model's sample; ``attempt`` and ``slot`` name it, versions are of its oldest and newest token."""

    slot: int
    attempt: int
    exact: int | None
    state: int = PENDING
    token: int | None = None
    oldest: int = 0
    newest: int = 0
    final_at: int | None = None
    reason: str | None = None


class Model:
    """What the ledger should hold."""

    def __init__(self, plan: LedgerPlan) -> None:
        self.plan = plan
        self.samples: list[Sample] = []
        self.version = 0
        self.published = {0}
        self.next_slot = 0
        self.requeued: list[tuple[int, int]] = []
        self.dead: set[int] = set()

    @property
    def overtakes(self) -> bool:
        return POLICIES[self.plan.selection].overtakes

    def live(self) -> list[int]:
        return [ordinal for ordinal, sample in enumerate(self.samples) if sample.state < TRAINED]

    def may_admit(self) -> bool:
        plan, ordinal = self.plan, len(self.samples)
        if plan.lag is not None:
            return ordinal < min(self.version + plan.lag + 1, plan.steps) * plan.batch_size
        final = [sample.state >= TRAINED for sample in self.samples]
        prefix = final.index(False) if False in final else len(final)
        behind = self.samples[prefix:]
        taken = sum(sample.state == DROPPED or (self.overtakes and sample.state == TRAINED) for sample in behind)
        window = (plan.max_staleness + 1 - (self.version - max(self.published))) * plan.batch_size
        left = (plan.steps - self.version) * plan.batch_size
        return ordinal - prefix - taken < window and len(self.live()) < left

    def admit(self) -> None:
        while self.may_admit():
            ordinal, plan = len(self.samples), self.plan
            exact = None if plan.lag is None else max(0, ordinal // plan.batch_size - plan.lag)
            if self.requeued:
                slot, attempt = self.requeued.pop(0)
            else:
                slot, attempt = self.next_slot, 0
                self.next_slot += 1
            self.samples.append(Sample(slot=slot, attempt=attempt, exact=exact))

    def may_lease(self, state: int, count: int) -> list[int]:
        if self.plan.lag is not None:
            return self.whole_group(state)
        live = self.live()
        if state == PENDING:
            window = self.plan.max_staleness + 1 - (self.version - max(self.published))
            live = live[: max(0, window) * self.plan.batch_size]
        return [ordinal for ordinal in live if self.samples[ordinal].state == state][:count]

    def whole_group(self, state: int) -> list[int]:
        live = self.live()
        for group in sorted({ordinal // self.plan.group_size for ordinal in live}):
            members = [ordinal for ordinal in live if ordinal // self.plan.group_size == group]
            exact = self.samples[members[0]].exact
            assert exact is not None
            if all(self.samples[ordinal].state == state for ordinal in members) and exact <= max(self.published):
                return members
        return []

    def take_back(self, token: int) -> None:
        held = [ordinal for ordinal, sample in enumerate(self.samples) if sample.token == token]
        held = [ordinal for ordinal in held if self.samples[ordinal].state in (ROLLING, SCORING)]
        if self.plan.lag is not None and held:
            state = self.samples[held[0]].state
            group = held[0] // self.plan.group_size
            members = [ordinal for ordinal in self.live() if ordinal // self.plan.group_size == group]
            held = [ordinal for ordinal in members if self.samples[ordinal].state in (state, state + 1)]
            for ordinal in held:
                self.samples[ordinal].state = state
        for ordinal in held:
            self.samples[ordinal].state -= 1
            self.samples[ordinal].token = None
        self.dead.add(token)

    def drop(self, ordinal: int, reason: str) -> None:
        sample = self.samples[ordinal]
        sample.state, sample.final_at, sample.reason = DROPPED, self.version + 1, reason

    def drop_too_old(self, state: int) -> None:
        if not self.overtakes:
            return
        for ordinal in self.live():
            sample = self.samples[ordinal]
            if sample.state == state and self.version - sample.oldest > self.plan.max_staleness:
                self.drop(ordinal, "too_old")
                if self.plan.requeue_too_old:
                    self.requeued.append((sample.slot, sample.attempt + 1))

    def next_batch(self) -> list[int]:
        size, live = self.plan.batch_size, self.live()
        if self.version >= self.plan.steps:
            return []
        if self.plan.lag is not None:
            first = self.version * size
            batch = [ordinal for ordinal in live if first <= ordinal < first + size]
            ready = len(self.samples) >= first + size and all(self.samples[o].state == SCORED for o in batch)
            return batch if ready else []
        if self.plan.selection == "strict":
            batch = live[:size]
            return batch if len(batch) == size and all(self.samples[o].state == SCORED for o in batch) else []
        rows = [
            QueueRow(
                ordinal=ordinal,
                ready=self.samples[ordinal].state == SCORED,
                prompt=self.samples[ordinal].slot // self.plan.samples_per_prompt,
                oldest_version=self.samples[ordinal].oldest,
                tokens=7,
                disagreement=None,
                scored_at=0.0,
            )
            for ordinal in live[: POLICIES[self.plan.selection].reach(size, self.plan.window_batches)]
        ]
        return POLICIES[self.plan.selection].choose(rows, size) or []

    def staleness_bound_holds(self) -> bool:
        return all(
            sample.final_at is not None and sample.final_at - 1 - sample.oldest <= self.plan.max_staleness
            for sample in self.samples
            if sample.state == TRAINED
        )
