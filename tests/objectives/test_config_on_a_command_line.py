"""The config is plain enough for a typed command line."""

import pytest
import tyro

from asyncopd.objectives import ObjectiveConfig


def test_fields_are_options() -> None:
    found = tyro.cli(ObjectiveConfig, args=["--name", "jsd", "--beta", "0.2", "--design", "top_k(8)"])
    assert found == ObjectiveConfig(name="jsd", beta=0.2, design="top_k(8)")
    assert tyro.cli(ObjectiveConfig, args=["--no-temperature-squared"]) == ObjectiveConfig()


def test_a_refusal_is_shown_and_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(ObjectiveConfig, args=["--name", "jsd", "--beta", "1.0"])
    shown = capsys.readouterr()
    assert "use reverse_kl" in " ".join((shown.out + shown.err).replace("│", " ").split())
