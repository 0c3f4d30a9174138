"""Published weights are whole or not there, and old ones go when nobody can need them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncopd.errors import CheckpointError
from asyncopd.publish import FileSource, WeightStore


def _publish(store: WeightStore, *versions: int) -> None:
    for version in versions:
        store.publish(version, {"a": torch.full((2, 3), float(version)), "steps": torch.tensor(version)})


def test_a_version_is_stored_in_the_dtype_asked_for_and_integers_as_they_are(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, torch.bfloat16)
    _publish(store, 3)
    stored = load_file(store.directory(3) / "model.safetensors")
    assert (stored["a"].dtype, stored["steps"].dtype) == (torch.bfloat16, torch.int64)
    assert stored["a"].float().eq(3).all()


def test_a_half_written_version_is_no_version_and_is_written_again(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    half = tmp_path / "weights" / ".writing-1"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"cut")
    assert store.versions() == []
    with pytest.raises(CheckpointError, match="version 1 .* present: \\[\\]"):
        store.directory(1)
    _publish(store, 1)
    assert load_file(store.directory(1) / "model.safetensors")["a"].eq(1).all()


def test_publishing_a_version_again_keeps_the_first(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    _publish(store, 1)
    store.publish(1, {"a": torch.zeros(2, 3)})
    assert load_file(store.directory(1) / "model.safetensors")["a"].eq(1).all()


def test_versions_may_skip_numbers_and_the_newest_is_never_deleted(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    _publish(store, 0, 2, 5)
    store.keep_from(4)
    assert store.versions() == [5]
    store.keep_from(9)
    assert store.versions() == [5]


def test_versions_of_a_lost_timeline_are_forgotten(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    _publish(store, 0, 1, 2, 3)
    store.forget_after(1)
    assert store.versions() == [0, 1]


class Loader:
    """An engine that notes what it loads, and the learner that goes on meanwhile."""

    def __init__(self, store: WeightStore) -> None:
        self.store, self.loaded = store, -1

    def load_weights(self, directory: Path, version: int) -> None:
        if version == 1:
            _publish(self.store, 3)
            self.store.keep_from(3)
        self.loaded = int(load_file(directory / "model.safetensors")["a"][0, 0])


def test_a_version_that_is_deleted_while_it_is_opened_gives_way_to_the_newest(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    _publish(store, 1)
    engine = Loader(store)
    FileSource(store, engine, newest=lambda: store.versions()[-1]).move_to(1)
    assert engine.loaded == 3
    with pytest.raises(CheckpointError, match="version 1 .* present"):
        FileSource(store, engine).move_to(1)


def test_a_version_whose_deletion_was_cut_off_is_deleted_in_the_end(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    _publish(store, 0, 1, 2)
    half = tmp_path / "weights" / ".deleting-1"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"left")
    store.keep_from(2)
    assert store.versions() == [2]
    half.mkdir()
    store.forget_after(2)
    assert not half.exists()
