"""Packed records in one file: as they went in, in few bytes, and nothing else is believed."""

import json
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save

from teacher_cache.bundle import MOST_RECORDS, PackedRecord, bundle, unbundle
from teacher_cache.codec import pack_record
from teacher_cache.errors import CodecError
from tests.teacher_cache.build_requests import DESIGNS, VOCABULARY, make_request, score_one


def packed(number: int, length: int, draw: str = "top_k(4)") -> PackedRecord:
    request = make_request(number, length=length, draw=draw)
    return pack_record(score_one(request), request, vocabulary=VOCABULARY)


def test_records_of_every_kind_and_length_come_back_in_order() -> None:
    kinds = [design for design in DESIGNS if not design.startswith("two_phase")]
    records = [packed(n, n % 5, kinds[n % len(kinds)]) for n in range(20)]
    records.insert(3, PackedRecord(told={"error": "too long"}, tensors={}))
    columns = {"keys": torch.arange(42, dtype=torch.uint8)}
    back = unbundle(bundle(records, {"precision": "fp32"}, columns))
    assert back.told["precision"] == "fp32"
    assert torch.equal(back.columns["keys"], columns["keys"])
    assert len(back.records) == 21
    for one, other in zip(records, back.records, strict=True):
        assert one.told == other.told
        assert list(one.tensors) == list(other.tensors)
        for name, tensor in one.tensors.items():
            assert other.tensors[name].dtype == tensor.dtype
            assert torch.equal(other.tensors[name], tensor)


def test_a_further_record_of_a_known_kind_costs_a_few_bytes_more_than_its_numbers() -> None:
    records = [packed(n, 5 + n) for n in range(12)]
    sizes = [len(bundle(records[:count], {})) - sum(r.nbytes for r in records[:count]) for count in (2, 12)]
    assert (sizes[1] - sizes[0]) / 10 <= 8


def test_any_flipped_byte_or_cut_of_a_bundle_is_an_error_or_another_bundle() -> None:
    data = bundle([packed(1, 7), packed(2, 3)], {}, {"keys": torch.zeros(8, dtype=torch.uint8)})
    for place in range(len(data)):
        for damaged in (data[:place], data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :]):
            with suppress(CodecError):
                unbundle(damaged)


@pytest.mark.parametrize(
    ("kinds", "records", "says"),
    [
        ([[{}, [["x", "f32", [2**50]]]]], [[0, 1]], "whole number is expected"),
        ([[{}, [["x", "f32", [2**39, 2**39]]]]], [[0, 1]], "are left"),
        ([[{}, [["x", "u8", [-1]]]]], [[0, 1]], "whole number is expected"),
        ([[{}, [["x", "u8", [2]]]]], [[0, 1]], "8 bytes of records, of which 2 are used"),
        ([[{}, [["x", "u8", [0]]] * 9]], [[0, 1]], "more tensors"),
        ([[{}, [["x", "u8", [0] * 5]]]], [[0, 1]], "more tensors"),
        ([[{}, []]], [[0, 0]] * (MOST_RECORDS + 1), "expected at most"),
        ([[{}, []]], [[1, 0]], "not a bundle"),
        ([[{}, [["x", "i64", [1]]]]], [[0, 1]], "not a bundle"),
    ],
)
def test_a_header_that_asks_for_nonsense_is_refused(kinds: object, records: object, says: str) -> None:
    told = json.dumps({"bundle": 2, "kinds": kinds, "records": records})
    data = save({"records": torch.zeros(8, dtype=torch.uint8)}, metadata={"told": told})
    with pytest.raises(CodecError, match=says):
        unbundle(data)


def test_more_records_than_a_reader_takes_are_not_written() -> None:
    with pytest.raises(CodecError, match="make several files"):
        bundle([PackedRecord(told={}, tensors={})] * (MOST_RECORDS + 1), {})


def test_another_layout_is_refused_by_its_number() -> None:
    data = bundle([], {}).replace(b'\\"bundle\\":2', b'\\"bundle\\":7')
    with pytest.raises(CodecError, match="layout 7; expected 2"):
        unbundle(data)
