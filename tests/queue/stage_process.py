"""One stage as a real process: ``python -m tests.queue.stage_process ROLE RUN_DIR SEED [KILL_POINT COUNT]``.

With a kill point, the process sends itself SIGKILL the COUNT-th time that it comes there:

    leased          work is leased, nothing done
    half_payload    half a payload is written under its temporary name
    payload         the payload is in place, the ledger does not know yet
    commit          all statements of a transaction that follows are done, its COMMIT is not
    put             the result is in the ledger
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from asyncopd.queue.doorbell import Doorbell, ring_all
from asyncopd.queue.files import delete_payloads, read_checked, write_packs
from asyncopd.queue.ledger import Lease, Ledger

LEASE_S = 0.5
KILL_POINTS = ("leased", "half_payload", "payload", "commit", "put")


class Fuse:
    """Ends the process at a kill point, the way that nothing can catch."""

    def __init__(self, point: str, count: int) -> None:
        self.point = point
        self.left = count

    def reach(self, point: str) -> None:
        if point == self.point:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, statement: str) -> None:
        if statement == "COMMIT":
            self.reach("commit")


def work(role: str, folder: Path, seed: int, fuse: Fuse) -> None:
    random_ = random.Random(f"{role} {seed}")
    ledger = Ledger.open(folder / "ledger.sqlite")
    ledger._connection.set_trace_callback(fuse.watch)
    bell = Doorbell(folder, f"{role}-{os.getpid()}")
    while not ledger.finished:
        if role == "learner":
            moved = train(ledger, folder, fuse)
        else:
            lease_some = ledger.lease_rollouts if role == "roller" else ledger.lease_scoring
            lease = lease_some(f"{role}-{os.getpid()}", random_.randint(1, 4), LEASE_S)
            if lease is not None:
                produce(ledger, folder, role, lease, random_, fuse)
            moved = lease is not None
        if moved:
            ring_all(folder)
        else:
            bell.wait(0.1)
    bell.close()


def produce(ledger: Ledger, folder: Path, role: str, lease: Lease, random_: random.Random, fuse: Fuse) -> None:
    fuse.reach("leased")
    kind, samples = "rollouts" if role == "roller" else "records", list(lease.samples)
    while samples:
        time.sleep(random_.random() * 0.004)
        ended = [samples.pop(0) for _ in range(random_.randint(1, len(samples)))]
        half = folder / "payloads" / f"{ended[0].uid}.{os.getpid()}.part"
        half.parent.mkdir(exist_ok=True)
        half.write_bytes(b"half")
        fuse.reach("half_payload")
        half.unlink()
        (pack,) = write_packs(folder, kind, [(sample.uid, f"{kind} {sample.uid}".encode()) for sample in ended])
        fuse.reach("payload")
        with ledger.together():
            for sample in ended:
                version, payload = sample.min_version, pack[sample.uid]
                if role == "roller":
                    ledger.put_rollout(lease.token, sample.uid, payload, 5, version, version, "eos")
                else:
                    ledger.put_record(lease.token, sample.uid, payload, 5)
        fuse.reach("put")


def train(ledger: Ledger, folder: Path, fuse: Fuse) -> bool:
    """A step; every second version is checkpointed, before the step commits and half a moment after it is durable."""
    batch = ledger.lease_batch()
    if batch is None:
        return False
    fuse.reach("leased")
    version = ledger.policy_version + 1
    for sample in batch.samples:
        assert read_checked(folder, sample.rollout) == f"rollouts {sample.uid}".encode()
        assert read_checked(folder, sample.record) == f"records {sample.uid}".encode()
    fuse.reach("payload")
    ledger.commit_step(batch, version, published=True)
    fuse.reach("put")
    if version % 2 == 0:
        partial = folder / "checkpoint.part"
        partial.write_text(str(version))
        fuse.reach("half_payload")
        partial.replace(folder / "checkpoint")
        kept = max(0, version - 2)
        delete_payloads(folder, ledger.forget_payloads(kept))
    return True


if __name__ == "__main__":
    role, folder, seed, *rest = sys.argv[1:]
    work(role, Path(folder), int(seed), Fuse(rest[0], int(rest[1])) if rest else Fuse("", 0))
