"""A plausible run folder without a run: a small simulation of the pipeline, written by the library's own writers.

Two rollout workers, one scorer and one learner share a queue with a bound on the age of a sample; durations are drawn,
the losses follow a curve. Everything is a function of the seed.
"""

import heapq
import math
import random
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from asyncopd.tracking import trace
from asyncopd.tracking.jsonl import JsonLinesWriter
from asyncopd.tracking.keys import LIVE_STATES, staleness_key
from asyncopd.tracking.metrics import EVALUATIONS_FILE, METRICS_FILE
from asyncopd.tracking.run_facts import RunFacts

ANSWERS = [
    (
        "How do I keep basil alive on a windowsill?",
        "Water it when the top of the soil is dry and give it six hours of sun.",
    ),
    ("Write two lines about rain.", "Rain taps the roof and hums along,\nthe gutters answer with a song."),
]
BABBLE = [
    (
        "How do I keep basil alive on a windowsill?",
        "Basil is a window is a window and the the basil. The window basil of",
    ),
    ("Write two lines about rain.", "Rain, rain, the rain is the line of the line. Two lines <b>two</b>"),
]


@dataclass(kw_only=True)
class FakeRun:
    """Parameters of the simulation; times in seconds of simulated wall clock, which ends now."""

    steps: int = 60
    batch_size: int = 12
    max_staleness: int = 2
    seed: int = 7
    decode_s: float = 5.5
    score_s: float = 2.6
    step_s: float = 4.0
    evaluate_every: int = 20
    finished: bool = True
    _random: random.Random = field(init=False, repr=False)

    def write(self, run_dir: Path) -> Path:
        """Simulate, and write run.json, metrics.jsonl, evaluations.jsonl and the traces."""
        self._random = random.Random(self.seed)
        RunFacts(
            name=run_dir.name,
            mode="async",
            steps=self.steps,
            batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            description={
                "Teacher": "SmolLM2-135M-Instruct",
                "Student": "the same without 6 of its 30 layers",
                "Objective": "reverse_kl, systematic design, 16 candidates",
            },
        ).write(run_dir)
        (run_dir / "config.yaml").write_text("mode: async\nqueue:\n  max_staleness: 2\nlearner:\n  lr: 0.0002\n")
        events = self._simulate()
        end = max(event["end"] for event in events["spans"])
        origin = time.time() - end - 1.0
        _write_traces(run_dir, events, origin, finished=self.finished)
        _write_rows(run_dir / METRICS_FILE, events["metrics"], origin)
        _write_rows(run_dir / EVALUATIONS_FILE, events["evaluations"], origin)
        return run_dir

    def _duration(self, mean: float) -> float:
        return mean * math.exp(self._random.gauss(0, 0.18))

    def _simulate(self) -> dict[str, list]:
        """Workers and learner as a clock queue; batches of `batch_size` samples keep their order."""
        spans: list[dict] = []
        metrics: list[dict] = []
        evaluations: list[dict] = []
        start, batches, version = 6.0, 0, 0
        self._evaluation(evaluations, metrics, 0, 5.0)
        spans.append(_span("learner", "evaluate", 0.2, 5.0, {"tokens": 1900}))
        rolled: list[tuple[float, int, int]] = []
        scored: dict[int, tuple[float, int]] = {}
        free = [(start, worker) for worker in range(2)]
        scorer_free = learner_free = start
        while version < self.steps:
            while free and batches < self.steps and batches <= version + self.max_staleness:
                began, worker = heapq.heappop(free)
                began = max(began, start if batches <= self.max_staleness else learner_free - self.step_s * 1.2)
                took = self._duration(self.decode_s)
                tokens = self.batch_size * self._random.randint(38, 48)
                spans.append(_span(f"rollout-{worker}", "load_weights", began, began + 0.15, {"version": version}))
                numbers = {"tokens": tokens, "samples": self.batch_size, "version": version}
                spans.append(_span(f"rollout-{worker}", "decode", began + 0.15, began + 0.15 + took, numbers))
                rolled.append((began + 0.15 + took, batches, version))
                heapq.heappush(free, (began + 0.2 + took, worker))
                batches += 1
            rolled.sort()
            while rolled:
                ready, batch, born = rolled.pop(0)
                began = max(ready, scorer_free)
                scorer_free = began + self._duration(self.score_s)
                numbers = {"tokens": self.batch_size * 43, "samples": self.batch_size}
                spans.append(_span("scorer-0", "score", began, scorer_free, numbers))
                scored[batch] = (scorer_free, born)
            ready, born = scored.pop(version)
            began = max(ready, learner_free)
            spans.append(_span("learner", "wait", learner_free, began, {}))
            ended = began + self._duration(self.step_s)
            numbers = {"tokens": self.batch_size * 43, "samples": self.batch_size, "version": version + 1}
            spans.append(_span("learner", "step", began, ended, numbers))
            spans.append(_span("learner", "publish", ended, ended + 0.3, {"version": version + 1}))
            version += 1
            self._metrics_row(metrics, version, ended, version - 1 - born, began - learner_free, ended - began)
            learner_free = ended + 0.3
            if version % 25 == 0:
                spans.append(_span("learner", "checkpoint", learner_free, learner_free + 1.2, {}))
                learner_free += 1.2
            if version % self.evaluate_every == 0 and version < self.steps:
                spans.append(_span("learner", "evaluate", learner_free, learner_free + 4, {"tokens": 1900}))
                learner_free += 4
                self._evaluation(evaluations, metrics, version, learner_free)
        marks = [{"process": "learner", "name": "run", "time": start}]
        if self.finished:
            marks.append({"process": "learner", "name": "run_end", "time": learner_free})
            spans.append(_span("learner", "evaluate", learner_free, learner_free + 4, {"tokens": 1900}))
            self._evaluation(evaluations, metrics, version, learner_free + 4)
        return {"spans": spans, "marks": marks, "metrics": metrics, "evaluations": evaluations}

    def _kl(self, version: int) -> float:
        return 0.38 + 0.82 * math.exp(-version / (0.3 * self.steps))

    def _metrics_row(self, metrics: list, version: int, ended: float, age: int, wait_s: float, step_s: float) -> None:
        kl = self._kl(version) * math.exp(self._random.gauss(0, 0.09))
        ages = Counter({age: self.batch_size})
        if age and self._random.random() < 0.5:
            ages = Counter({age: self.batch_size - 4, age - 1: 4})
        row = {
            "policy_version": version,
            "time": ended,
            "loss": kl * 1.02,
            "divergence": kl,
            "grad_norm": 1.8 * math.exp(-version / 50) * math.exp(self._random.gauss(0, 0.2)),
            "lr": 2e-4 * min(1.0, version / 6) * (1 - 0.8 * version / self.steps),
            "tokens": self.batch_size * 43.0,
            "step_s": step_s,
            "wait_s": wait_s,
            "forward_s": 0.6 * step_s,
            "backward_s": 0.3 * step_s,
            "mfu": 0.4,
            "memory_gb": 2.0 + version / 100,
            "staleness/mean": sum(a * n for a, n in ages.items()) / self.batch_size,
            "staleness/max": float(max(ages)),
            "entropy": 1.9 + self._random.gauss(0, 0.05),
        }
        if 0 in ages:
            row["logprob_gap/staleness_0"] = 0.004 + abs(self._random.gauss(0, 0.001))
            row["tokens/staleness_0"] = ages[0] * 43.0
        row |= {staleness_key("training", a): float(n) for a, n in ages.items()}
        row |= {staleness_key("in_flight", a): float(self._random.randint(4, 12)) for a in (0, 1)}
        row |= {staleness_key("in_queue", a): float(self._random.randint(2, 14)) for a in range(self.max_staleness + 1)}
        sizes = (0, 11, 4, 9, 13, 0)
        for state, size in zip(LIVE_STATES, sizes, strict=True):
            row[f"queue/{state}"] = float(max(0, size + self._random.randint(-4, 4) if size else 0))
        metrics.append(row)

    def _evaluation(self, evaluations: list, metrics: list, version: int, ended: float) -> None:
        reverse, forward = self._kl(version), 0.9 * self._kl(version) + 0.05
        share = min(0.92, 0.4 + version / self.steps * 0.6)
        values = {"reverse_kl": (reverse, 0.05), "forward_kl": (forward, 0.06), "mean_length": (41.0, 1.6)}
        record: dict = {"policy_version": version, "time": ended, "eos_share": share}
        record |= {name: {"mean": mean, "ci95": ci95} for name, (mean, ci95) in values.items()}
        record["samples"] = [list(pair) for pair in (ANSWERS if version > self.steps / 2 else BABBLE)]
        evaluations.append(record)
        row: dict = {"policy_version": version, "time": ended, "held_out/eos_share": share}
        for name, (mean, ci95) in values.items():
            row |= {f"held_out/{name}/mean": mean, f"held_out/{name}/ci95": ci95}
        metrics.append(row)


