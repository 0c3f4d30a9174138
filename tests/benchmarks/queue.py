"""What the sample queue costs, and what each selection policy gains: ``python -m tests.benchmarks.queue --json``.

samples_per_s       through admit, roll, score, lease and commit, by processes and payload size; each sample has a
                    rollout and a record of that size, both written and read back with checksum
cpu_us_a_sample     CPU time of all processes together for the same, which other work on the machine disturbs less
growth_10k_to_1m    CPU time of one sample with 1,000,000 rows in the ledger over that with 10,000 (ledger calls only)
step_share          share of an optimizer step of --step-s seconds that the queue takes for --batch-size samples
ratio_to_transferqueue      samples/s over TransferQueue's with the same payloads, by case; what that compares is in
                    tests.benchmarks.transferqueue_driver. null if the packages transferqueue and ray are not installed
transferqueue_samples_per_s     the same for TransferQueue; null likewise
policies            selection policies on long-tailed lengths, in simulated time (tests.benchmarks.queue_policies)
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncopd.queue.files import read_checked, write_packs
from asyncopd.queue.ledger import Ledger, LedgerPlan, PayloadRef
from asyncopd.queue.rows import payload_columns
from tests.benchmarks.queue_policies import simulate_all

BATCH = 64
HOUR_S = 3600.0
KB, MB = 1000, 1_000_000


def plan_of(steps: int, **changes: Any) -> LedgerPlan:
    usual: dict[str, Any] = {
        "seed": 0, "prompts": 100_000, "samples_per_prompt": 4, "batch_size": BATCH, "steps": steps,
        "max_staleness": 4, "lag": None, "group_size": 1, "shuffle": True,
    }  # fmt: skip
    return LedgerPlan(**{**usual, **changes})


def turn(ledger: Ledger, folder: Path, data: bytes, count: int) -> bool:
    """Generate and score up to ``count`` samples; whether there was anything to do."""
    rolling = ledger.lease_rollouts("bench", count, HOUR_S)
    for sample in rolling.samples if rolling else ():
        (pack,) = write_packs(folder, "rollouts", [(sample.uid, data)])
        version = sample.min_version
        ledger.put_rollout(rolling.token, sample.uid, pack[sample.uid], 100, version, version, "eos")
    scoring = ledger.lease_scoring("bench", count, HOUR_S)
    for sample in scoring.samples if scoring else ():
        assert sample.rollout is not None
        read_checked(folder, sample.rollout)
        (pack,) = write_packs(folder, "records", [(sample.uid, data)])
        ledger.put_record(scoring.token, sample.uid, pack[sample.uid], 100)
    return rolling is not None or scoring is not None


def train(ledger: Ledger, folder: Path) -> bool:
    batch = ledger.lease_batch()
    if batch is None:
        return False
    for sample in batch.samples:
        read_checked(folder, sample.rollout)
        read_checked(folder, sample.record)
    ledger.commit_step(batch, ledger.policy_version + 1, True)
    # The files stay until the benchmark is over: to make a file, ext4 searches past every inode that was freed in the
    # last minute, which at thousands of files a second would be most of what is measured.
    ledger.forget_payloads(ledger.policy_version)
    return True


def work(folder: Path, size: int, learner: bool) -> None:
    """One process of the benchmark; the first also learns. It starts when it reads a line."""
    data = bytes(size)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.process_time()
        while not ledger.finished:
            moved = turn(ledger, folder, data, 8)
            moved |= learner and train(ledger, folder)
            if not moved:
                time.sleep(0.002)
    print(time.process_time() - began, flush=True)


def run_processes(folder: Path, processes: int, size: int, steps: int) -> tuple[float, float]:
    """Samples a second, and CPU microseconds a sample."""
    with Ledger.create(folder / "ledger.sqlite", plan_of(steps)) as ledger:
        ledger.publish(0)
    command = [sys.executable, "-m", "tests.benchmarks.queue", "--work", str(folder), str(size)]
    running = [
        subprocess.Popen([*command, str(int(place == 0))], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for place in range(processes)
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    cpu_s = 0.0
    for process in running:
        told, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a process of the benchmark ended with {process.returncode}")
        cpu_s += float(told)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        first, last = ledger._connection.execute("SELECT min(admitted_s), max(final_s) FROM samples").fetchone()
    return steps * BATCH / (last - first), cpu_s * 1e6 / (steps * BATCH)


def fill(ledger: Ledger, rows: int) -> None:
    """A history of ``rows`` trained samples, as a long run leaves it."""
    steps = rows // BATCH
    connection = ledger._connection
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ? - 1)"
        " INSERT INTO samples (ordinal, slot, attempt, prompt_index, state, min_version, token, rolled_by, scored_by,"
        f" {payload_columns('rollout')}, finish, tokens, oldest_version, newest_version, {payload_columns('record')},"
        " valid_tokens, final_at, forgotten, admitted_s, rolled_s, scored_s, final_s)"
        " SELECT i, i, 0, i, 6, i / ?, 1, 1, 1, 'payloads/rollouts/0/0/' || i || '-0-0-0.pack', 0, 9, 'crc32:0',"
        " 'eos', 100, i / ?, i / ?, 'payloads/records/0/0/' || i || '-0-0-0.pack', 0, 9, 'crc32:0', 100,"
        " i / ? + 1, 1, 0, 0, 0, 0 FROM n",
        (steps * BATCH, BATCH, BATCH, BATCH, BATCH),
    )
    connection.executemany(
        "INSERT INTO steps VALUES (?, 0, 64, 0, 0, 6400, 0, 0, ?, ?, 0, 0)",
        [(step, step * BATCH, step * BATCH * 100) for step in range(1, steps + 1)],
    )
    connection.execute("UPDATE run SET policy_version = ?, next_slot = ?", (steps, steps * BATCH))
    connection.executemany("INSERT INTO published VALUES (?)", [(step,) for step in range(1, steps + 1)])
    connection.execute("COMMIT")


def seconds_a_sample(rows: int, measured_steps: int, rounds: int) -> float:
    """CPU time of the ledger calls alone, with ``rows`` rows of history, counts and staleness read each step."""
    folder = Path(tempfile.mkdtemp(prefix="queue-growth-"))
    ref = PayloadRef(path="payloads/rollouts/0/0/some-0-0-0.pack", offset=0, bytes=9, checksum="crc32:0")
    try:
        with Ledger.create(folder / "ledger.sqlite", plan_of(10**6)) as ledger:
            ledger.publish(0)
            fill(ledger, rows)
            best = float("inf")
            for _ in range(rounds + 1):
                began, first = time.process_time(), ledger.policy_version
                while ledger.policy_version < first + measured_steps:
                    rolling = ledger.lease_rollouts("bench", 8, HOUR_S)
                    for sample in rolling.samples if rolling else ():
                        version = sample.min_version
                        ledger.put_rollout(rolling.token, sample.uid, ref, 100, version, version, "eos")
                    scoring = ledger.lease_scoring("bench", 8, HOUR_S)
                    for sample in scoring.samples if scoring else ():
                        ledger.put_record(scoring.token, sample.uid, ref, 100)
                    batch = ledger.lease_batch()
                    if batch is not None:
                        ledger.commit_step(batch, ledger.policy_version + 1, True)
                        ledger.check_invariant()
                        ledger.counts()
                        ledger.staleness()
                        ledger.forget_payloads(ledger.policy_version)
                # The least disturbed round: other processes of the machine only ever add.
                best = min(best, (time.process_time() - began) / (measured_steps * BATCH))
            return best
    finally:
        shutil.rmtree(folder)


def compare(speeds: dict[str, float], runs: dict[str, tuple[int, int, int]]) -> dict[str, Any]:
    """TransferQueue's samples a second and the ratios to it; nothing, with the reason on stderr, if there is none."""
    missing = [name for name in ("transfer_queue", "ray") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"ratio_to_transferqueue is null: {', '.join(missing)} cannot be imported", file=sys.stderr)
        return {"ratio_to_transferqueue": None, "transferqueue_samples_per_s": None}
    from tests.benchmarks.transferqueue_driver import transferqueue_speeds

    theirs = transferqueue_speeds(runs, BATCH, plan_of(1).max_staleness + 1)
    ratios = {case: speeds[case.split(", puts")[0]] / rate for case, rate in theirs.items()}
    return {"ratio_to_transferqueue": ratios, "transferqueue_samples_per_s": theirs}


