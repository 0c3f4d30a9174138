"""Requests and records for the tests of cache and service, from the scripted teacher."""

import torch

from teacher_cache.designs import draw_candidates, parse_design
from teacher_cache.identity import TeacherIdentity, TokenizerIdentity
from teacher_cache.noise import noise_for
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.scripted import scripted_logits
from teacher_cache.scripted_scorer import ScriptedScorer

VOCABULARY = 300
IDENTITY = TeacherIdentity(
    weights="w",
    dtype="fp32",
    tokenizer=TokenizerIdentity(digest="t", vocabulary=VOCABULARY, special_ids=(0, 1)),
    temperature=1.0,
    max_context=64,
)
DESIGNS = ("systematic(4)", "multi_sample(4)", "top_k(4)", "top_k_tail(3)", "full", "two_phase(8,3)")


def make_request(
    number: int, *, length: int = 7, design: str | None = None, draw: str | None = None, run_seed: int = 0
) -> ScoreRequest:
    """Request ``number``, with candidates that a scripted student drew where ``design`` is given."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCABULARY, (5 + length,), generator=generator)
    uid = f"0-{number}-0-0"
    candidates = None
    if design is not None:
        rows = [scripted_logits(VOCABULARY, "student", number, t) for t in range(length)]
        candidates = draw_candidates(
            parse_design(design),
            log_g_TV=torch.stack(rows).log_softmax(-1),
            noise=noise_for(run_seed, [(uid, t) for t in range(length)], "candidates"),
            sampled_T=ids[5:],
            origin="student",
            temperature=1.0,
            version=3,
        )
    return ScoreRequest(
        uid=uid,
        prompt_ids=tuple(ids[:5].tolist()),
        response_ids_T=ids[5:].int(),
        candidates=candidates,
        draw=draw,
        run_seed=run_seed,
    )


class CountingScorer(ScriptedScorer):
    """The scripted teacher, counting what reaches it."""

    def __init__(self, **settings: object) -> None:
        super().__init__(vocabulary=VOCABULARY, max_context=IDENTITY.max_context, **settings)
        self.scored = 0

    def score(self, requests):
        self.scored += len(requests)
        return super().score(requests)


def score_one(request: ScoreRequest) -> TeacherRecord:
    (record,) = CountingScorer().score([request])
    assert isinstance(record, TeacherRecord), record
    return record


def assert_same(one: TeacherRecord, other: TeacherRecord, tolerance: float = 0.0) -> None:
    """Equal in everything; scores to ``tolerance`` (nats)."""
    assert (one.temperature, one.teacher, len(one.sets)) == (other.temperature, other.teacher, len(other.sets))
    pairs = [(one.log_q_T, other.log_q_T), (one.entropy_T, other.entropy_T)]
    for mine, its in zip(one.sets, other.sets, strict=True):
        assert (mine.origin, mine.design, mine.version) == (its.origin, its.design, its.version)
        assert torch.equal(mine.ids_TC, its.ids_TC)
        torch.testing.assert_close(mine.log_w_TC, its.log_w_TC, atol=10 * tolerance, rtol=0)
        assert mine.log_q_TC is not None
        assert its.log_q_TC is not None
        pairs.append((mine.log_q_TC, its.log_q_TC))
    for mine_T, its_T in pairs:
        torch.testing.assert_close(mine_T, its_T, atol=tolerance, rtol=0, equal_nan=True)
