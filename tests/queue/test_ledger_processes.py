"""Real processes on one file, killed with SIGKILL at seeded moments and at every kill point."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncopd.queue.ledger import Ledger
from tests.queue.driver import plan_of
from tests.queue.stage_process import KILL_POINTS

DEADLINE_S = 60.0
ROLES = ("roller", "roller", "scorer", "learner")


STARTED: list[subprocess.Popen] = []


def start(role: str, folder: Path, seed: int, *kill_at: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.queue.stage_process", role, str(folder), str(seed), *kill_at]
    STARTED.append(subprocess.Popen(command, cwd=Path(__file__).parents[2]))
    return STARTED[-1]


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    end(STARTED)
    STARTED.clear()


@contextmanager
def stages(folder: Path, seed: int) -> Iterator[list[subprocess.Popen]]:
    processes = [start(role, folder, seed + place) for place, role in enumerate(ROLES)]
    try:
        yield processes
    finally:
        end(processes)


def create(folder: Path, **changes: object) -> Ledger:
    plan = plan_of(**{"batch_size": 8, "steps": 6, "prompts": 12, "max_staleness": 1, **changes})
    ledger = Ledger.create(folder / "ledger.sqlite", plan)
    ledger.publish(0)
    return ledger


def resume(ledger: Ledger, folder: Path) -> None:
    checkpoint = folder / "checkpoint"
    version = int(checkpoint.read_text()) if checkpoint.exists() else 0
    ledger.resume(version, None)
    ledger.publish(version)
    assert ledger.verify() == []
    assert not list((folder / "payloads").rglob("*.part"))


def assert_all_trained_once(ledger: Ledger) -> None:
    """Relative to the final chain: every slot of the run, exactly once, and nothing else admitted."""
    assert ledger.verify() == []
    slots = ledger._connection.execute("SELECT slot, count(*) FROM samples WHERE state = 6 GROUP BY slot").fetchall()
    assert slots == [(slot, 1) for slot in range(ledger.plan.steps * ledger.plan.batch_size)]
    assert ledger.counts().live == 0
    assert max(step.max for step in ledger.staleness().steps) <= ledger.plan.max_staleness


def run_under_kills(folder: Path, seed: int, kills: int) -> int:
    """Kill a random stage (sometimes two) at random moments; a learner's death ends the run, which is then resumed."""
    random_, killed = random.Random(seed), 0
    ledger = create(folder, steps=10)
    deadline = time.monotonic() + DEADLINE_S
    while not ledger.finished:
        assert time.monotonic() < deadline, ledger.counts()
        with stages(folder, seed) as processes:
            while not ledger.finished and processes[-1].poll() is None:
                assert time.monotonic() < deadline, ledger.counts()
                time.sleep(random_.uniform(0.01, 0.2))
                if killed < kills and ledger.counts().admitted > 0:
                    for place in random_.sample(range(len(ROLES)), random_.choice((1, 1, 2))):
                        end([processes[place]])
                        killed += 1
                        if ROLES[place] != "learner":
                            processes[place] = start(ROLES[place], folder, seed + killed)
        if not ledger.finished:
            resume(ledger, folder)
    assert_all_trained_once(ledger)
    ledger.close()
    return killed


@pytest.mark.parametrize("seed", range(2))
def test_processes_killed_at_random_lose_nothing_and_train_nothing_twice(tmp_path: Path, seed: int) -> None:
    assert run_under_kills(tmp_path, seed, kills=6) >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 125))
def test_many_more_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    assert run_under_kills(tmp_path, seed, kills=12) >= 1


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_kill_of_every_stage_at_each_point_loses_nothing(tmp_path: Path, point: str) -> None:
    # The first COMMITs of a worker are those of its leases.
    count = "3" if point == "commit" else "1"
    with create(tmp_path, steps=2, batch_size=4) as ledger:
        victim = start("roller", tmp_path, 1, point, count)
        assert victim.wait(DEADLINE_S) == -signal.SIGKILL
        victim, healthy = start("scorer", tmp_path, 1, point, count), start("roller", tmp_path, 2)
        assert victim.wait(DEADLINE_S) == -signal.SIGKILL
        end([healthy])
        workers = [start(role, tmp_path, 3) for role in ("roller", "scorer")]
        learner = start("learner", tmp_path, 1, point, "2" if point == "commit" else "1")
        assert learner.wait(DEADLINE_S) == -signal.SIGKILL
        end(workers)
        resume(ledger, tmp_path)
        for process in [start(role, tmp_path, 4) for role in ("roller", "scorer", "learner")]:
            assert process.wait(DEADLINE_S) == 0
        assert_all_trained_once(ledger)


def test_two_processes_leasing_at_once_never_get_the_same_sample(tmp_path: Path) -> None:
    create(tmp_path, batch_size=300, prompts=500, steps=2).close()
    code = (
        "import sys, time; from pathlib import Path; from asyncopd.queue.ledger import Ledger\n"
        "ledger = Ledger.open(Path(sys.argv[1]))\n"
        "while time.time() < float(sys.argv[2]): pass\n"
        "while lease := ledger.lease_rollouts('w', 1, 3600.0):\n"
        "    print(lease.token, *(sample.uid for sample in lease.samples))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "ledger.sqlite"), str(time.time() + 1.0)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = [line.split() for process in processes for line in process.communicate()[0].splitlines()]
    assert sorted(uid for _, uid in lines) == sorted(f"0-{position}-{s}-0" for position in range(300) for s in range(2))
    assert len({token for token, _ in lines}) == 600


def test_the_ledger_opens_without_torch() -> None:
    code = "import sys, asyncopd.queue.ledger, asyncopd.queue.doorbell; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ}).returncode == 0
