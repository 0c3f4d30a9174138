"""Whole runs whose teacher vLLM runs: in the scoring process, and behind a stock server."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from asyncopd import pipeline
from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError
from asyncopd.interface import Inputs
from asyncopd.objectives import ObjectiveConfig
from asyncopd.preflight import preflight
from asyncopd.queue.ledger import Ledger
from asyncopd.rollout.pool import RolloutConfig
from asyncopd.rollout.vllm_config import VllmEngineConfig
from asyncopd.scoring import TeacherConfig
from asyncopd.teachers import check_loadable
from asyncopd.tracking.metrics import read_metrics
from asyncopd.workers import worker_specs
from teacher_cache.client import ClientConfig
from teacher_cache.identity import Expectation
from teacher_cache.prompt_logprobs_scorer import PromptLogprobsScorer
from teacher_cache.record import TeacherRecord
from teacher_cache.transformers_scorer import TransformersScorer
from teacher_cache.vllm_scorer import VllmScorerConfig
from tests.conftest import VOCABULARY, make_tiny_tokenizer, save_checkpoint
from tests.teacher_cache.test_transformers_scorer import request
from tests.tiny_run import tiny_config
from tests.with_vllm.models import make, save

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("vllm-run")
    return save("tied-llama", 3, folder), save("tied-llama", 4, folder)


def losses(run: Path) -> list[float]:
    return [row.values["loss"] for row in read_metrics(run) if "loss" in row.values]


def test_a_run_taught_by_vllm_has_the_losses_of_one_taught_by_transformers(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """Real worker processes; forward KL on top_k, whose candidates do not turn on the last digit."""
    found = {}
    for scorer in ("transformers", "vllm"):
        folder = tmp_path / scorer
        folder.mkdir()
        config = tiny_config(folder, *checkpoints, steps=2)
        teacher = replace(config.teacher, scorer=scorer, vllm=VllmScorerConfig(kv_cache_gb=0.05))
        objective = ObjectiveConfig(name="forward_kl", design="top_k(16)", temperature=0.8)
        config = replace(config, teacher=teacher, objective=objective)
        config = replace(config, queue=replace(config.queue, lease_s=60.0))
        result = pipeline.run(config)
        found[scorer] = losses(result.path)
        with Ledger.open(result.path / "ledger.sqlite") as ledger:
            assert ledger.verify() == []
    assert found["vllm"] == pytest.approx(found["transformers"], abs=1e-4)


def test_a_teacher_whose_shortened_context_leaves_no_room_for_a_prompt_is_refused_before_it_starts(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, *checkpoints)
    options = VllmScorerConfig(max_context=config.rollout.sampling.max_new_tokens)
    config = replace(config, teacher=replace(config.teacher, scorer="vllm", vllm=options))
    with pytest.raises(ConfigError, match="less than the shortest context of student and teachers"):
        preflight(config, Inputs())


def test_engines_that_would_share_a_core_are_refused_and_others_get_a_thread_for_each_of_theirs() -> None:
    config = RunConfig(
        teacher=TeacherConfig(scorer="vllm", vllm=VllmScorerConfig(cores="1-2")),
        rollout=RolloutConfig(engine="vllm", vllm=VllmEngineConfig(cores="0,2")),
    )
    with pytest.raises(ConfigError, match=r"both name \[2\]"):
        check_loadable(config)
    assert [(spec.kind, spec.threads) for spec in worker_specs(config)] == [("rollout", 2), ("scorer", 2)]
    with pytest.raises(ConfigError, match=r"teacher\.devices.*as many GPUs"):
        TeacherConfig(scorer="vllm", devices="0,1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """vLLM's own server on a model whose head has no padded rows, as servers know nothing of padding."""
    folder = tmp_path_factory.mktemp("stock")
    model = make("tied-llama", 6)
    model.resize_token_embeddings(VOCABULARY)
    path = save_checkpoint(model, folder / "teacher")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-logprobs", "32", "--served-model-name", "teacher", "--kv-cache-memory-bytes", str(2**26)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _await(url, process, folder / "log")
            yield url, path
        finally:
            process.terminate()
            process.wait(60)


def _await(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=1).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"no answer in time: {log.read_text()[-3000:]}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("spec", ["top_k(8)", "top_k_tail(32)"])
def test_a_real_stock_server_gives_the_records_that_transformers_gives(server: tuple[str, Path], spec: str) -> None:
    url, path = server
    requests = [request(*lengths, draw=spec) for lengths in [(3, 5), (1, 1), (40, 2), (7, 40), (1, 17), (2, 0)]]
    expected = Expectation(temperature=1.0, draw=spec, designs=(spec,))
    config = ClientConfig(deadline_s=30)
    with PromptLogprobsScorer([url], expected=expected, tokenizer=make_tiny_tokenizer(), config=config) as scorer:
        assert scorer.max_context == 127
        ours = scorer.score(requests)
    theirs = TransformersScorer(path, vocabulary=VOCABULARY, dtype=torch.float32).score(requests)
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, TeacherRecord), one
        assert isinstance(other, TeacherRecord)
        torch.testing.assert_close(one.log_q_T, other.log_q_T, atol=1e-4, rtol=0)
        mine, its = one.of_origin("teacher"), other.of_origin("teacher")
        assert mine.ids_TC.tolist() == its.ids_TC.tolist()
        assert mine.log_w_TC.tolist() == its.log_w_TC.tolist()
        assert mine.log_q_TC is not None
        torch.testing.assert_close(mine.log_q_TC, its.log_q_TC, atol=1e-4, rtol=0)


@pytest.mark.timeout(300)
def test_a_run_learns_from_a_real_stock_server(
    server: tuple[str, Path], checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    url, teacher = server
    config = tiny_config(tmp_path, teacher, checkpoints[1], steps=2)
    objective = ObjectiveConfig(name="forward_kl", design="top_k_tail(16)")
    config = replace(config, objective=objective, teacher=replace(config.teacher, scorer="openai", urls=(url,)))
    result = pipeline.run(config)
    assert len(losses(result.path)) == 2
    assert result.after is not None