def _span(process: str, name: str, start: float, end: float, numbers: dict) -> dict:
    return {"process": process, "name": name, "start": start, "end": end, "numbers": numbers}


def _write_rows(path: Path, rows: list[dict], origin: float) -> None:
    writer = JsonLinesWriter(path)
    for row in rows:
        writer.append({**row, "time": origin + row["time"]})
    writer.close()


def _write_traces(run_dir: Path, events: dict[str, list], origin: float, *, finished: bool) -> None:
    for process in ("rollout-0", "rollout-1", "scorer-0", "learner"):
        own = [{"at": mark["time"], "event": mark} for mark in events["marks"] if mark["process"] == process]
        own += [{"at": event["start"], "event": event} for event in events["spans"] if event["process"] == process]
        clock = _Clock(origin)
        with _clocked(clock):
            tracer = trace.Tracer(run_dir, process)
            for item in sorted(own, key=lambda item: item["at"]):
                event = item["event"]
                clock.now = item["at"]
                if "time" in event:
                    tracer.instant(event["name"])
                    continue
                with tracer.span(event["name"], **event["numbers"]):
                    clock.now = event["end"]
            if finished:
                tracer.close()


class _Clock:
    """Stands in for the `time` module inside the tracer."""

    def __init__(self, origin: float) -> None:
        self.origin = origin
        self.now = 0.0

    def time_ns(self) -> int:
        return int((self.origin + self.now) * 1e9)

    def process_time_ns(self) -> int:
        return self.time_ns()

    def perf_counter_ns(self) -> int:
        return int(self.now * 1e9)


@contextmanager
def _clocked(clock: _Clock):
    real, trace.time = trace.time, clock
    try:
        yield
    finally:
        trace.time = real
