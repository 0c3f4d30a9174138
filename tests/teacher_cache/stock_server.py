"""A stand-in for vLLM's OpenAI-compatible server: the same answers of the few routes that a scorer asks."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from teacher_cache.scripted import scripted_logits
from tests.conftest import VOCABULARY

MAX_LOGPROBS = 20


def log_q(prefix: list[int]) -> torch.Tensor:
    """The server's distribution [V] after some tokens, of which it remembers two."""
    return torch.log_softmax(scripted_logits(VOCABULARY, *prefix[-2:]), dim=-1)


class StockServer:
    """Serves one model of the tiny vocabulary on a real port.

    damage   what becomes of the ``prompt_logprobs`` of an answer; the handshake's stay whole
    fails    tokens on which a completion ends with the status 500
    refuses  statuses that the next calls for a completion are answered with
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        models: tuple[str, ...] = ("teacher",),
        context: int = 64,
        damage: Callable[[list[Any]], None] = lambda rows: None,
        fails: Callable[[list[int]], bool] = lambda ids: False,
    ) -> None:
        self._tokenizer = tokenizer
        self._models = models
        self._context = context
        self._damage = damage
        self._fails = fails
        self.refuses: list[int] = []
        self.asked: list[dict[str, Any]] = []
        app = Starlette(
            routes=[
                Route("/v1/models", self._list),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        self._thread = threading.Thread(target=self.server.run)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.should_exit = True
        self._thread.join(30)

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": name, "max_model_len": self._context} for name in self._models]})

    async def _tokenize(self, request: Request) -> Response:
        asked = await request.json()
        return JSONResponse({"tokens": self._tokenizer(asked["prompt"], add_special_tokens=False)["input_ids"]})

    async def _detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": self._tokenizer.decode((await request.json())["tokens"])})

    async def _complete(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        if self.refuses:
            return JSONResponse({"error": {"message": "no"}}, status_code=self.refuses.pop())
        if self._fails(asked["prompt"]):
            return JSONResponse({"error": {"message": "broken on this"}}, status_code=500)
        if asked["prompt_logprobs"] > MAX_LOGPROBS:
            message = f"Requested prompt logprobs of {asked['prompt_logprobs']}, above {MAX_LOGPROBS}"
            return JSONResponse({"error": {"message": message}}, status_code=400)
        ids = asked["prompt"]
        rows: list[Any] = [None]
        for place in range(1, len(ids)):
            scores = log_q(ids[:place])
            order = scores.argsort(descending=True).tolist()
            named = [ids[place], *order[: asked["prompt_logprobs"]]]
            rows.append(
                {
                    str(index): {"logprob": max(-9999.0, float(scores[index])), "rank": order.index(index) + 1}
                    for index in named
                }
            )
        if len(self.asked) > 1:
            self._damage(rows)
        return JSONResponse({"choices": [{"prompt_logprobs": rows}]})
