"""What teacher_cache/README.md shows works as shown."""

import re
from pathlib import Path

import pytest
import torch
import tyro

from asyncopd.config import RunConfig
from teacher_cache import cli
from tests.conftest import make_tiny_tokenizer

TEXT = (Path(__file__).parents[2] / "teacher_cache" / "README.md").read_text(encoding="utf-8")


def test_the_readmes_python_scores(tiny_llama_dir: Path) -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {"tokenizer": make_tiny_tokenizer(), "ids": torch.tensor([5, 6, 7], dtype=torch.int32)}
    exec(shown.replace("models/teacher", str(tiny_llama_dir)), names)
    assert names["record"].of_origin("teacher").log_q_TC.shape == (3, 16)


def test_the_commands_that_the_readme_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    known = re.findall(r"^  (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert set(re.findall(r"teacher-cache (\w+)", TEXT)) == set(known)


def test_the_options_of_a_run_that_the_readme_names_exist() -> None:
    (block,) = re.findall(r"## In a run\n\n(.*?)\n\n", TEXT, re.DOTALL)
    words = re.sub(r"#.*", "", block).split()
    config = tyro.cli(RunConfig, args=words)
    assert config.teacher.sources["code"] == ("http://host:8472",)
    assert len(config.teacher.urls) == 2
    assert config.teacher.cache == Path("DIR")
