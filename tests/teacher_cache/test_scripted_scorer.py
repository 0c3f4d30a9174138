"""The scorer without a model keeps the promises of the seam."""

import time

import torch

from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.scripted import teacher_logits
from teacher_cache.scripted_scorer import ScriptedScorer


def request(uid: str = "a", length: int = 6, draw: str | None = "systematic(4)") -> ScoreRequest:
    ids = torch.arange(length, dtype=torch.int32)
    return ScoreRequest(uid=uid, prompt_ids=(1, 2), response_ids_T=ids, draw=draw, run_seed=3)


def one(scorer: ScriptedScorer, asked: ScoreRequest) -> TeacherRecord:
    (result,) = scorer.score([asked])
    assert isinstance(result, TeacherRecord)
    return result


def test_scores_are_the_scripted_distribution_at_the_temperature() -> None:
    record = one(ScriptedScorer(vocabulary=50, temperature=0.7), request())
    log_q = torch.log_softmax(teacher_logits(50, "a", range(6)).double() / 0.7, dim=-1)
    torch.testing.assert_close(record.log_q_T.double(), log_q.diagonal(), atol=1e-5, rtol=0)
    torch.testing.assert_close(record.entropy_T.double(), -(log_q.exp() * log_q).sum(-1), atol=1e-5, rtol=0)
    drawn = record.of_origin("teacher")
    assert drawn.log_q_TC is not None
    torch.testing.assert_close(drawn.log_q_TC.double(), log_q.gather(1, drawn.ids_TC.long()), atol=1e-5, rtol=0)


def test_scores_depend_on_the_sample_only() -> None:
    scorer = ScriptedScorer(vocabulary=50)
    together = scorer.score([request("a"), request("b")])[1]
    assert isinstance(together, TeacherRecord)
    assert torch.equal(one(ScriptedScorer(vocabulary=50), request("b")).log_q_T, together.log_q_T)
    assert not torch.equal(one(scorer, request("a")).log_q_T, together.log_q_T)


def test_an_over_long_request_is_refused_alone() -> None:
    good, bad = ScriptedScorer(vocabulary=50, max_context=10).score([request(), request("long", 9)])
    assert isinstance(good, TeacherRecord)
    assert "long" in str(bad)


def test_an_empty_answer_is_scored() -> None:
    assert one(ScriptedScorer(vocabulary=50), request(length=0)).of_origin("teacher").ids_TC.shape == (0, 4)


def test_the_delay_is_paid_by_the_token() -> None:
    started = time.perf_counter()
    one(ScriptedScorer(vocabulary=50, delay_s=0.005), request())
    assert time.perf_counter() - started >= 0.03
