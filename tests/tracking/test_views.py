"""What a person sees of a run: snapshot, live view, table at the end."""

import io
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_run import ANSWERS, BABBLE, FakeRun
from rich.console import Console

from asyncopd.errors import AsyncOPDError
from asyncopd.queue.ledger import Ledger, LedgerPlan
from asyncopd.tracking import live
from asyncopd.tracking.before_after import before_after_table
from asyncopd.tracking.dashboard import duration, plain_line, render, sparkline, status
from asyncopd.tracking.live import LiveView
from asyncopd.tracking.liveness import is_alive, process_birth
from asyncopd.tracking.metrics import MetricsLog, read_evaluations
from asyncopd.tracking.queue_status import read_queue
from asyncopd.tracking.run_facts import RunFacts
from asyncopd.tracking.snapshot import RunSnapshot, RunWatcher
from asyncopd.tracking.trace import Tracer

PLAN = LedgerPlan(
    seed=0, prompts=50, samples_per_prompt=1, batch_size=12, steps=60, max_staleness=2, lag=None, group_size=12,
    shuffle=True,
)  # fmt: skip


def on_paper(renderable: object, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace("\N{NO-BREAK SPACE}", " ")


def begin(run_dir: Path, steps: int = 10) -> RunFacts:
    facts = RunFacts(name=run_dir.name, mode="async", steps=steps, batch_size=12, max_staleness=2)
    facts.write(run_dir)
    return facts


def test_a_finished_run_reads_as_finished(finished_run: Path):
    snapshot = RunSnapshot.read(finished_run)
    assert (snapshot.state, snapshot.policy_version, snapshot.left_s) == ("finished", 60, None)
    assert snapshot.staleness_max == 2
    assert 0.5 < snapshot.activity.overlap <= 1
    assert [point.policy_version for point in snapshot.held_out] == [0, 20, 40, 60]


def test_a_running_run_shows_the_last_seconds_and_the_time_left(running_run: Path):
    FakeRun(steps=30, finished=False).write(running_run)
    begin(running_run, steps=100)
    snapshot = RunSnapshot.read(running_run)
    assert snapshot.state == "running"
    assert snapshot.activity.wall_s == pytest.approx(30, abs=0.1)
    assert snapshot.left_s == pytest.approx((100 - snapshot.policy_version) * 4.5, rel=0.3)


def test_what_is_open_counts_as_work_and_shows_what_a_process_is_doing(tmp_path: Path):
    begin(tmp_path)
    learner, rollout = Tracer(tmp_path, "learner"), Tracer(tmp_path, "rollout-0")
    learner.instant("run")
    with learner.span("wait"), rollout.span("decode"):
        time.sleep(0.05)
        snapshot = RunSnapshot.read(tmp_path)
    assert snapshot.activity.busy["rollout"] > 0.8
    assert snapshot.activity.busy["learner"] < 0.2
    doing = {process.name: process.doing for process in snapshot.processes}
    assert doing == {"learner": "wait", "rollout-0": "decode"}


def trace_and_vanish(run: Path, process: str) -> None:
    program = "import sys; from asyncopd.tracking.trace import Tracer; Tracer(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", program, str(run), process], check=True)


def test_a_killed_worker_reads_as_gone_and_the_run_goes_on_because_it_is_started_again(tmp_path: Path):
    begin(tmp_path)
    learner = Tracer(tmp_path, "learner")
    trace_and_vanish(tmp_path, "scorer-0")
    snapshot = RunSnapshot.read(tmp_path)
    assert snapshot.state == "starting"
    assert "scorer-0 is gone" in on_paper(render(snapshot))
    learner.close()


def test_a_run_whose_learner_was_killed_reads_as_dead(tmp_path: Path):
    begin(tmp_path)
    trace_and_vanish(tmp_path, "learner")
    snapshot = RunSnapshot.read(tmp_path)
    assert snapshot.state == "dead"
    assert "learner is gone" in on_paper(render(snapshot))


def test_a_run_that_was_stopped_early_reads_as_stopped(tmp_path: Path):
    begin(tmp_path)
    MetricsLog(tmp_path).log(3, {"loss": 1.0})
    with Tracer(tmp_path, "learner"):
        pass
    assert RunSnapshot.read(tmp_path).state == "stopped"


def test_a_pid_that_was_given_out_again_is_not_the_process():
    birth = process_birth(os.getpid())
    assert birth is not None
    assert is_alive(os.getpid(), birth)
    assert not is_alive(os.getpid(), birth - 1000)


