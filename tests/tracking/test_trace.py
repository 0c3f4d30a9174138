"""The trace survives a kill, lines processes up, and opens in a trace viewer."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from asyncopd.tracking import chrome_trace
from asyncopd.tracking import trace as trace_module
from asyncopd.tracking.activity import run_windows
from asyncopd.tracking.chrome_trace import write_chrome_trace
from asyncopd.tracking.trace import TraceFollower, Tracer, read_trace, stage_of


def test_numbers_added_before_a_span_closes_are_in_it(tmp_path: Path):
    with Tracer(tmp_path, "rollout-0") as tracer, tracer.span("decode", samples=12) as span:
        span.add(tokens=100)
        span.add(tokens=92)
    (recorded,) = read_trace(tmp_path).spans
    assert recorded.numbers == {"samples": 12, "tokens": 192}
    assert recorded.stage == "rollout"


def test_a_span_is_recorded_when_its_block_raises(tmp_path: Path):
    tracer = Tracer(tmp_path, "learner")
    with pytest.raises(RuntimeError), tracer.span("step"):
        raise RuntimeError
    assert [span.name for span in read_trace(tmp_path).spans] == ["step"]


def test_a_span_lies_on_the_wall_clock_and_never_ends_before_it_starts(tmp_path: Path, monkeypatch):
    before = time.time_ns()
    tracer = Tracer(tmp_path, "learner")
    with tracer.span("step"):
        monkeypatch.setattr("asyncopd.tracking.trace.time.time_ns", lambda: 0)  # the clock is set back
    monkeypatch.undo()
    (span,) = read_trace(tmp_path).spans
    assert before <= span.start_ns <= span.end_ns <= time.time_ns()


def test_a_torn_last_line_is_skipped_and_the_next_writer_starts_afresh(tmp_path: Path):
    with Tracer(tmp_path, "learner") as tracer, tracer.span("step"):
        pass
    path = tmp_path / "trace" / "learner.jsonl"
    with path.open("a") as file:
        file.write('{"kind":"span","name":"st')
    assert len(read_trace(tmp_path).spans) == 1
    with Tracer(tmp_path, "learner") as tracer, tracer.span("publish"):
        pass
    assert [span.name for span in read_trace(tmp_path).spans] == ["step", "publish"]


def test_a_sigkill_loses_at_most_the_open_span(tmp_path: Path):
    program = (
        "import sys, time; from pathlib import Path; from asyncopd.tracking.trace import Tracer\n"
        "tracer = Tracer(Path(sys.argv[1]), 'rollout-0')\n"
        "for _ in range(3):\n"
        "    with tracer.span('decode', tokens=1): pass\n"
        "with tracer.span('decode'):\n"
        "    sys.stdout.write('open'); sys.stdout.flush(); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(4) == b"open"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    trace = read_trace(tmp_path)
    assert len(trace.spans) == 3
    assert [span.name for span in trace.open_spans.values()] == ["decode"]
    assert not trace.processes["rollout-0"].ended


def test_a_process_that_fails_does_not_read_as_ended_on_purpose(tmp_path: Path):
    with pytest.raises(RuntimeError), Tracer(tmp_path, "scorer-0"):
        raise RuntimeError
    with Tracer(tmp_path, "rollout-0"):
        pass
    ended = {name: process.ended for name, process in read_trace(tmp_path).processes.items()}
    assert ended == {"rollout-0": True, "scorer-0": False}


def test_a_restarted_process_forgets_what_was_open(tmp_path: Path):
    first = Tracer(tmp_path, "rollout-0")
    span = first.span("decode")
    span.__enter__()
    Tracer(tmp_path, "rollout-0")
    assert read_trace(tmp_path).open_spans == {}


def test_threads_write_whole_lines(tmp_path: Path):
    tracer = Tracer(tmp_path, "learner")

    def work() -> None:
        for _ in range(200):
            with tracer.span("step", tokens=3):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace = read_trace(tmp_path)
    assert len(trace.spans) == 800
    assert len({span.thread for span in trace.spans}) == 4
    assert not trace.open_spans


def test_the_time_between_a_stop_and_a_resume_is_not_wall_time(tmp_path: Path, monkeypatch):
    clock = {"now": 0}
    monkeypatch.setattr("asyncopd.tracking.trace.time.time_ns", lambda: clock["now"] * 10**9)
    monkeypatch.setattr("asyncopd.tracking.trace.time.perf_counter_ns", lambda: clock["now"] * 10**9)
    for start in (10, 100):
        clock["now"] = start
        tracer = Tracer(tmp_path, "learner")
        tracer.instant("run")
        with tracer.span("step"):
            clock["now"] = start + 5
    tracer.instant("run_end")
    clock["now"] = 120
    tracer.instant("reported")
    assert run_windows(read_trace(tmp_path)) == [(10 * 10**9, 15 * 10**9), (100 * 10**9, 105 * 10**9)]


def test_following_a_trace_gives_what_reading_it_gives(tmp_path: Path):
    follower = TraceFollower(tmp_path)
    tracer = Tracer(tmp_path, "learner")
    tracer.instant("run")
    for _ in range(3):
        with tracer.span("step"):
            follower.read()
    assert follower.read() == read_trace(tmp_path)


def test_a_watcher_forgets_old_spans_but_not_when_the_run_began(finished_run: Path):
    trace = TraceFollower(finished_run, keep_s=20).read()
    assert 0 < len(trace.spans) < 40
    assert trace.flow == read_trace(finished_run).flow


def test_a_watcher_of_a_long_trace_forgets_while_it_reads(finished_run: Path, monkeypatch):
    monkeypatch.setattr(trace_module, "_SPANS_AT_ONCE", 3)
    most = 0
    take = trace_module.Trace.take

    def counting(self: trace_module.Trace, *record: object) -> None:
        nonlocal most
        take(self, *record)
        most = max(most, len(self.spans))

    monkeypatch.setattr(trace_module.Trace, "take", counting)
    assert TraceFollower(finished_run, keep_s=0.001).read().spans == []
    assert most == 3 < len(read_trace(finished_run).spans)


def test_the_chrome_trace_of_a_long_run_holds_its_end(finished_run: Path, monkeypatch, caplog):
    monkeypatch.setattr(chrome_trace, "MOST_SPANS", 5)
    events = json.loads(write_chrome_trace(finished_run).read_text())["traceEvents"]
    newest = sorted(read_trace(finished_run).spans, key=lambda span: span.start_ns)[-5:]
    assert [event["name"] for event in events if event["ph"] == "X"] == [span.name for span in newest]
    assert "the last 5 of" in caplog.text


def test_the_chrome_trace_names_processes_and_has_complete_events(finished_run: Path):
    document = json.loads(write_chrome_trace(finished_run).read_text())
    events = document["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rollout-0", "rollout-1", "scorer-0", "learner"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"MainThread"}
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(read_trace(finished_run).spans)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in complete)
    steps = [event for event in complete if event["name"] == "step"]
    assert len(steps) == 60
    assert steps[0]["args"]["samples"] == 12
    assert 1e6 < steps[0]["dur"] < 20e6  # microseconds


def test_the_chrome_trace_of_an_empty_run_opens(tmp_path: Path):
    assert json.loads(write_chrome_trace(tmp_path).read_text())["traceEvents"] == []


@pytest.mark.parametrize(
    ("process", "stage"),
    [("rollout-3", "rollout"), ("scorer-0", "teacher"), ("learner", "learner"), ("learner-1", "learner")],
)
def test_the_stage_of_a_process_is_in_its_name(process: str, stage: str):
    assert stage_of(process) == stage
