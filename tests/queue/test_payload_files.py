"""Payloads come back as they were written, or the error names the file."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncopd.errors import LedgerError
from asyncopd.queue import files
from asyncopd.queue.files import PayloadError
from asyncopd.queue.payloads import (
    PayloadRef,
    delete_payloads,
    read_record,
    read_rollout,
    write_records,
    write_rollouts,
)
from asyncopd.types import Rollout
from teacher_cache.record import CandidateSet, TeacherRecord

T, C, V = 5, 3, 11
UID = "2-1500-1-0"


def candidates(*, scored: bool, proposal: bool = False) -> CandidateSet:
    return CandidateSet(
        origin="student",
        design="systematic(3)",
        temperature=0.7,
        version=4,
        ids_TC=torch.randint(V, (T, C), dtype=torch.int32),
        log_w_TC=torch.randn(T, C),
        log_q_TC=torch.randn(T, C) if scored else None,
        log_g_TC=torch.randn(T, C) if proposal else None,
    )


def rollout(of: CandidateSet | None) -> Rollout:
    return Rollout(
        uid=UID,
        prompt_ids=(3, 1, 4),
        response_ids_T=torch.arange(T, dtype=torch.int32),
        versions_T=torch.tensor([4, 4, 4, 5, 5], dtype=torch.int32),
        log_b_T=-torch.rand(T),
        finish="eos",
        candidates=of,
    )


def one_rollout(folder: Path, written: Rollout) -> PayloadRef:
    (pack,) = write_rollouts(folder, [written])
    return pack[written.uid]


def one_record(folder: Path, record: TeacherRecord) -> PayloadRef:
    (pack,) = write_records(folder, {UID: record})
    return pack[UID]


def assert_same_set(found: CandidateSet | None, expected: CandidateSet | None) -> None:
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    for field in ("origin", "design", "temperature", "version"):
        assert getattr(found, field) == getattr(expected, field)
    for field in ("ids_TC", "log_w_TC", "log_q_TC", "log_g_TC"):
        left: Tensor | None = getattr(found, field)
        right: Tensor | None = getattr(expected, field)
        assert (left is None) == (right is None), field
        assert left is None or torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0)), field


@pytest.mark.parametrize("of", [None, candidates(scored=False), candidates(scored=False, proposal=True)])
def test_a_rollout_comes_back_as_it_was_written(tmp_path: Path, of: CandidateSet | None) -> None:
    written = rollout(of)
    ref = one_rollout(tmp_path, written)
    assert (tmp_path / ref.path).stat().st_size == ref.bytes
    found = read_rollout(tmp_path, ref, UID)
    assert (found.uid, found.prompt_ids, found.finish) == (UID, (3, 1, 4), "eos")
    for field in ("response_ids_T", "versions_T", "log_b_T"):
        assert torch.equal(getattr(found, field), getattr(written, field))
    assert_same_set(found.candidates, of)


def test_a_record_comes_back_as_it_was_written_missing_scores_included(tmp_path: Path) -> None:
    scored = candidates(scored=True)
    assert scored.log_q_TC is not None
    scored.log_q_TC[2] = torch.nan
    teacher = replace(candidates(scored=True), origin="teacher", version=None)
    record = TeacherRecord(
        temperature=0.7, teacher="big", log_q_T=-torch.rand(T), entropy_T=torch.rand(T), sets=(scored, teacher)
    )
    found = read_record(tmp_path, one_record(tmp_path, record), UID)
    assert (found.temperature, found.teacher) == (0.7, "big")
    assert torch.equal(found.log_q_T, record.log_q_T)
    assert torch.equal(found.entropy_T, record.entropy_T)
    for left, right in zip(found.sets, record.sets, strict=True):
        assert_same_set(left, right)


@pytest.mark.parametrize("padded", [False, True])
def test_the_whole_vocabulary_is_stored_as_its_scores_alone(tmp_path: Path, padded: bool) -> None:
    wide = 5000
    log_w = torch.zeros(T, wide)
    if padded:
        log_w[:, -8:] = -torch.inf
    full = CandidateSet(
        origin="student",
        design="full",
        temperature=1.0,
        version=0,
        ids_TC=torch.arange(wide, dtype=torch.int32).expand(T, wide),
        log_w_TC=log_w,
        log_q_TC=torch.randn(T, wide),
    )
    record = TeacherRecord(temperature=1.0, teacher="t", log_q_T=-torch.rand(T), entropy_T=torch.rand(T), sets=(full,))
    ref = one_record(tmp_path, record)
    assert ref.bytes < (T + 1) * wide * 4 + 2000
    assert_same_set(read_record(tmp_path, ref, UID).sets[0], full)


def test_payloads_written_at_once_share_a_pack_and_each_comes_back(tmp_path: Path) -> None:
    written = [replace(rollout(candidates(scored=False)), uid=f"0-{n}-0-0", prompt_ids=(n,)) for n in range(5)]
    (pack,) = write_rollouts(tmp_path, written)
    (path,) = {ref.path for ref in pack.values()}
    assert (tmp_path / path).stat().st_size == sum(ref.bytes for ref in pack.values())
    for expected in written:
        assert read_rollout(tmp_path, pack[expected.uid], expected.uid).prompt_ids == expected.prompt_ids


def test_a_pack_grows_no_larger_than_its_bound_unless_one_payload_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = one_rollout(tmp_path, rollout(None)).bytes
    uids = [f"0-{n}-0-0" for n in range(5)]
    for bound, packs in ((2 * size + 99, 3), (size - 1, 5)):
        monkeypatch.setattr(files, "PACK_BYTES", bound)
        written = list(write_rollouts(tmp_path, [replace(rollout(None), uid=uid) for uid in uids]))
        assert len(written) == packs
        assert [read_rollout(tmp_path, ref, uid).uid for pack in written for uid, ref in pack.items()] == uids


def test_a_pack_is_handed_out_before_a_payload_beyond_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def payloads() -> Iterator[tuple[str, bytes]]:
        for uid in ("0-0-0-0", "0-1-0-0"):
            made.append(uid)
            yield uid, b"large"

    monkeypatch.setattr(files, "PACK_BYTES", 5)
    for number, _ in enumerate(files.write_packs(tmp_path, "records", payloads()), start=1):
        assert len(made) == number


def test_damage_to_one_payload_of_a_pack_leaves_the_others_whole(tmp_path: Path) -> None:
    (pack,) = write_rollouts(tmp_path, [rollout(None), replace(rollout(None), uid="0-1-0-0")])
    one, other = pack.values()
    data = bytearray((tmp_path / one.path).read_bytes())
    data[one.bytes - 1] ^= 1
    (tmp_path / one.path).write_bytes(data)
    with pytest.raises(PayloadError, match="checksum"):
        read_rollout(tmp_path, one, UID)
    assert read_rollout(tmp_path, other, "0-1-0-0").finish == "eos"


def test_an_empty_answer_comes_back_empty(tmp_path: Path) -> None:
    empty = torch.zeros(0)
    written = replace(rollout(None), response_ids_T=empty.int(), versions_T=empty.int(), log_b_T=empty, finish="length")
    assert read_rollout(tmp_path, one_rollout(tmp_path, written), UID).log_b_T.shape == (0,)


@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_damage_is_found_and_the_error_names_the_file(tmp_path: Path, damage: str) -> None:
    ref = one_rollout(tmp_path, rollout(None))
    path = tmp_path / ref.path
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(data[:-1])
    else:
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(PayloadError, match=path.name):
        read_rollout(tmp_path, ref, UID)


def test_a_payload_of_another_sample_is_refused(tmp_path: Path) -> None:
    ref = one_rollout(tmp_path, rollout(None))
    with pytest.raises(PayloadError, match=f"belongs to sample {UID}"):
        read_rollout(tmp_path, ref, "0-0-0-0")


def test_two_workers_with_different_answers_never_overwrite_each_other(tmp_path: Path) -> None:
    first, second = rollout(None), replace(rollout(None), finish="length")
    one, other = one_rollout(tmp_path, first), one_rollout(tmp_path, second)
    assert one.path != other.path
    assert read_rollout(tmp_path, one, UID).finish == "eos"
    assert read_rollout(tmp_path, other, UID).finish == "length"


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    ref = one_rollout(tmp_path, rollout(candidates(scored=False)))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [Path(ref.path).name]


def test_deleting_payloads_that_are_gone_is_no_error(tmp_path: Path) -> None:
    ref = one_rollout(tmp_path, rollout(None))
    delete_payloads(tmp_path, [ref.path, ref.path])
    assert not (tmp_path / ref.path).exists()


def test_a_payload_that_cannot_be_written_is_a_ledger_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "payloads").write_text("a file where the folder should be")
    with pytest.raises(LedgerError, match="cannot be written.*resume"):
        one_rollout(tmp_path, rollout(None))
