"""The frozen records that the ledger hands out, and the states a sample passes through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class State(IntEnum):
    """States of a sample, in the order in which it meets them; the last two are final."""

    PENDING = 0
    ROLLING = 1
    ROLLED = 2
    SCORING = 3
    SCORED = 4
    LEASED = 5
    TRAINED = 6
    DROPPED = 7


FIRST_FINAL = State.TRAINED
TOO_OLD = "too_old"
"""The reason under which a policy that overtakes drops a sample whose oldest token is beyond max_staleness."""


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """Where a payload lies and how to know that it is whole.

    path        of the pack, relative to the run folder
    offset      of its first byte in the pack
    bytes       its size
    checksum    of these bytes, with the name of its algorithm
    """

    path: str
    offset: int
    bytes: int
    checksum: str


def payload_columns(kind: str) -> str:
    """The columns of a payload, ``rollout`` or ``record``, in the order that ``payload_of`` takes."""
    return f"{kind}_path, {kind}_offset, {kind}_bytes, {kind}_checksum"


def payload_of(columns: Sequence[Any]) -> PayloadRef | None:
    """The payload of a row's columns; None where the sample has none yet."""
    return None if columns[0] is None else PayloadRef(*columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeasedSample:
    """One sample to generate or to score.

    uid             ``epoch-position-sample-attempt``; position counts prompts in the epoch's order
    ordinal         order of admission
    prompt_index    the prompt's place in the data set
    min_version     the worker holds at least this policy version before the first token
    exact_version   the only version that may generate the answer (sync and lagged modes), or None
    group           samples with one group number are generated and scored together; None in async
    rollout         the answer to score; None where it is still to be generated
    """

    uid: str
    ordinal: int
    epoch: int
    prompt_index: int
    sample_index: int
    attempt: int
    min_version: int
    exact_version: int | None
    group: int | None
    rollout: PayloadRef | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Work handed to one owner until ``expires_at`` (seconds since the epoch) unless a heartbeat extends it.

    token   fencing token: grows with every lease, is never used twice, and goes dead when the lease is taken back
    """

    token: int
    samples: tuple[LeasedSample, ...]
    expires_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSample:
    """One sample of a batch; lengths in tokens.

    oldest_version  policy version of its oldest token; None where no student wrote it
    rolled_at       policy version when its answer was finished: it aged ``rolled_at - oldest_version`` in flight
    """

    uid: str
    ordinal: int
    prompt_index: int
    tokens: int
    valid_tokens: int
    oldest_version: int | None
    rolled_at: int
    rollout: PayloadRef
    record: PayloadRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one optimizer step trains, in ordinal order.

    Shorter than ``batch_size`` only in sync and lagged modes, where a dropped sample is not replaced.
    """

    samples: tuple[BatchSample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Samples by state, as the triggers count them."""

    pending: int
    rolling: int
    rolled: int
    scoring: int
    scored: int
    leased: int
    trained: int
    dropped: int
    admitted: int
    dropped_by_reason: Mapping[str, int]

    @property
    def live(self) -> int:
        """Samples that are neither trained nor dropped."""
        return self.pending + self.rolling + self.rolled + self.scoring + self.scored + self.leased


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """What a resume found and did, in samples.

    version         the policy version that the run goes on from
    revived         final samples of the lost timeline that are live again
    repeated        live samples that are generated again
    rescored        live samples whose answer is kept and scored again
    kept            live samples that are scored and wait to be trained
    lost_payloads   payloads that were missing or damaged
    """

    version: int
    revived: int
    repeated: int
    rescored: int
    kept: int
    lost_payloads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStaleness:
    """One trained step. Staleness in policy versions, lengths in tokens.

    version         the policy version that the step made
    mean, max       staleness of the samples trained
    trained_length  mean length of the answers trained in the step
    generated_length    mean length of the answers that left the queue with it: trained, or dropped since the last step
    """

    version: int
    samples: int
    mean: float
    max: int
    trained_length: float
    generated_length: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """Staleness now, as (policy versions, samples) pairs in growing order, and of the last trained steps.

    in_flight       samples being generated, by the version floor they were leased with
    in_queue        samples generated and not yet trained, by their oldest token
    length_bias     mean length of all answers trained, over that of all that left the queue, minus 1
    """

    in_flight: tuple[tuple[int, int], ...]
    in_queue: tuple[tuple[int, int], ...]
    steps: tuple[StepStaleness, ...]
    length_bias: float
