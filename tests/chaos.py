"""Kills the processes of whole runs with SIGKILL and counts what was lost: nothing should be.

    python -m tests.chaos --kills 200 --seed 0 --json

Real pipeline, tiny models, real processes. A round is one run: it is killed and resumed until it has had its share of
kills, then it may end. Some kills come at random moments (a learner, a rollout worker, the scorer, or two at
once), some at the named points of ``tests.kill_points``. After each kill the ledger is verified; at the end of a round
every sample must be trained exactly once, and in the pinned modes the weights must be those of a run that nobody
disturbed, bit for bit.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import torch

from asyncopd.config import RunConfig
from asyncopd.errors import LedgerError
from asyncopd.learner.checkpoint import CheckpointConfig
from asyncopd.queue.ledger import Ledger
from asyncopd.supervisor import SupervisionConfig
from tests.chaos_processes import Arm, Life, pid_file, start_learner, wait_until
from tests.conftest import make_tiny_llama, save_checkpoint
from tests.kill_points import LEARNER_POINTS, ONCE, WORKER_POINTS
from tests.tiny_run import final_weights, tiny_config

PR_SET_CHILD_SUBREAPER = 36
MODES = ("sync", "async", "lagged:2")
WORKERS = ("rollout-0", "rollout-1", "scorer-0")
POINT_WAIT_S = 3.0
"""Seconds after which an armed point that was not reached is given up for this life."""
LIFE_S = 120.0
"""No life takes longer, or something hangs."""


@dataclass(kw_only=True, slots=True)
class Figures:
    """What happened; all counts.

    kills           processes that got SIGKILL, by what or where
    lives           starts and resumes of a learner
    lost, twice     samples of finished rounds never trained, or trained more than once
    violations      what ``ledger verify`` found after a kill or at the end
    orphans         processes that outlived their learner by more than 10 s
    identical       finished rounds in pinned modes whose weights are those of an undisturbed run
    failures        lives that ended otherwise than by a kill or by the end of the run
    """

    kills: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    rounds: int = 0
    verified: int = 0
    trained: int = 0
    lost: int = 0
    twice: int = 0
    violations: list[str] = field(default_factory=list)
    orphans: int = 0
    pinned_rounds: int = 0
    identical: int = 0
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def sound(self) -> bool:
        return (
            (self.lost, self.twice, self.orphans, self.violations, self.failures) == (0, 0, 0, [], [])
        ) and self.identical == self.pinned_rounds


class Chaos:
    """Rounds in one folder.

    start       ``forkserver`` (starts take tens of milliseconds) or ``spawn`` (each process is a new interpreter)
    victims     who may be killed
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        start: str = "forkserver",
        victims: Sequence[str] = ("learner", *WORKERS),
        steps: int = 12,
    ) -> None:
        self.folder = folder
        self.steps = steps
        self.victims = victims
        self.random = random.Random(seed)
        self.pause_s = 1.5 if start == "forkserver" else 20.0
        if start == "spawn":
            # Workers whose learner was killed become children of this process, so that they can be seen.
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.start = start
        self.figures = Figures()
        self.undisturbed: dict[str, dict[str, torch.Tensor]] = {}
        self.teacher = save_checkpoint(make_tiny_llama(0), folder / "teacher")
        self.student = save_checkpoint(make_tiny_llama(1, layers=2), folder / "student")
        self._points = self._in_turn()

    def _in_turn(self) -> Iterator[tuple[str, str]]:
        """(process, point), every one before any comes again, in a seeded order."""
        every = [
            (victim, point)
            for victim in self.victims
            for point in (LEARNER_POINTS if victim == "learner" else WORKER_POINTS)
        ]
        while True:
            yield from self.random.sample(every, len(every))

    def session(self, kills: int, a_round: int = 12, modes: Sequence[str] = MODES, until_s: float = 1e9) -> Figures:
        """Rounds until there were ``kills`` kills, or ``until_s`` seconds have passed."""
        began = time.monotonic()
        while self.figures.kills.total() < kills and time.monotonic() - began < until_s:
            left = kills - self.figures.kills.total()
            self.round(modes[self.figures.rounds % len(modes)], min(a_round, left))
            self.figures.wall_s = time.monotonic() - began
        return self.figures

    def config(self, folder: Path, mode: str) -> RunConfig:
        folder.mkdir(parents=True)
        config = tiny_config(
            folder,
            self.teacher,
            self.student,
            mode=mode,
            steps=self.steps,
            checkpoint=CheckpointConfig(every=2, keep=2),
            supervision=SupervisionConfig(restarts=1000, backoff_s=0.001),
        )
        return replace(
            config,
            rollout=replace(config.rollout, workers=2),
            data=replace(config.data, held_out_from_end=0),
        )

    def reference(self, mode: str) -> dict[str, torch.Tensor]:
        """The weights of the run that nobody disturbs."""
        if mode not in self.undisturbed:
            config = self.config(self.folder / f"undisturbed-{mode.partition(':')[0]}", mode)
            log = config.runs_dir.parent / "learner.log"
            learner = start_learner(Life(config=config, resume=False, start=self.start, log=log))
            learner.join(LIFE_S)
            assert learner.exitcode == 0, log.read_text()[-3000:]
            self.undisturbed[mode] = final_weights(config.runs_dir / config.name)
        return self.undisturbed[mode]

    def round(self, mode: str, kills: int, script: Sequence[tuple[str, str]] = ()) -> None:
        """One run, killed ``kills`` times and resumed until it ends.

        script      (process, point) of the first lives; those that follow are random
        """
        pinned = mode != "async"
        if pinned:
            self.reference(mode)
        config = self.config(self.folder / f"round-{self.figures.rounds}", mode)
        run_dir = config.runs_dir / config.name
        wanted = self.figures.kills.total() + kills
        log = config.runs_dir.parent / "learner.log"
        scripted = iter(script)
        while True:
            armed = next(scripted, None) or self._armed(run_dir, wanted)
            code = self.life(config, log, wanted, armed)
            self.verify(run_dir)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                self.figures.failures.append(f"{mode}: the learner ended with {code}: {log.read_text()[-1500:]}")
                break
        self.figures.rounds += 1
        self.figures.pinned_rounds += pinned
        if code == 0:
            self.judge(run_dir, mode)

    def _armed(self, run_dir: Path, wanted: int) -> tuple[str, str] | None:
        """The point for a life, one that it can come to; None for kills at random moments only."""
        if self.figures.kills.total() >= wanted or self.random.random() < 0.25:
            return None
        if not (run_dir / "ledger.sqlite").exists():
            return ("learner", "ledger_tables") if self.random.random() < 0.2 else None
        return next(found for found in self._points if found[1] != "ledger_tables")

    def life(self, config: RunConfig, log: Path, wanted: int, armed: tuple[str, str] | None) -> int | None:
        """Start or resume, kill, wait for the end of every process; the learner's exit status, None if it hung."""
        figures, run_dir = self.figures, config.runs_dir / config.name
        arms: dict[str, Arm] = {}
        if armed is not None:
            victim, point = armed
            count = 1 if point in ONCE else self.random.randint(1, 3)
            arms[victim] = Arm(point=point, count=count, mark=config.runs_dir.parent / f"mark-{figures.lives}")
        resume = (run_dir / "config.yaml").exists()
        figures.lives += 1
        learner = start_learner(Life(config=config, resume=resume, start=self.start, log=log, arms=arms))
        began = time.monotonic()
        if arms:
            self._wait_for_mark(learner, *arms.items())
        while figures.kills.total() < wanted and learner.is_alive() and time.monotonic() - began < LIFE_S:
            self._strike(learner, run_dir)
        learner.join(max(1.0, LIFE_S - (time.monotonic() - began)))
        code = learner.exitcode
        if code is None:
            learner.kill()
            learner.join()
            figures.failures.append(f"a life took longer than {LIFE_S:.0f} s: {log.read_text()[-1500:]}")
        self._bury()
        return code

    def _wait_for_mark(self, learner: BaseProcess, armed: tuple[str, Arm]) -> None:
        """Until the armed process has killed itself, or the point is given up."""
        victim, arm = armed
        wait_until(lambda: arm.mark.exists() or not learner.is_alive(), POINT_WAIT_S)
        if arm.mark.exists():
            self.figures.kills[f"{victim.partition('-')[0]} at {arm.point}"] += 1
            if victim == "learner":
                learner.join(5)

    def _strike(self, learner: BaseProcess, run_dir: Path) -> None:
        """SIGKILL to one or two random processes after a random time."""
        time.sleep(self.random.uniform(0.0, self.pause_s))
        chosen = self.random.sample(self.victims, min(len(self.victims), self.random.choice((1, 1, 1, 2))))
        pids = {name: _pid(learner, run_dir, name) for name in chosen}
        dead = [name for name, pid in pids.items() if pid is not None and _kill(pid)]
        if dead:
            self.figures.kills[" and ".join(sorted(name.partition("-")[0] for name in dead))] += len(dead)
        if "learner" in dead:
            learner.join(5)
        elif dead and (run_dir / "ledger.sqlite").exists():
            self.verify(run_dir)

    def _bury(self) -> None:
        """Nothing may outlive the learner."""
        if not wait_until(lambda: not _alive(), 10.0):
            for process in _alive():
                self.figures.orphans += 1
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def verify(self, run_dir: Path) -> None:
        """``ledger verify``; while a run goes on, a payload may be deleted between the look and the read."""
        try:
            with Ledger.open(run_dir / "ledger.sqlite") as ledger:
                found = ledger.verify()
                for _ in range(2):
                    found = [violation for violation in found if violation in ledger.verify()] if found else []
        except LedgerError as error:
            # Killed before there was a ledger.
            found = [] if not (run_dir / "weights").exists() else [str(error)]
        self.figures.violations += found
        self.figures.verified += 1

    def judge(self, run_dir: Path, mode: str) -> None:
        """Every sample of a finished run trained exactly once; in pinned modes the weights of an undisturbed run."""
        connection = sqlite3.connect(run_dir / "ledger.sqlite")
        times = dict(connection.execute("SELECT slot, count(*) FROM samples WHERE state = 6 GROUP BY slot"))
        connection.close()
        with Ledger.open(run_dir / "ledger.sqlite") as ledger:
            expected = range(ledger.plan.steps * ledger.plan.batch_size)
        self.figures.trained += len(times)
        self.figures.lost += sum(slot not in times for slot in expected)
        self.figures.twice += sum(count > 1 for count in times.values())
        if mode != "async":
            found, wanted = final_weights(run_dir), self.reference(mode)
            self.figures.identical += all(torch.equal(found[name], wanted[name]) for name in wanted)