def test_a_zombie_is_dead():
    process = subprocess.Popen([sys.executable, "-c", ""])
    birth = process_birth(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid, birth)
    process.wait()


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path: Path):
    with pytest.raises(AsyncOPDError) as error:
        status(tmp_path / "nothing", Console(file=io.StringIO()))
    assert "nothing" in str(error.value)
    assert "run.json" in str(error.value)


def test_the_status_shows_stages_queue_staleness_and_losses(finished_run: Path):
    with Ledger.create(finished_run / "ledger.sqlite", PLAN) as ledger:
        ledger.publish(0)
        ledger.lease_rollouts("rollout-0", 12, 60)
    text = on_paper(render(RunSnapshot.read(finished_run)))
    for expected in ("step 60/60", "rollout", "teacher", "learner", "12 rolling", "24 pending", "bound 2", "held-out"):
        assert expected in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_a_line_of_log_says_the_same_in_plain_text(finished_run: Path):
    line = plain_line(RunSnapshot.read(finished_run))
    assert line.startswith("step 60/60")
    assert "\n" not in line
    assert "\x1b" not in line


def test_the_queue_reads_as_the_ledger_counts_it(tmp_path: Path):
    assert read_queue(tmp_path) is None
    with Ledger.create(tmp_path / "ledger.sqlite", PLAN) as ledger:
        ledger.publish(0)
        ledger.lease_rollouts("rollout-0", 12, 60)
    queue = read_queue(tmp_path)
    assert queue is not None
    assert (queue.live["ROLLING"], queue.live["PENDING"]) == (12, 24)
    assert (queue.admitted, queue.trained, sum(queue.live.values())) == (36, 0, 36)


def test_a_view_may_be_entered_before_the_run_exists(tmp_path: Path):
    with LiveView(tmp_path, Console(file=io.StringIO(), force_terminal=True)):
        pass


def test_on_a_terminal_the_last_picture_stays(finished_run: Path):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    with LiveView(finished_run, console):
        pass
    assert isinstance(console.file, io.StringIO)
    assert "step 60/60" in console.file.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")


def test_elsewhere_the_view_is_lines_of_log(finished_run: Path, caplog, monkeypatch):
    monkeypatch.setattr(live, "LINE_EVERY_S", 0.05)
    console = Console(file=io.StringIO(), force_terminal=False)
    with caplog.at_level(logging.INFO, logger="asyncopd.tracking.live"), LiveView(finished_run, console):
        time.sleep(0.3)
    assert len(caplog.messages) >= 2
    assert all(message.startswith("step 60/60") for message in caplog.messages)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_a_picture_costs_less_than_a_hundredth_of_a_core(running_run: Path):
    watcher = RunWatcher(running_run)
    watcher.snapshot()
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    costs = []
    for _ in range(20):
        before = time.thread_time()
        console.print(render(watcher.snapshot()))
        costs.append(time.thread_time() - before)
    assert min(costs) < 0.01 * live.REFRESH_S


def test_the_table_at_the_end_has_figures_answers_and_the_report(finished_run: Path):
    before, *_, after = read_evaluations(finished_run)
    text = on_paper(before_after_table(before, after, report=Path("runs/x/report.html")))
    for expected in ("1.200 ± 0.050", "0.409 ± 0.050", "−66%", "40%", "92%", "+52 points", "runs/x/report.html"):
        assert expected in text
    assert BABBLE[1][1].split(",")[0] in text
    assert ANSWERS[1][1].splitlines()[0][:20] in text
    assert "<b>two</b>" in text


def test_an_answer_that_looks_like_markup_is_shown_as_it_is(finished_run: Path):
    evaluation = read_evaluations(finished_run)[0]
    odd = SimpleNamespace(
        reverse_kl=evaluation.reverse_kl, forward_kl=evaluation.forward_kl, mean_length=evaluation.mean_length,
        eos_share=0.5, samples=[("[bold]p", "[/red] [link=x]")],
    )  # fmt: skip
    assert "[/red] [link=x]" in on_paper(before_after_table(odd, odd))


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (60, "1:00"), (3600 + 62, "1:01:02")])
def test_durations_read_as_people_write_them(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_sparkline_spans_least_to_greatest_and_passes_over_what_is_not_finite():
    assert sparkline([0.0, float("nan"), 1.1, float("inf"), 2.0]) == "▁▅█"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), cells=40)) == 40
