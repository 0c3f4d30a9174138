"""``teacher-cache`` from the outside, with a tiny model."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from teacher_cache.bundle import unbundle
from teacher_cache.cached_scorer import CachedScorer
from teacher_cache.cli import main
from teacher_cache.client import ClientConfig, TeacherClient
from teacher_cache.identity import Expectation, identify_checkpoint, identify_tokenizer
from teacher_cache.local_teacher import LocalTeacherConfig
from teacher_cache.record import TeacherRecord
from teacher_cache.scorer import ScoreRequest
from teacher_cache.store import RecordStore
from tests.conftest import VOCABULARY, make_tiny_tokenizer
from tests.teacher_cache.build_requests import assert_same
from tests.teacher_cache.test_transformers_scorer import request

ROOT = Path(__file__).parents[2]


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt_ids": [1, 2, number], "response_ids": [5, 6, number, 7]} for number in range(6)]
    rows += [{"prompt": "What is 2 plus 2?", "response": "4", "uid": "by-text"}]
    rows += [{"prompt_ids": [1] * 100, "response_ids": [2] * 100}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_data_set_is_scored_once_and_a_run_finds_it(
    tiny_llama_dir: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    words = ["score", "--model", str(tiny_llama_dir), "--dtype", "fp32", "--device", "cpu", "--data", str(answers)]
    words += ["--out", str(store), "--draw", "systematic(4)", "--seed", "7"]
    assert main(words) == 0
    first = capsys.readouterr()
    assert "7 scored, 0 were there, 1 refused" in first.out
    assert "context holds 128" in first.err
    assert main(words) == 0
    assert "0 scored, 7 were there, 1 refused" in capsys.readouterr().out

    def load() -> CachedScorer:
        raise AssertionError("the teacher was loaded")

    teacher = LocalTeacherConfig(model=tiny_llama_dir, dtype="fp32", device="cpu")
    with RecordStore(store) as opened:
        asked = ScoreRequest(
            uid="0-2-0-0",
            prompt_ids=(1, 2, 2),
            response_ids_T=request(1, 4).response_ids_T.new_tensor([5, 6, 2, 7]),
            draw="systematic(4)",
            run_seed=7,
        )
        (found,) = CachedScorer(load, opened, identity=teacher.identity()).score([asked])
    (fresh,) = teacher.load(VOCABULARY).score([asked])
    assert isinstance(found, TeacherRecord)
    assert isinstance(fresh, TeacherRecord)
    assert_same(found, fresh, 1e-5)

    assert main(["stats", str(store)]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 7
    assert main(["export", str(store), "--out", str(tmp_path / "out"), "--per-file", "5"]) == 0
    files = [Path(line) for line in capsys.readouterr().out.split()]
    exported = [unbundle(file.read_bytes()).records for file in files]
    assert [len(records) for records in exported] == [5, 2]
    assert exported[0][0].tensors["scores"].shape[1] == 6
    shutil.copytree(tmp_path / "out", tmp_path / "elsewhere" / "shards")
    assert main(["gc", str(tmp_path / "elsewhere")]) == 0
    assert json.loads(capsys.readouterr().out)["adopted"] == 2
    with RecordStore(tmp_path / "elsewhere") as opened:
        assert CachedScorer(load, opened, identity=teacher.identity()).score([asked])
    capsys.readouterr()
    assert main(["verify", str(store)]) == 0
    (shard,) = (store / "shards").rglob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["verify", str(store)]) == 1
    assert main(["verify", str(store)]) == 0
    assert main(["gc", str(store), "--max-gb", "0.001"]) == 0


def test_what_cannot_work_is_a_message_and_a_status(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 2
    assert "serve" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert main(["stats", str(tmp_path / "nowhere")]) == 1
    assert "holds no store" in capsys.readouterr().err
    assert main(["serve", "--model", str(tmp_path)]) == 1
    assert "no config.json" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text('{"prompt_ids": [1]}\n')
    words = ["--model", str(tiny_llama_dir), "--data", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "s")]
    assert main(["score", *words]) == 1
    assert "line 1 of" in capsys.readouterr().err


def test_a_checkpoints_identity_follows_its_bytes_and_its_tokenizer(tiny_llama_dir: Path, tmp_path: Path) -> None:
    identity = identify_checkpoint(tiny_llama_dir, temperature=1.0, dtype="fp32")
    assert identity.max_context == 128
    assert identity.tokenizer == identify_tokenizer(make_tiny_tokenizer())
    assert identity.tokenizer.special_ids == (256, 257, 258)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny_llama_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert identify_checkpoint(copy, temperature=1.0, dtype="fp32").fingerprint == identity.fingerprint
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert identify_checkpoint(copy, temperature=1.0, dtype="fp32").fingerprint != identity.fingerprint


class Served:
    """``teacher-cache serve`` as a process of its own."""

    def __init__(self, model: Path, port: int, *more: str) -> None:
        words = ["serve", "--model", str(model), "--dtype", "fp32", "--device", "cpu", "--port", str(port), *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "teacher_cache.cli", *words], env=environment, stderr=subprocess.PIPE, text=True
        )
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 90
        while True:
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


@pytest.mark.slow
def test_a_service_killed_with_sigkill_and_started_again_loses_no_sample_and_ends_cleanly(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    port = free_port()
    requests = [request(20, 60, seed, draw="systematic(8)") for seed in range(200)]
    first = Served(tiny_llama_dir, port, "--gather-tokens", "200", "--cache", str(tmp_path / "store"))
    second = None
    try:
        first.wait_until_ready()
        config = ClientConfig(deadline_s=150, chunk_tokens=320)
        expected = Expectation(tokenizer=identify_tokenizer(make_tiny_tokenizer()), temperature=1.0)
        results: list[object] = []
        with TeacherClient([first.url], expected=expected, config=config) as client:
            caller = threading.Thread(target=lambda: results.extend(client.score(requests)), daemon=True)
            caller.start()
            while httpx.get(f"{first.url}/health").json()["scored"] < 800:
                time.sleep(0.005)
            first.process.kill()
            assert not results
            second = Served(tiny_llama_dir, port, "--cache", str(tmp_path / "store"))
            caller.join(150)
            assert len(results) == 200
            scorer = LocalTeacherConfig(model=tiny_llama_dir, dtype="fp32", device="cpu").load(VOCABULARY)
            for result, fresh in zip(results[::20], scorer.score(requests[::20]), strict=True):
                assert isinstance(result, TeacherRecord)
                assert isinstance(fresh, TeacherRecord)
                assert_same(result, fresh, 1e-5)
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(30) in (0, -signal.SIGTERM)
    finally:
        for served in (first, second):
            if served is not None:
                served.process.kill()
                served.process.wait()
    with RecordStore(tmp_path / "store") as store:
        assert store.verify() == []
