"""Run folders for the tests of tracking."""

from pathlib import Path

import pytest
from fake_run import FakeRun

from asyncopd.tracking.report import write_report


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """A folder of a finished asynchronous run of 60 steps."""
    return FakeRun().write(tmp_path / "smollm2-async")


@pytest.fixture
def running_run(tmp_path: Path) -> Path:
    """A folder of a run that has not said that it ended."""
    return FakeRun(finished=False).write(tmp_path / "smollm2-async")


@pytest.fixture(scope="session")
def report_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a finished run."""
    run = FakeRun().write(tmp_path_factory.mktemp("reported") / "smollm2-async")
    return write_report(run).read_text()
