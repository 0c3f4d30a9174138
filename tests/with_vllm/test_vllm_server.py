"""A vLLM server behind its URL: what it samples, which weights it says it used, and a whole run with it."""

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
from transformers import AutoModelForCausalLM

from asyncopd.errors import ConfigError
from asyncopd.learner.adapters import LoraConfig
from asyncopd.pipeline import run
from asyncopd.queue.ledger import Ledger
from asyncopd.rollout.sampling import SamplingConfig, sampling_logprobs
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.rollout.vllm_config import VllmEngineConfig
from asyncopd.rollout.vllm_server_engine import VllmServerEngine
from asyncopd.types import Rollout, RolloutRequest
from tests.conftest import EOS, HEAD_ROWS, VOCABULARY
from tests.tiny_run import tiny_config
from tests.with_vllm.models import save

pytestmark = pytest.mark.vllm

PROMPTS = [(7, 8, 9), (200, 31), tuple(range(20, 60)), (90,)]
SAMPLING = SamplingConfig(max_new_tokens=40, min_new_tokens=2, temperature=0.8, top_p=0.9, top_k=40)
START_S = 150


def start(model: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "50000000"]
    command += ["--skip-tokenizer-init", "--generation-config", "vllm", "--enable-scale-out", *options]
    command += ["--worker-extension-cls", "asyncopd.rollout.vllm_worker.WorkerExtension"]
    environment = {
        **os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx.get(f"{url}/health").is_success:
                return server, url
        except httpx.TransportError:
            time.sleep(0.5)
    server.kill()
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("served")
    return save("tied-llama", 0, folder), save("tied-llama", 9, folder)


@pytest.fixture(scope="module")
def url(models: tuple[Path, Path]) -> Iterator[str]:
    server, url = start(models[0], "--logprobs-mode", "processed_logprobs")
    yield url
    server.terminate()
    server.wait(20)


def engine(model: Path, url: str, sampling: SamplingConfig = SAMPLING) -> VllmServerEngine:
    return VllmServerEngine(
        model, url, vocabulary=VOCABULARY, head_rows=HEAD_ROWS, eos_token_ids=(EOS,), run_seed=5, sampling=sampling,
        max_context=128, version=0,
    )  # fmt: skip


def requests(count: int) -> list[RolloutRequest]:
    return [RolloutRequest(uid=f"s{i}", prompt_ids=PROMPTS[i % len(PROMPTS)], min_version=0) for i in range(count)]


def drain(running: VllmServerEngine) -> dict[str, Rollout]:
    done: dict[str, Rollout] = {}
    while running.in_flight:
        done |= {rollout.uid: rollout for rollout in running.step()}
    return done


def expected_log_b(model: Path, rollout: Rollout) -> torch.Tensor:
    ids = torch.tensor([*rollout.prompt_ids, *rollout.response_ids_T.tolist()])
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        logits = loaded(ids[None]).logits[0, len(rollout.prompt_ids) - 1 : -1, :VOCABULARY]
    log_b = sampling_logprobs(logits, SAMPLING, generated_B=torch.arange(len(logits)), end_ids=(EOS,))
    return log_b.gather(1, rollout.response_ids_T.long()[:, None])[:, 0]


def test_answers_of_a_server_repeat_and_their_logprobs_are_those_of_the_sampling_distribution(
    models: tuple[Path, Path], url: str
) -> None:
    running = engine(models[0], url)
    for version, model in enumerate((models[0], models[1], models[0]), start=1):
        running.load_weights(model, version)
        running.submit(requests(12))
        done = drain(running)
        running.submit(requests(12))
        again = drain(running)
        for uid, rollout in done.items():
            assert rollout.response_ids_T.tolist() == again[uid].response_ids_T.tolist()
            assert rollout.response_ids_T.max() < VOCABULARY
            assert (rollout.response_ids_T[-1] == EOS) == (rollout.finish == "eos")
            assert set(rollout.versions_T.tolist()) == {version}
            torch.testing.assert_close(rollout.log_b_T, expected_log_b(model, rollout), atol=1e-4, rtol=0)
        text = list(range(10, 34))
        theirs = TransformersEngine(model, vocabulary=VOCABULARY, eos_token_ids=(EOS,), run_seed=0, sampling=SAMPLING)
        torch.testing.assert_close(running.logprobs(text), theirs.logprobs(text), atol=1e-4, rtol=0)


@pytest.mark.parametrize("keep_tokens", [True, False])
def test_the_server_says_which_weights_sampled_a_token(models: tuple[Path, Path], url: str, keep_tokens: bool) -> None:
    running = engine(models[0], url, SamplingConfig(max_new_tokens=80, min_new_tokens=80))
    running.load_weights(models[0], 3)
    running.submit(requests(4))
    time.sleep(0.1)
    running.load_weights(models[1], 8)
    running.restart(keep_tokens)
    running.abandon(["s1"])
    done = drain(running)
    assert done.keys() == {"s0", "s2", "s3"}
    for rollout in done.values():
        versions = rollout.versions_T.tolist()
        assert versions == sorted(versions)
        assert versions[-1] == 8
        assert set(versions) <= ({3, 8} if keep_tokens else {8})


def test_a_server_that_is_not_there_is_named(models: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="no vLLM server in development mode answers"):
        engine(models[0], "http://127.0.0.1:9")


@pytest.mark.parametrize("rank", [0, 4], ids=["weights", "adapters"])
def test_a_run_rolls_out_on_a_server_with_candidates_from_a_proposal_pass(
    models: tuple[Path, Path], url: str, tmp_path: Path, rank: int
) -> None:
    tiny = tiny_config(tmp_path, models[1], models[0], mode="async")
    config = replace(
        tiny,
        rollout=replace(tiny.rollout, engine="vllm_server", vllm=VllmEngineConfig(urls=(url,))),
        teacher=replace(tiny.teacher, proposal="pass"),
        learner=replace(tiny.learner, lora=LoraConfig(rank=rank)),
    )
    result = run(config)
    assert result.policy_version == config.steps
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        assert ledger.counts().trained == config.steps * config.queue.batch_size
        assert max(step.max for step in ledger.staleness().steps) <= config.max_staleness
