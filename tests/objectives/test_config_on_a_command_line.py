"""The config is plain enough for a typed command line."""

import pytest
import tyro

from asyncopd.errors import ConfigError
from asyncopd.objectives import ObjectiveConfig


def test_fields_are_options() -> None:
    found = tyro.cli(ObjectiveConfig, args=["--name", "jsd", "--beta", "0.2", "--design", "top_k(8)"])
    assert found == ObjectiveConfig(name="jsd", beta=0.2, design="top_k(8)")
    assert tyro.cli(ObjectiveConfig, args=["--no-temperature-squared"]) == ObjectiveConfig()


def test_a_refusal_reaches_the_caller() -> None:
    with pytest.raises(ConfigError, match="use reverse_kl"):
        tyro.cli(ObjectiveConfig, args=["--name", "jsd", "--beta", "1.0"])
