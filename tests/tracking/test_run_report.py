"""summary.json and report.html of a run."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_run import FakeRun

from asyncopd.queue.ledger import Ledger, LedgerPlan
from asyncopd.tracking.activity import measure, run_windows
from asyncopd.tracking.figures.learning import smooth
from asyncopd.tracking.figures.timeline import timeline_figure
from asyncopd.tracking.metrics import MetricsLog
from asyncopd.tracking.report import write_report
from asyncopd.tracking.run_facts import RunFacts
from asyncopd.tracking.summary import write_summary
from asyncopd.tracking.trace import Span, read_trace


class Page(HTMLParser):
    """Collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[str] = []
        self.figures = 0
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.figures += tag == "svg"
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and value:
                self.links.append(value)

    def handle_data(self, data: str) -> None:
        if self._tag == "h2" and data.strip():
            self.headings.append(data.strip())


def test_the_summary_has_every_figure_at_its_place(finished_run: Path):
    plan = LedgerPlan(
        seed=0, prompts=50, samples_per_prompt=1, batch_size=12, steps=60, max_staleness=2, lag=None, group_size=12,
        shuffle=True,
    )  # fmt: skip
    with Ledger.create(finished_run / "ledger.sqlite", plan) as ledger:
        ledger.publish(0)
        lease = ledger.lease_rollouts("rollout-0", 12, 60)
        assert lease is not None
        ledger.drop(lease.token, lease.samples[0].uid, "too_long", "40,000 tokens")
    write_summary(finished_run)
    summary = json.loads((finished_run / "summary.json").read_text())
    for figure in ("reverse_kl", "forward_kl"):
        for when in ("before", "after"):
            assert set(summary["held_out"][figure][when]) == {"mean", "ci95"}
    assert summary["held_out"]["reverse_kl"]["before"] == {"mean": pytest.approx(1.2), "ci95": 0.05}
    assert summary["held_out"]["reverse_kl"]["after"]["mean"] == pytest.approx(0.409, abs=1e-3)
    assert (summary["mode"], summary["steps"]) == ("async", 60)
    assert set(summary["tokens_per_s"]) == set(summary["busy"]) == {"rollout", "teacher", "learner"}
    assert summary["staleness"]["max"] == 2
    assert 0 < summary["staleness"]["mean"] <= 2
    assert summary["samples"] == {"admitted": 36, "trained": 0, "dropped": {"too_long": 1}}
    assert summary["logprob_gap_on_policy"] == pytest.approx(0.0045, abs=0.001)
    seconds = summary["learner"]["seconds"]
    assert set(seconds) == {"step", "wait", "forward", "backward"}
    assert seconds["forward"] == pytest.approx(0.6 * seconds["step"])
    assert (summary["learner"]["mfu"], summary["learner"]["memory_gb"]) == (0.4, 2.6)
    trace = read_trace(finished_run)
    activity = measure(trace.spans, run_windows(trace))
    assert summary["overlap"] == activity.overlap
    assert summary["wall_s"] == activity.wall_s


def test_the_logprob_gap_weighs_tokens_not_steps(tmp_path: Path):
    RunFacts(name="x", mode="async", steps=2, batch_size=1, max_staleness=1).write(tmp_path)
    log = MetricsLog(tmp_path)
    log.log(1, {"logprob_gap/staleness_0": 0.1, "tokens/staleness_0": 300})
    log.log(2, {"logprob_gap/staleness_0": 0.5, "tokens/staleness_0": 100})
    log.log(3, {"logprob_gap/staleness_0": float("nan"), "tokens/staleness_0": 0})
    assert write_summary(tmp_path).logprob_gap_on_policy == pytest.approx(0.2)


def test_one_evaluation_is_a_before_without_an_after(running_run: Path):
    evaluations = running_run / "evaluations.jsonl"
    evaluations.write_text(evaluations.read_text().splitlines()[0] + "\n")
    summary = write_summary(running_run).as_dict()
    assert summary["held_out"]["reverse_kl"]["before"]["mean"] == pytest.approx(1.2)
    assert summary["held_out"]["reverse_kl"]["after"] is None
    page = write_report(running_run).read_text()
    assert "no later evaluation yet" in page
    assert "+0%" not in page


def test_what_is_not_known_is_null_and_the_file_is_valid_json(tmp_path: Path):
    RunFacts(name="x", mode="sync", steps=2, batch_size=1, max_staleness=0).write(tmp_path)
    MetricsLog(tmp_path).log(1, {"staleness/mean": float("nan")})
    write_summary(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert summary["held_out"] is None
    assert summary["staleness"]["mean"] is None
    assert summary["learner"] == {"seconds": {}, "mfu": None, "memory_gb": None}


def test_the_report_has_a_section_for_each_question(report_text: str):
    page = Page(report_text)
    assert page.headings == [
        "Before and after",
        "Distance to the teacher",
        "Who worked when",
        "How busy the stages were",
        "Staleness",
        "Queue depth",
        "Answers",
        "Details",
    ]
    assert page.figures == 7
    assert re.search(r"optimizer step.*forward \d.*40% of the hardware", report_text)


def test_the_report_needs_nothing_beside_it_and_its_ids_are_unique(report_text: str):
    page = Page(report_text)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert len(page.ids) == len(set(page.ids))


def test_the_report_leaves_its_colours_to_the_page(report_text: str):
    assert "prefers-color-scheme: dark" in report_text
    assert not re.findall(r"#0[1-4]0[1-4]0[1-4]", report_text)
    assert "var(--ink)" in report_text


def test_answers_are_escaped(report_text: str):
    assert "&lt;b&gt;two&lt;/b&gt;" in report_text
    assert "<b>two</b>" not in report_text


def test_a_report_can_be_made_at_any_point_of_a_run(tmp_path: Path):
    RunFacts(name="just begun", mode="sync", steps=2, batch_size=1, max_staleness=0).write(tmp_path)
    assert Page(write_report(tmp_path).read_text()).headings == ["Details"]
    MetricsLog(tmp_path).log(1, {"loss": float("nan"), "divergence": 0.5, "staleness": {"training": {"0": 1}}})
    assert "Distance to the teacher" in Page(write_report(tmp_path).read_text()).headings


def test_a_report_of_one_run_is_the_same_when_made_again(finished_run: Path):
    first = write_report(finished_run).read_text()
    assert write_report(finished_run).read_text().splitlines()[:-5] == first.splitlines()[:-5]


def test_a_report_of_a_long_run_stays_small(tmp_path: Path):
    run = FakeRun(steps=1000, decode_s=1.0, score_s=0.4, step_s=0.6, evaluate_every=500).write(tmp_path / "long")
    assert write_report(run).stat().st_size < 1_500_000


def test_a_timeline_of_thousands_of_short_spans_stays_small():
    def span(index: int, name: str) -> Span:
        start = index * 10**6
        return Span(process="rollout-0", thread="main", name=name, start_ns=start, end_ns=start + 9 * 10**5)

    spans = [span(index, "decode") for index in range(20_000)]
    figure = timeline_figure(spans, (0, 20 * 10**9), name="start", title="20 s", labels=False)
    assert figure is not None
    assert len(figure) < 30_000


def test_smoothing_keeps_a_straight_line():
    line = [float(index) for index in range(100)]
    assert smooth(line) == pytest.approx(line)
