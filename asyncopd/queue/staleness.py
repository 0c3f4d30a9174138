"""How old samples are, now and when they were trained; and whether long answers are held back."""

import sqlite3

from asyncopd.queue.rows import Staleness, StepStaleness

STEPS_SHOWN = 100
"""Trained steps that one reading returns, the last ones."""


def read_staleness(connection: sqlite3.Connection) -> Staleness:
    """In-flight and in-queue staleness now, and of the last trained steps; costs no more as the run grows."""
    in_flight = connection.execute(
        "SELECT (SELECT policy_version FROM run) - min_version AS age, count(*) FROM samples"
        " WHERE state = 1 AND state < 6 GROUP BY age ORDER BY age"
    ).fetchall()
    in_queue = connection.execute(
        "SELECT (SELECT policy_version FROM run) - oldest_version AS age, count(*) FROM samples"
        " WHERE state BETWEEN 2 AND 5 AND state < 6 AND oldest_version IS NOT NULL GROUP BY age ORDER BY age"
    ).fetchall()
    steps = connection.execute(
        "SELECT version, samples, staleness_sum, staleness_max, trained_tokens, dropped, dropped_tokens"
        " FROM steps ORDER BY version DESC LIMIT ?",
        (STEPS_SHOWN,),
    ).fetchall()
    samples, trained, dropped, dropped_tokens = connection.execute(
        "SELECT all_samples, all_trained_tokens, all_dropped, all_dropped_tokens"
        " FROM steps ORDER BY version DESC LIMIT 1"
    ).fetchone() or (0, 0, 0, 0)
    generated = _mean(trained + dropped_tokens, samples + dropped)
    return Staleness(
        in_flight=tuple(in_flight),
        in_queue=tuple(in_queue),
        steps=tuple(_step(*row) for row in reversed(steps)),
        length_bias=_mean(trained, samples) / generated - 1 if generated else 0.0,
    )


def _step(
    version: int, samples: int, staleness: int, worst: int, trained: int, dropped: int, dropped_tokens: int
) -> StepStaleness:
    return StepStaleness(
        version=version,
        samples=samples,
        mean=_mean(staleness, samples),
        max=worst,
        trained_length=_mean(trained, samples),
        generated_length=_mean(trained + dropped_tokens, samples + dropped),
    )


def _mean(total: int, count: int) -> float:
    return total / count if count else 0.0
