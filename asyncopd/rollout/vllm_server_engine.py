"""Rollouts from a vLLM server that runs elsewhere on this machine, asked by URL.

    VLLM_SERVER_DEV_MODE=1 vllm serve STUDENT --generation-config vllm --logprobs-mode processed_logprobs \\
        --worker-extension-cls asyncopd.rollout.vllm_worker.WorkerExtension --enable-scale-out

Prompts and answers are token ids. The server samples, with a seed of its own for every answer, and says itself which
weights sampled which tokens; an update pauses it, has it read the published file, and lets it go on. Its sampler is
its own: min-p comes before top-k and top-p there. It shows no logits, so it draws no candidates: have them drawn by a
proposal pass (``teacher.proposal pass``).
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import torch
from torch import Tensor

from asyncopd.errors import ConfigError, RolloutError
from asyncopd.rollout.answers import Answer, AnswerSampler, check_version
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.weights import check_shapes, stored_shapes
from asyncopd.types import Rollout, RolloutRequest
from teacher_cache.noise import position_uniforms

_LOOK_S = 0.05
"""Seconds that a step waits for an answer to end."""
_PROBES = 8
"""Requests that are asked beside the answers, which may hold every slot for minutes."""
_SEEDS = 2**31
_BANNED = -100.0
"""The lowest bias that vLLM takes; no mass is left to such a token."""


class VllmServerEngine:
    """A RolloutEngine behind a URL; a step waits a moment and returns the answers that ended.

    model        directory of the checkpoint that the server was started with; published weights must have its tensors
    head_rows    rows of its head; those beyond ``vocabulary`` are never drawn
    deadline_s   seconds that an answer or an update may take before the server is given up

    ConfigError where no server answers, or it was started without what this engine needs.
    """

    def __init__(
        self,
        model: Path | str,
        url: str,
        *,
        vocabulary: int,
        head_rows: int,
        eos_token_ids: Sequence[int],
        sampling: SamplingConfig,
        run_seed: int,
        temperature: float = 1.0,
        slots: int = 16,
        max_context: int,
        deadline_s: float = 600.0,
        version: int = -1,
    ) -> None:
        self._sampler = AnswerSampler(
            vocabulary=vocabulary,
            end_ids=eos_token_ids,
            sampling=sampling,
            run_seed=run_seed,
            design=None,
            temperature=temperature,
        )
        self._run_seed = run_seed
        # Head rows beyond the vocabulary would be drawn like any other.
        self._bias = {str(row): _BANNED for row in range(vocabulary, head_rows)}
        self._max_context = max_context
        self._shapes = stored_shapes(Path(model))
        # Answers hold their connections, and an update must not wait for one.
        unlimited = httpx.Limits(max_connections=None)
        self._client = httpx.Client(base_url=url, timeout=deadline_s, limits=unlimited, trust_env=False)
        self._threads = ThreadPoolExecutor(max_workers=slots + _PROBES)
        self._version = version
        # The server outlives this engine, and keys and values of earlier weights may outlive an update.
        self._salt = uuid4().hex
        self._answers: dict[str, Answer] = {}
        self._asked: dict[Future[dict[str, Any]], str] = {}
        self._shake_hands(url)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token will be sampled from; -1 before the first load."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._answers)

    def load_weights(self, directory: Path, version: int) -> None:
        """Pause the server, have it read the weights published as ``version``, and let it go on.

        Answers in flight go on over the keys and values that older weights left. CheckpointError, before anything is
        changed, if the file does not fit the model.
        """
        for answer in self._answers.values():
            check_version(answer.request, version)
        check_shapes(Path(directory), self._shapes, tied_head="lm_head.weight" not in self._shapes)
        self._post("/pause?mode=keep&clear_cache=false")
        self._post("/collective_rpc", method="load_published", args=[str(Path(directory).absolute())])
        self._post("/update_weight_version", new_version=str(version))
        self._post("/resume")
        self._version = version
        self._salt = uuid4().hex

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Take requests; they start at once. Errors as ``AnswerSampler.admit`` says."""
        admitted = self._sampler.admit(
            requests, list(self._answers.values()), version=self._version, max_context=self._max_context
        )
        for answer in admitted:
            self._begin(answer)

    def step(self) -> list[Rollout]:
        """The answers that have ended; waits a moment if none has. RolloutError where the server fails."""
        done, _ = wait(self._asked, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        ended = []
        for future in done:
            answer = self._answers.pop(self._asked.pop(future))
            ended.append(self._rollout(answer, future.result()))
        return ended

    def abandon(self, uids: Sequence[str]) -> None:
        """Forget requests whose lease was lost; uids that are not in flight are ignored."""
        lost = [uid for uid in uids if self._answers.pop(uid, None) is not None]
        self._asked = {future: uid for future, uid in self._asked.items() if uid not in set(lost)}
        if lost:
            self._post("/inference/v1/abort_requests", request_ids=lost)

    def restart(self, keep_tokens: bool) -> None:
        """Compute the state of every answer in flight anew, or begin them anew."""
        if keep_tokens:
            self._post("/reset_prefix_cache?reset_running_requests=true")
            return
        answers = list(self._answers.values())
        self.abandon(list(self._answers))
        for answer in answers:
            self._begin(answer)

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """Logprobs of each token after the first, asked for as the next token of as many prompts."""
        futures = [self._threads.submit(self._next, ids[:place], ids[place]) for place in range(1, len(ids))]
        return torch.tensor([future.result() for future in futures])

    def _next(self, ids: Sequence[int], token: int) -> float:
        """Logprob of ``token`` after ``ids``."""
        # As many come back as are asked for, the sampled token first; so that this one does, another is asked for too.
        asked = [token, (token + 1) % self._sampler.vocabulary]
        params = {"max_tokens": 1, "temperature": 1.0, "logprobs": 2, "logprob_token_ids": asked}
        found = self._generate(f"probe-{len(ids)}", ids, params)["choices"][0]["logprobs"]["content"][0]
        return next(each["logprob"] for each in found["top_logprobs"] if each["token_id"] == token)

    def _begin(self, answer: Answer) -> None:
        uid, sampling = answer.request.uid, self._sampler.sampling
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "min_tokens": sampling.min_new_tokens,
            "max_tokens": self._sampler.max_new_tokens(answer.request),
            "seed": int(position_uniforms(self._run_seed, uid, 0, "server", 1)[0] * _SEEDS),
            "logprobs": 0,
        }
        self._answers[uid] = answer
        self._asked[self._threads.submit(self._generate, uid, answer.request.prompt_ids, params)] = uid

    def _rollout(self, answer: Answer, found: dict[str, Any]) -> Rollout:
        choice = found["choices"][0]
        answer.tokens = choice["token_ids"]
        answer.log_b = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        answer.versions = [
            int(span["version"]) for span in choice["weight_versions"] for _ in range(span["start"], span["end"])
        ]
        finish = self._sampler.finish(answer)
        if finish is None or not len(answer.tokens) == len(answer.log_b) == len(answer.versions):
            raise RolloutError(
                f"{answer.request.uid}: the server's answer has {len(answer.tokens)} tokens, {len(answer.log_b)} "
                f"logprobs, {len(answer.versions)} versions and ended by {choice['finish_reason']!r}; expected as many "
                "of each, and an end by EOS or length: start the server as the documentation of this engine says"
            )
        return self._sampler.rollout(answer, finish)

    def _generate(self, uid: str, ids: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
        always = {"stop_token_ids": list(self._sampler.end_ids), "detokenize": False, "logit_bias": self._bias}
        answered = self._post(
            "/inference/v1/generate",
            request_id=uid,
            token_ids=list(ids),
            sampling_params={**params, **always},
            cache_salt=self._salt,
        )
        return answered.json()

    def _post(self, path: str, **body: object) -> httpx.Response:
        """The server's answer; RolloutError where it has none, or refuses."""
        try:
            answered = self._client.post(path, json=body)
        except httpx.HTTPError as error:
            raise RolloutError(
                f"{self._client.base_url}{path} gave no answer ({error!r}); is the server up?"
            ) from error
        if not answered.is_success:
            raise RolloutError(f"{path} answered {answered.status_code}: {answered.text[:500]}")
        return answered

    def _shake_hands(self, url: str) -> None:
        """One token from the only one of the most likely: with processed logprobs, its probability is 1."""
        try:
            # A worker that was killed in the middle of an update leaves the server paused.
            self._post("/resume")
            found = self._generate("hello", [0], {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0})
            self._post("/update_weight_version", new_version=str(self._version))
        except RolloutError as error:
            raise ConfigError(
                f"no vLLM server in development mode answers at {url}: {error}; start one with "
                "VLLM_SERVER_DEV_MODE=1 and the options in asyncopd/rollout/vllm_server_engine.py"
            ) from error
        if abs(found["choices"][0]["logprobs"]["content"][0]["logprob"]) > 1e-5:
            raise ConfigError(
                f"the server at {url} returns logprobs of the model, not of what it samples from; "
                "start it with --logprobs-mode processed_logprobs"
            )