def measure(steps: int, measured_steps: int, rows: list[int], step_s: float | None, batch_size: int) -> dict[str, Any]:
    speeds, cpu, runs = {}, {}, {}
    with tempfile.TemporaryDirectory(prefix="queue-bench-") as parent:
        for size, name in ((10 * KB, "10 kB"), (MB, "1 MB")):
            for processes in (1, 2, 4):
                case = f"{processes} processes, {name}"
                folder = Path(parent) / case.replace(" ", "")
                folder.mkdir()
                count = steps if size < MB else max(2, steps // 10)
                runs[case] = (processes, size, count)
                speeds[case], cpu[case] = run_processes(folder, processes, size, count)
    costs = {str(count): seconds_a_sample(count, measured_steps, rounds=4) for count in rows}
    share = None if step_s is None else batch_size / speeds["1 processes, 10 kB"] / step_s
    return {
        "samples_per_s": speeds,
        "cpu_us_a_sample": cpu,
        "cpu_us_a_sample_by_rows": {count: cost * 1e6 for count, cost in costs.items()},
        "growth_10k_to_1m": costs[str(rows[-1])] / costs[str(rows[0])],
        "step_share": share,
        **compare(speeds, runs),
        "policies": simulate_all(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="benchmark of the sample queue")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer samples, up to 100,000 rows")
    parser.add_argument("--step-s", type=float, help="seconds of an optimizer step, for step_share")
    parser.add_argument("--batch-size", type=int, default=BATCH, help="samples of that step")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        folder, size, learner = options.work
        work(Path(folder), int(size), learner == "1")
        return
    rows = [10_000, 100_000] if options.quick else [10_000, 100_000, 1_000_000]
    found = measure(10 if options.quick else 60, 10, rows, options.step_s, options.batch_size)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        print(f"{key}: {json.dumps(value, indent=2)}")


if __name__ == "__main__":
    main()
