"""Records come back from bytes as they went in."""

from dataclasses import replace

import pytest
import torch

from teacher_cache.bundle import PackedRecord, bundle, unbundle
from teacher_cache.codec import RELATIVE_ERROR, id_bytes, pack_ids, pack_record, unpack_ids, unpack_record
from teacher_cache.errors import CodecError
from teacher_cache.scorer import ScoreRequest
from tests.teacher_cache.build_requests import DESIGNS, VOCABULARY, assert_same, make_request, score_one

REQUESTS = [
    *[make_request(1, design=design) for design in DESIGNS],
    *[make_request(2, draw=design) for design in DESIGNS if not design.startswith("two_phase")],
    make_request(3, design="systematic(4)", draw="top_k(4)"),
    make_request(4, length=0, draw="systematic(2)"),
    make_request(5, length=1),
]


def through_bytes(request: ScoreRequest, precision: str = "fp32") -> PackedRecord:
    packed = pack_record(score_one(request), request, vocabulary=VOCABULARY, precision=precision)
    (found,) = unbundle(bundle([packed], {})).records
    return found


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r.candidates and r.candidates.design}-{r.draw}")
def test_a_record_comes_back_bit_for_bit_in_fp32(request_: ScoreRequest) -> None:
    back = unpack_record(through_bytes(request_), request_, temperature=1.0, teacher="default")
    assert_same(back, score_one(request_))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_half_precision_score_is_within_the_stated_error(precision: str) -> None:
    request = make_request(1, length=40, design="full")
    back = unpack_record(through_bytes(request, precision), request, temperature=1.0, teacher="default")
    exact = score_one(request).sets[0].log_q_TC
    assert exact is not None
    assert back.sets[0].log_q_TC is not None
    bound = exact.abs() * RELATIVE_ERROR[precision] + 2.0**-25
    assert bool(((back.sets[0].log_q_TC - exact).abs() <= bound).all())
    assert not torch.equal(back.sets[0].log_q_TC, exact)


def test_a_score_beyond_half_precision_keeps_float32() -> None:
    request = make_request(1)
    record = score_one(request)
    record.log_q_T[2] = -70000.0
    packed = pack_record(record, request, vocabulary=VOCABULARY, precision="fp16")
    assert unpack_record(packed, request, temperature=1.0, teacher="x").log_q_T[2] == -70000.0


def test_a_score_that_is_nan_stays_nan() -> None:
    request = make_request(1, design="systematic(4)")
    record = score_one(request)
    record.log_q_T[1] = torch.nan
    packed = pack_record(record, request, vocabulary=VOCABULARY, precision="fp16")
    assert unpack_record(packed, request, temperature=1.0, teacher="x").log_q_T.isnan().tolist() == [
        t == 1 for t in range(7)
    ]


@pytest.mark.parametrize(
    ("vocabulary", "width"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 3), (151_936, 3), (2**24 + 1, 4)]
)
def test_ids_take_the_fewest_bytes_that_the_vocabulary_needs(vocabulary: int, width: int) -> None:
    assert id_bytes(vocabulary) == width
    ids = torch.tensor([[0, vocabulary - 1], [vocabulary // 2, 0]])
    assert pack_ids(ids, width).shape == (2, 2, width)
    assert unpack_ids(pack_ids(ids, width)).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("design", "draw", "precision", "expected"),
    [
        ("systematic(16)", None, "fp32", 4 * 18),
        ("systematic(16)", None, "fp16", 2 * 18),
        (None, "top_k(8)", "fp32", 4 * 10 + 2 * 8),
        (None, "top_k(8)", "fp16", 2 * 10 + 2 * 8),
        (None, "systematic(8)", "fp16", 2 * 10 + 2 * 8 + 4 * 8),
        ("two_phase(32,8)", None, "fp32", 4 * 10 + 2 * 8 + 4 * 8),
        (None, "full", "fp16", 2 * (2 + VOCABULARY)),
    ],
)
def test_a_record_takes_the_documented_bytes_a_token(
    design: str | None, draw: str | None, precision: str, expected: int
) -> None:
    request = make_request(1, length=40, design=design, draw=draw)
    packed = pack_record(score_one(request), request, vocabulary=VOCABULARY, precision=precision)
    assert packed.nbytes == 40 * expected


def test_candidates_that_the_request_gave_are_not_stored_again() -> None:
    request = make_request(1, design="systematic(4)")
    assert set(through_bytes(request).tensors) == {"scores"}


def test_a_record_of_another_request_is_refused() -> None:
    packed = through_bytes(make_request(1, design="systematic(4)"))
    for other in (make_request(1, length=6), make_request(1), make_request(1, design="systematic(5)")):
        with pytest.raises(CodecError, match="no record of this request"):
            unpack_record(packed, other, temperature=1.0, teacher="x")


def test_the_given_versions_of_candidates_come_back_from_the_request() -> None:
    request = make_request(1, design="two_phase(8,3)")
    assert request.candidates is not None
    later = replace(request, candidates=replace(request.candidates, version=9))
    packed = pack_record(score_one(request), request, vocabulary=VOCABULARY)
    assert unpack_record(packed, later, temperature=1.0, teacher="x").sets[0].version == 9
