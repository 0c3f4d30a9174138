"""The sample queue's benchmark through TransferQueue: ``transferqueue`` 0.1.11 and ``ray`` 2.60, neither required.

The way of a sample is that of ``tests.benchmarks.queue``, call for call, with the same sizes, counts and processes:

    ledger                                      TransferQueue
    admission of a batch, in lease_rollouts     put of a batch's prompts (8 bytes each)
    lease_rollouts, lease_scoring (8 samples)   get_meta(mode="fetch") of 8 samples
    write_packs, put_rollout or put_record      put of a row's ``rollout`` or ``record``
    read_checked, by the scorer                 get_data of 8 samples
    lease_batch, read_checked, by the learner   get_meta(mode="fetch") and get_data of a batch
    commit_step, forget_payloads                clear_samples

The ledger puts one sample at a time, as samples finish; so do the cases without a remark. Those that end in "puts of 8"
use TransferQueue as it is meant, many rows a put; a worker does so with the ledger where answers end at once, which is
not measured here. A rate is the best of three passes, each over a third of the ledger's samples (the ledger has one
pass); one over two batches opens the connections before. The start of ray and TransferQueue, some 15 s, is not counted.

Comparable: payload bytes, samples in flight, batch, polling of idle workers (2 ms), machine. Not comparable:
TransferQueue keeps payloads in the memory of its storage processes, so that a kill loses all since the last checkpoint
asked for by hand (none here); it checks no checksum, takes nothing back from a dead worker, and knows no staleness. The
ledger pays for all these. Each call of TransferQueue in turn crosses to a controller and two storage processes (its
defaults), which can serve other machines and here compete with the workers for CPUs; the ledger is files on one.
"""

import os
import time
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray
import torch
from tensordict import TensorDict

# TransferQueue reads it when it is imported. Its default of 8 has every process log a warning at every put and get on a
# machine with fewer cores, and then go on with this number.
os.environ["TQ_NUM_THREADS"] = str(min(8, psutil.cpu_count(logical=False) or 1))
import transfer_queue

LEASE = 8
WARM_UP_STEPS = 2
PASSES = 3
DONE = "done with "
"""Begins the name of the partition that tells the other workers that all steps are committed."""


@dataclass(frozen=True, slots=True)
class Case:
    """``steps`` batches of ``batch`` samples, of which at most ``window`` batches are admitted and not yet trained.

    size    bytes of a rollout, and of a record
    a_put   samples a put
    """

    partition: str
    processes: int
    size: int
    a_put: int
    steps: int
    batch: int
    window: int


class Worker:
    """A process of the benchmark."""

    def __init__(self) -> None:
        transfer_queue.init()
        self._client = transfer_queue.get_client()

    def _fetch(self, case: Case, task: str, fields: list[str], count: int) -> Any | None:
        """``count`` samples that have ``fields`` and were given to no worker for ``task``; None if there are fewer."""
        meta = self._client.get_meta(fields, count, case.partition, mode="fetch", task_name=task)
        return meta if meta.size else None

    def _get(self, case: Case, meta: Any, fields: list[str]) -> None:
        data = self._client.get_data(meta)
        for field in fields:
            assert [len(row) for row in data[field].unbind()] == [case.size] * meta.size

    def _put(self, case: Case, meta: Any, field: str) -> None:
        for first in range(0, meta.size, case.a_put):
            some = meta.select_samples(list(range(first, min(first + case.a_put, meta.size))))
            data = torch.zeros(some.size, case.size, dtype=torch.uint8)
            self._client.put(TensorDict({field: data}, batch_size=some.size), metadata=some)

    def _turn(self, case: Case) -> bool:
        """Generate and score up to a lease of samples; whether there was anything to do."""
        rolling = self._fetch(case, "roll", ["prompt"], LEASE)
        if rolling is not None:
            self._put(case, rolling, "rollout")
        scoring = self._fetch(case, "score", ["rollout"], LEASE)
        if scoring is not None:
            self._get(case, scoring, ["rollout"])
            self._put(case, scoring, "record")
        return rolling is not None or scoring is not None

    def _train(self, case: Case) -> bool:
        batch = self._fetch(case, "train", ["rollout", "record"], case.batch)
        if batch is None:
            return False
        self._get(case, batch, ["rollout", "record"])
        self._client.clear_samples(batch)
        return True

    def learn(self, case: Case) -> float:
        """Admit, work and train until all steps are committed; samples a second since the first was admitted."""
        began, admitted, trained = time.perf_counter(), 0, 0
        prompts = TensorDict({"prompt": torch.zeros(case.batch, 1, dtype=torch.int64)}, batch_size=case.batch)
        while trained < case.steps:
            while admitted < min(case.steps, trained + case.window):
                self._client.put(prompts, partition_id=case.partition)
                admitted += 1
            moved = self._turn(case)
            if self._train(case):
                trained += 1
            elif not moved:
                time.sleep(0.002)
        rate = case.steps * case.batch / (time.perf_counter() - began)
        self._client.put(TensorDict({"done": torch.ones(1, 1)}, batch_size=1), partition_id=DONE + case.partition)
        return rate

    def assist(self, case: Case) -> None:
        """Work until the learner is done."""
        while True:
            if self._turn(case):
                continue
            if DONE + case.partition in self._client.get_partition_list():
                return
            time.sleep(0.002)


def run_case(workers: list[Any], case: Case) -> float:
    """Samples a second."""
    assisting = [worker.assist.remote(case) for worker in workers[1 : case.processes]]
    rate = ray.get(workers[0].learn.remote(case))
    ray.get(assisting)
    return float(rate)


def transferqueue_speeds(runs: dict[str, tuple[int, int, int]], batch: int, window: int) -> dict[str, float]:
    """Samples a second by case: each of ``runs`` (processes, bytes, steps), and the same with "puts of 8"."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Its default of 15 lets whatever else the machine does slow down TransferQueue, but not the ledger: by half, once.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    # Its controller and two storage processes each ask ray for a CPU, however many the machine has.
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        transfer_queue.init({"controller": {"polling_mode": True}})
        workers = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(max(run[0] for run in runs.values()))]
        speeds = {}
        for name, (processes, size, steps) in runs.items():
            for a_put, remark in ((1, ""), (LEASE, f", puts of {LEASE}")):
                case = Case("warm-up " + name + remark, processes, size, a_put, WARM_UP_STEPS, batch, window)
                run_case(workers, case)
                part = replace(case, steps=max(1, steps // PASSES))
                # Other work of the machine only ever slows a pass down.
                speeds[name + remark] = max(
                    run_case(workers, replace(part, partition=f"{place} {name}{remark}")) for place in range(PASSES)
                )
        return speeds
    finally:
        transfer_queue.close()
        ray.shutdown()
