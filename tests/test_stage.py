"""What a worker process has: here, how it tells of progress while a model loads."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncopd.queue.doorbell import Doorbell
from asyncopd.stage import Stage
from asyncopd.tracking.trace import Tracer
from tests.queue.driver import Driver


class Beats:
    def __init__(self) -> None:
        self.heard = 0

    def __call__(self) -> None:
        self.heard += 1

    def wait_for(self, count: int) -> None:
        until = time.monotonic() + 20
        while self.heard < count:
            assert time.monotonic() < until, f"{self.heard} beats"
            time.sleep(0.002)


@pytest.fixture
def beats() -> Beats:
    return Beats()


@contextmanager
def open_stage(folder: Path, beats: Beats, load_s: float) -> Iterator[Stage]:
    driver = Driver(folder)
    with Tracer(folder, "scorer-0") as tracer, Doorbell(folder, "scorer-0") as doorbell, driver.ledger as ledger:
        yield Stage(
            name="scorer-0",
            run_dir=folder,
            ledger=ledger,
            tracer=tracer,
            doorbell=doorbell,
            seed=0,
            lease_s=0.02,
            load_s=load_s,
            wakes=(),
            beat=beats,
        )


def test_a_model_that_loads_for_longer_than_a_lease_is_no_hang(tmp_path: Path, beats: Beats) -> None:
    with open_stage(tmp_path, beats, load_s=60.0) as stage:
        with stage.loading():
            beats.wait_for(5)
        heard = beats.heard
        time.sleep(0.1)
        assert beats.heard == heard, "it beats although nothing loads any more"


def test_a_load_that_does_not_end_is_a_hang_after_load_s(tmp_path: Path, beats: Beats) -> None:
    with open_stage(tmp_path, beats, load_s=0.0) as stage:
        with stage.loading():
            time.sleep(0.1)
        assert beats.heard == 0