def _alive() -> list[psutil.Process]:
    """The living descendants of this process, without those that multiprocessing keeps for itself."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if not any("forkserver" in word or "resource_tracker" in word for word in child.cmdline()):
                found.append(child)
            found += child.children(recursive=True)
    return [process for process in found if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _pid(learner: BaseProcess, run_dir: Path, name: str) -> int | None:
    if name == "learner":
        return learner.pid
    try:
        return int(pid_file(run_dir, name).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _kill(pid: int) -> bool:
    """Whether there was a living process to kill; a pid that was given out again to a stranger is not ours to kill."""
    try:
        process = psutil.Process(pid)
        if os.getpid() not in [parent.pid for parent in process.parents()] or not _is_alive(process):
            return False
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until-s", type=float, default=1e9, help="start no further round after so many seconds")
    parser.add_argument("--spawn", action="store_true", help="every process is a new interpreter, which takes seconds")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which is kept")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    with nullcontext(asked.keep) if asked.keep else tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), asked.seed, start="spawn" if asked.spawn else "forkserver")
        figures = chaos.session(asked.kills, until_s=asked.until_s)
    found = {**asdict(figures), "kills": figures.kills.total(), "by_kind": dict(sorted(figures.kills.items()))}
    print(json.dumps(found, indent=1) if asked.json else "\n".join(f"{key}: {value}" for key, value in found.items()))
    return 0 if figures.sound else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
