"""What the engine on a vLLM server asks for, against a server that answers at once, or not at all."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from asyncopd.errors import RolloutError
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.vllm_server_engine import VllmServerEngine
from asyncopd.types import RolloutRequest
from tests.conftest import EOS, HEAD_ROWS, VOCABULARY, make_tiny_llama, save_checkpoint

TOKENS = 4
WAIT_S = 20.0


class Server(ThreadingHTTPServer):
    """Speaks as vLLM does. Answers end once ``go`` is set, probes at once; nothing is generated while it is paused."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.go, self.running = threading.Event(), threading.Event()
        self.go.set()
        self.running.set()
        self.version = ""
        self.generated: list[dict[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        data = json.dumps(self._answer(self.path.partition("?")[0], body)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        server = self.server
        if path in ("/pause", "/resume"):
            (server.running.set if path == "/resume" else server.running.clear)()
        elif path == "/update_weight_version":
            server.version = body["new_version"]
        elif path == "/inference/v1/generate":
            return self._generated(body)
        return {}

    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        server, params = self.server, body["sampling_params"]
        server.generated.append(body)
        server.running.wait(WAIT_S)
        if params["max_tokens"] == TOKENS:
            server.go.wait(WAIT_S)
        count = params["max_tokens"]
        asked = [{"token_id": token, "logprob": -1.0} for token in params.get("logprob_token_ids", ())]
        content = [{"token_id": 5, "logprob": 0.0, "top_logprobs": asked}] * count
        spans = [{"version": server.version, "start": 0, "end": count}]
        choice = {"token_ids": [5] * count, "logprobs": {"content": content}, "weight_versions": spans}
        return {"choices": [{**choice, "finish_reason": "length"}]}


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.go.set()
    found.shutdown()
    found.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_tiny_llama(0), tmp_path_factory.mktemp("served") / "student")


def engine(model: Path, server: Server, slots: int = 2) -> VllmServerEngine:
    return VllmServerEngine(
        model, server.url, vocabulary=VOCABULARY, head_rows=HEAD_ROWS, eos_token_ids=(EOS,), run_seed=5,
        sampling=SamplingConfig(max_new_tokens=TOKENS), max_context=64, slots=slots, deadline_s=WAIT_S / 2, version=0,
    )  # fmt: skip


def requests(count: int) -> list[RolloutRequest]:
    return [RolloutRequest(uid=f"s{i}", prompt_ids=(7, 8), min_version=0) for i in range(count)]


def salts(server: Server) -> set[str]:
    found = {body["cache_salt"] for body in server.generated}
    server.generated.clear()
    return found


@pytest.mark.parametrize("slots", [2, 120])
def test_an_update_and_its_probe_do_not_wait_for_the_answers_in_flight(model: Path, server: Server, slots: int) -> None:
    running = engine(model, server, slots)
    server.go.clear()
    running.submit(requests(slots))
    running.load_weights(model, 1)
    assert running.logprobs([1, 2, 3, 4]).tolist() == [-1.0] * 3
    assert running.step() == []
    server.go.set()
    done = []
    while running.in_flight:
        done += running.step()
    assert len(done) == slots


def test_no_two_versions_of_any_engine_share_a_prefix_cache(model: Path, server: Server) -> None:
    seen = []
    for _ in range(2):
        running = engine(model, server)
        seen.append(salts(server))
        running.load_weights(model, 1)
        running.logprobs([1, 2])
        seen.append(salts(server))
    assert len(set[str]().union(*seen)) == len(seen)


def test_a_server_that_was_left_paused_goes_on(model: Path, server: Server) -> None:
    server.running.clear()
    began = time.monotonic()
    engine(model, server)
    assert time.monotonic() - began < WAIT_S / 4


def test_a_server_that_has_gone_is_an_error_that_names_it(model: Path, server: Server) -> None:
    running = engine(model, server)
    server.shutdown()
    server.server_close()
    with pytest.raises(RolloutError, match=f"{server.url}.*gave no answer"):
        running.logprobs([1, 2])
