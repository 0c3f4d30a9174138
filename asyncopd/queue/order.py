"""Which prompt comes when: a seeded permutation that is computed, never stored.

A slot is one sample's place in the endless sequence epoch by epoch, prompt by prompt, sample by sample.
"""

from asyncopd.errors import LedgerError
from asyncopd.queue.plan import LedgerPlan

_MASK64 = (1 << 64) - 1
_ROUNDS = 6


def uid_of(plan: LedgerPlan, slot: int, attempt: int) -> str:
    """The stable name of a sample: ``epoch-position-sample-attempt``."""
    epoch, within = divmod(slot, plan.slots_per_epoch)
    position, sample = divmod(within, plan.samples_per_prompt)
    return f"{epoch}-{position}-{sample}-{attempt}"


def slot_of(plan: LedgerPlan, uid: str) -> tuple[int, int]:
    """(slot, attempt) of a uid; LedgerError if it is not one of this plan's."""
    parts = uid.split("-")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise LedgerError(f"uid {uid!r}; expected epoch-position-sample-attempt, four whole numbers")
    epoch, position, sample, attempt = map(int, parts)
    if position >= plan.prompts or sample >= plan.samples_per_prompt:
        raise LedgerError(
            f"uid {uid!r} names position {position}, sample {sample}; this ledger has {plan.prompts} prompts "
            f"of {plan.samples_per_prompt} samples"
        )
    return (epoch * plan.prompts + position) * plan.samples_per_prompt + sample, attempt


def prompt_index(plan: LedgerPlan, slot: int) -> int:
    """The data set's index of the prompt that a slot asks for."""
    epoch, within = divmod(slot, plan.slots_per_epoch)
    position = within // plan.samples_per_prompt
    return permuted(position, plan.prompts, seed=plan.seed, epoch=epoch) if plan.shuffle else position


def permuted(position: int, size: int, *, seed: int, epoch: int) -> int:
    """The image of ``position`` under a permutation of ``range(size)`` that ``seed`` and ``epoch`` choose.

    A Feistel network over the next even number of bits, walked until it lands inside the range: no table to keep, and
    the order does not change with the version of a random number library.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    keys = [_mix(_mix(seed & _MASK64) ^ _mix((epoch << 8 | turn) & _MASK64)) for turn in range(_ROUNDS)]
    value = position
    while True:
        left, right = value >> half, value & low
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        value = left << half | right
        if value < size:
            return value


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)
