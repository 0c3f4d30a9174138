"""Busy fractions and overlap are exact."""

import random
import time
from dataclasses import replace

from asyncopd.tracking.activity import (
    busy_along,
    covered_at_least,
    flowed_s,
    intersect,
    length,
    measure,
    subtract,
    union,
)
from asyncopd.tracking.trace import Span, Tracer, read_trace


def span(process: str, name: str, start: float, end: float, thread: str = "main", **numbers: float) -> Span:
    return Span(
        process=process, thread=thread, name=name, start_ns=int(start * 1e9), end_ns=int(end * 1e9), numbers=numbers
    )


def window(start: float, end: float) -> list[tuple[int, int]]:
    return [(int(start * 1e9), int(end * 1e9))]


def test_overlap_is_exact_on_known_intervals():
    spans = [
        span("rollout-0", "decode", 0, 4),
        span("scorer-0", "score", 3, 6),  # overlaps 3..4
        span("learner", "step", 5, 8),  # overlaps 5..6
        span("rollout-0", "decode", 5.5, 7),  # overlaps 6..7; three at once from 5.5 to 6 count once
    ]
    activity = measure(spans, window(0, 10))
    assert activity.overlap == 0.3
    assert activity.busy == {"rollout": 0.55, "teacher": 0.3, "learner": 0.3}


def test_two_processes_of_one_stage_do_not_make_an_overlap():
    spans = [span("rollout-0", "decode", 0, 4), span("rollout-1", "decode", 0, 4)]
    assert measure(spans, window(0, 4)).overlap == 0


def test_busy_is_the_mean_over_the_processes_of_a_stage():
    spans = [span("rollout-0", "decode", 0, 4), span("rollout-1", "decode", 0, 1)]
    assert measure(spans, window(0, 4)).busy["rollout"] == (1 + 0.25) / 2


def test_a_process_without_a_span_counts_as_idle():
    busy = measure([span("rollout-0", "decode", 0, 4)], window(0, 4), ["rollout-0", "rollout-1"]).busy
    assert busy["rollout"] == 0.5


def test_a_wait_is_idle_also_inside_a_span_of_work():
    spans = [span("learner", "step", 0, 10), span("learner", "wait", 2, 5)]
    assert measure(spans, window(0, 10)).busy["learner"] == 0.7


def test_a_wait_in_one_thread_does_not_hide_the_work_of_another():
    spans = [span("learner", "wait", 0, 10), span("learner", "publish", 2, 5, thread="publisher")]
    assert measure(spans, window(0, 10)).busy["learner"] == 0.3


def test_nested_spans_count_once():
    spans = [span("learner", "step", 0, 4), span("learner", "publish", 1, 3)]
    assert measure(spans, window(0, 8)).busy["learner"] == 0.5


def test_tokens_of_a_span_over_the_edge_count_in_proportion():
    spans = [span("rollout-0", "decode", 0, 10, tokens=100)]
    assert measure(spans, window(5, 15)).tokens_per_s["rollout"] == 5.0


def test_tokens_of_an_evaluation_are_not_throughput():
    spans = [span("learner", "step", 0, 1, tokens=10), span("learner", "evaluate", 1, 2, tokens=999)]
    assert measure(spans, window(0, 2)).tokens_per_s["learner"] == 5.0


def test_work_outside_the_windows_does_not_count():
    spans = [span("learner", "step", 0, 100)]
    pause = window(0, 1) + window(50, 51)
    activity = measure(spans, pause)
    assert activity.wall_s == 2
    assert activity.busy["learner"] == 1


def test_an_empty_window_gives_zeros():
    assert measure([span("learner", "step", 0, 1)], []).busy["learner"] == 0


def test_interval_operations_agree_with_counting_points():
    generator = random.Random(0)
    for _ in range(200):
        layers = [
            union((start, start + generator.randint(0, 9)) for start in generator.choices(range(30), k=4))
            for _ in range(3)
        ]
        points = [{point for start, end in layer for point in range(start, end)} for layer in layers]
        assert {p for s, e in intersect(layers[0], layers[1]) for p in range(s, e)} == points[0] & points[1]
        assert {p for s, e in subtract(layers[0], layers[1]) for p in range(s, e)} == points[0] - points[1]
        twice = {p for p in range(50) if sum(p in layer for layer in points) >= 2}
        assert {p for s, e in covered_at_least(2, layers) for p in range(s, e)} == twice
        assert length(layers[2]) == len(points[2])


def test_flowed_time_leaves_pauses_out():
    windows = window(10, 20) + window(100, 110)
    assert [flowed_s(int(t * 1e9), windows) for t in (0, 15, 50, 105, 500)] == [0, 5, 10, 15, 20]


def test_busy_along_the_run_is_what_measure_gives_for_each_piece():
    generator = random.Random(1)
    names = ("rollout-0", "rollout-1", "scorer-0", "learner")
    spans = []
    for start in range(40):
        name = generator.choice(["step", "wait", "decode"])
        spans.append(span(generator.choice(names), name, start, start + generator.randint(1, 5)))
    pieces = [piece for second in range(0, 45, 3) for piece in window(second, second + 3)]
    whole = measure(spans, window(0, 45)).busy
    along = busy_along(spans, pieces)
    for stage in whole:
        assert abs(sum(busy[stage] for busy in along) / len(along) - whole[stage]) < 1e-9


def clocked(process: str, start: float, end: float, cpu: float) -> Span:
    return replace(span(process, "work", start, end), cpu_ns=int(cpu * 1e9))


def test_cpu_seconds_are_those_that_the_process_clock_went_on_by_within_the_windows():
    spans = [
        clocked("rollout-0", 0, 1, 5.0),
        clocked("rollout-0", 1, 2, 5.5),
        clocked("rollout-0", 2, 4, 7.5),  # half of it lies in the window
        clocked("rollout-1", 0, 1, 3.0),
        clocked("rollout-1", 1, 3, 4.0),
        span("rollout-1", "work", 3, 4),  # says nothing
    ]
    assert measure(spans, window(1, 3)).cpu_s == {"rollout": 0.5 + 1.0 + 1.0, "teacher": 0, "learner": 0}


def test_a_process_started_again_takes_no_negative_cpu_time():
    spans = [clocked("scorer-0", 0, 1, 9.0), clocked("scorer-0", 2, 3, 1.0), clocked("scorer-0", 3, 4, 1.5)]
    assert measure(spans, window(0, 4)).cpu_s["teacher"] == 0.5


def test_a_tracer_reads_the_cpu_clock_of_its_process(tmp_path):
    with Tracer(tmp_path, "rollout-0") as tracer:
        for _ in range(2):
            with tracer.span("decode"):
                began = time.process_time()
                while time.process_time() - began < 0.02:
                    pass
    first, second = (each.cpu_ns for each in read_trace(tmp_path).spans)
    assert first is not None
    assert second is not None
    assert 0.02e9 <= second - first <= time.process_time_ns()
