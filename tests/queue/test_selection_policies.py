"""What each selection policy picks, and that the ledger keeps the staleness bound under all of them."""

import random
from pathlib import Path

import pytest

from asyncopd.queue.ledger import State
from asyncopd.queue.selection import POLICIES, QueueRow
from tests.queue.driver import HOUR_S, Driver


def rows_of(
    text: str, prompts: str = "", ages: str = "", disagreement: dict[int, float] | None = None
) -> list[QueueRow]:
    """One row a letter of ``text``: r is ready, - is not; ``prompts`` and ``ages`` (versions) are digits."""
    return [
        QueueRow(
            ordinal=10 + place,
            ready=letter == "r",
            prompt=int(prompts[place]) if prompts else place,
            oldest_version=int(ages[place]) if ages else 0,
            tokens=5,
            disagreement=(disagreement or {}).get(10 + place),
            scored_at=None,
        )
        for place, letter in enumerate(text)
    ]


@pytest.mark.parametrize(
    ("policy", "rows", "expected"),
    [
        ("strict", rows_of("rrr"), [10, 11, 12]),
        ("strict", rows_of("r-r"), None),
        ("strict", rows_of("rr"), None),
        ("oldest_ready", rows_of("r-rrr"), [10, 12, 13]),
        ("oldest_ready", rows_of("r--r"), None),
        ("freshest", rows_of("rrr-rr", ages="001122"), [12, 14, 15]),
        ("freshest", rows_of("rr"), None),
        ("windowed", rows_of("-rr-r-"), [11, 12, 14]),
        ("windowed", rows_of("-rr---"), None),
        ("prompt_coverage", rows_of("rrrrr", prompts="00112"), [10, 12, 14]),
        ("prompt_coverage", rows_of("rrrr", prompts="0001"), [10, 11, 13]),
        ("prompt_coverage", rows_of("rr", prompts="01"), None),
        ("disagreement_first", rows_of("rrrr", "0012", disagreement={10: 0.1, 11: 0.7, 12: 0.2}), [11, 12, 13]),
        ("disagreement_first", rows_of("rrrr", "0000", disagreement={10: 0.1, 12: 0.7, 13: 0.2}), [10, 12, 13]),
        ("disagreement_first", rows_of("r-r", "000"), None),
    ],
)
def test_a_batch_of_three_is_picked_as_the_policy_says(policy: str, rows: list[QueueRow], expected: object) -> None:
    assert POLICIES[policy].choose(rows, 3) == expected


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("requeue", [False, True])
def test_no_policy_trains_a_sample_beyond_max_staleness(
    tmp_path: Path, policy: str, max_staleness: int, requeue: bool
) -> None:
    driver = Driver(tmp_path, selection=policy, max_staleness=max_staleness, requeue_too_old=requeue)
    random_ = random.Random(policy + str(max_staleness))
    held: list = []
    for _ in range(2000):
        if driver.ledger.finished:
            break
        lease = driver.ledger.lease_rollouts("roller", random_.randint(1, 3), HOUR_S)
        held += [(lease.token, sample) for sample in lease.samples] if lease else []
        # A long tail: each answer in flight ends with probability 1/5 at each turn.
        done = [pair for pair in held if random_.random() < 0.2]
        held = [pair for pair in held if pair not in done]
        for token, sample in done:
            driver.put_rollout(token, sample)
        driver.score(3)
        if driver.ledger.lease_batch() is not None:
            driver.train()
    assert driver.ledger.finished
    assert max(step.max for step in driver.ledger.staleness().steps) <= max_staleness
    counts = driver.ledger.counts()
    assert counts.trained == 24
    if policy == "strict":
        assert counts.dropped == 0
    assert driver.ledger.verify() == []


def overtaken(folder: Path, *, requeue: bool) -> Driver:
    """A straggler at version 0, still generated while the policy is at 2."""
    driver = Driver(folder, selection="oldest_ready", requeue_too_old=requeue)
    straggler = driver.ledger.lease_rollouts("slow", 1, HOUR_S)
    assert straggler is not None
    driver.run(2)
    driver.put_rollout(straggler.token, straggler.samples[0])
    return driver


def test_a_sample_too_old_is_dropped_before_the_teacher_scores_it(tmp_path: Path) -> None:
    driver = overtaken(tmp_path, requeue=False)
    driver.score()
    assert driver.states()[0] == State.DROPPED
    assert driver.ledger.counts().dropped_by_reason == {"too_old": 1}


def test_a_prompt_whose_sample_was_too_old_comes_again_as_a_new_attempt_by_choice(tmp_path: Path) -> None:
    driver = overtaken(tmp_path, requeue=True)
    driver.run(4)
    again = driver.ledger._connection.execute("SELECT attempt, state FROM samples WHERE slot = 0").fetchall()
    assert again == [(0, State.DROPPED), (1, State.TRAINED)]
    assert driver.ledger.verify() == []


def test_windowed_waits_once_too_many_have_overtaken(tmp_path: Path) -> None:
    driver = Driver(tmp_path, selection="windowed", window_batches=2, max_staleness=3)
    stragglers = driver.ledger.lease_rollouts("slow", 5, HOUR_S)
    assert stragglers is not None
    driver.prepare()
    # Only 3 of the oldest 8 live samples are ready, though 11 are in all.
    assert driver.ledger.counts().scored == 11
    assert driver.ledger.lease_batch() is None
    driver.put_rollout(stragglers.token, stragglers.samples[0])
    driver.score()
    assert [sample.ordinal for sample in driver.train().samples] == [0, 5, 6, 7]
