"""Run folders for the tests of tracking."""

from pathlib import Path

import pytest
from fake_run import FakeRun


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """A folder of a finished asynchronous run of 60 steps."""
    return FakeRun().write(tmp_path / "smollm2-async")


@pytest.fixture
def running_run(tmp_path: Path) -> Path:
    """A folder of a run that has not said that it ended."""
    return FakeRun(finished=False).write(tmp_path / "smollm2-async")
