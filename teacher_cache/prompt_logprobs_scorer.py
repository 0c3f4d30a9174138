"""Teacher records from a stock server that offers ``prompt_logprobs``: vLLM's OpenAI-compatible one, started by others.

Such a server gives the likeliest tokens and the prompt's own at temperature 1, and nothing else: no other temperature,
no token of one's choice, no entropy (NaN in the records). What cannot be had is refused before the first request.
Logprobs are normalised over the rows of the server's head, padded ones included.

Shape suffixes: T response positions, K likeliest tokens.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from teacher_cache.client import ClientConfig
from teacher_cache.designs import SupportDesign, parse_design
from teacher_cache.errors import HandshakeError, ScoringError, ServiceError
from teacher_cache.identity import Expectation, vocabulary_of
from teacher_cache.record import CandidateSet, TeacherRecord
from teacher_cache.record_builder import refusal
from teacher_cache.replicas import Replica, Replicas
from teacher_cache.scorer import ScoreRequest

DESIGNS = ("top_k", "top_k_tail")
"""Designs that need no more than the likeliest tokens."""

LEAST_LOGPROB = -9999.0
"""What vLLM writes for a probability of zero."""

_PROBE = "Fünf plus seven is 12,\n\tisn't it?"
_SLACK = 1e-3
_AT_ONCE = 8
_FAILURES = 3
_TELL_S = 1.0

Result = TeacherRecord | ScoringError


def impossible(expected: Expectation) -> list[str]:
    """What of the expectation no such server can give, in words."""
    found = []
    if expected.temperature not in (None, 1.0):
        found.append(f"temperature: {expected.temperature} here, prompt_logprobs are at 1.0")
    if expected.draw is not None and expected.draw.partition("(")[0] not in DESIGNS:
        found.append(f"design: teacher-drawn {expected.draw} here, prompt_logprobs give the likeliest tokens only")
    student_drawn = list(expected.designs)
    if expected.draw in student_drawn:
        student_drawn.remove(expected.draw)
    for spec in student_drawn:
        found.append(f"design: student-drawn {spec} here, prompt_logprobs give no score of a token of one's choice")
    return found


class PromptLogprobsScorer:
    """A Scorer over such servers; connects at once, and is safe from several threads.

    urls            replicas of one teacher, each serving one model
    expected        what the teacher must be; ``designs`` and ``draw`` say what it will be asked for
    tokenizer       the student's, which the server's must be too: compared on a probe and on every special token
    while_waiting   called about once a second until answers are there

    HandshakeError names each difference; ServiceError where no server answers before the deadline.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        expected: Expectation,
        tokenizer: PreTrainedTokenizerBase,
        config: ClientConfig | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        found = impossible(expected)
        if found:
            raise HandshakeError(
                f"{'; '.join(found)}: serve the teacher with `teacher-cache serve`, or take teacher-drawn top_k(K) at "
                "temperature 1"
            )
        self._config = config or ClientConfig()
        self._design = parse_design(expected.draw) if expected.draw else None
        self._vocabulary = vocabulary_of(tokenizer)
        self._probe_ids: list[int] = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        self._while_waiting = while_waiting
        self._replicas = Replicas([Replica(url.rstrip("/")) for url in urls])
        self._choosing = threading.Lock()
        headers = {} if self._config.token is None else {"Authorization": f"Bearer {self._config.token}"}
        timeout = httpx.Timeout(self._config.attempt_s, connect=self._config.connect_s)
        self._http = httpx.Client(timeout=timeout, headers=headers, trust_env=False)
        self._pool = ThreadPoolExecutor(_AT_ONCE * len(urls), thread_name_prefix="prompt-logprobs")
        try:
            self._models = {replica.url: self._shake(replica, tokenizer) for replica in self._replicas.all}
        except (HandshakeError, ServiceError):
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def max_context(self) -> int:
        """Longest prompt plus response, in tokens: one less than the server's, which always generates a token."""
        return min(length for _, length in self._models.values()) - 1

    def score(self, requests: Sequence[ScoreRequest]) -> list[Result]:
        """One result a request, in order. ServiceError at the deadline, or when a server refuses every call."""
        deadline = time.monotonic() + self._config.deadline_s
        pending = [self._pool.submit(self._score, request, deadline) for request in requests]
        while wait(pending, timeout=_TELL_S).not_done:
            self._while_waiting()
        return [scored.result() for scored in pending]

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def _score(self, request: ScoreRequest, deadline: float) -> Result:
        refused = refusal(request, vocabulary=self._vocabulary, max_context=self.max_context, temperature=1.0)
        if refused is not None:
            return refused
        if request.candidates is not None or (request.draw and parse_design(request.draw) != self._design):
            return ScoringError(f"{request.uid}: asks for more than was agreed on; connect with what it needs")
        if len(request.response_ids_T) == 0:
            return _record([], request, self._design, self._vocabulary, self._config.teacher)
        ids = [*request.prompt_ids, *request.response_ids_T.tolist()]
        answer = self._ask("/v1/completions", self._question(ids), deadline)
        if answer.status_code != 200:
            return ScoringError(f"{request.uid}: the server refuses it ({answer.status_code}): {_message(answer)}")
        try:
            rows = answer.json()["choices"][0]["prompt_logprobs"][len(request.prompt_ids) :]
            return _record(rows, request, self._design, self._vocabulary, self._config.teacher)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            return ScoringError(f"{request.uid}: the server's answer has no prompt_logprobs as vLLM's ({error!r})")

    def _question(self, ids: Sequence[int]) -> dict[str, Any]:
        return {
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0 if self._design is None else self._design.budget,
        }

    def _ask(self, path: str, body: dict[str, Any], deadline: float) -> httpx.Response:
        """The first answer of any replica that is neither a failure that may pass nor a refusal of every call.

        A failure counts as the answer once it has come ``_FAILURES`` times from servers that answer something else.
        """
        failures = 0
        while True:
            with self._choosing:
                replica = self._replicas.pick()
                pause = self._replicas.next_try_s()
                if replica is not None:
                    replica.load += 1
            if time.monotonic() + (0.0 if replica else pause) >= deadline:
                raise ServiceError(
                    f"no server answered within {self._config.deadline_s:g} s ({self._replicas.problems()}); start "
                    "one, or raise the deadline"
                )
            if replica is None:
                time.sleep(pause)
                continue
            try:
                answer = self._http.post(replica.url + path, json={**body, "model": self._models[replica.url][0]})
            except httpx.TransportError as error:
                replica.failed(repr(error))
                continue
            finally:
                with self._choosing:
                    replica.load -= 1
            failures += answer.status_code >= 500
            may_pass = answer.status_code == 429 or answer.status_code >= 500
            if may_pass and not (failures >= _FAILURES and self._works(replica)):
                replica.failed(f"status {answer.status_code}")
                continue
            replica.answered()
            if answer.status_code in (401, 403, 404):
                raise ServiceError(f"{replica.url} refuses the call ({answer.status_code}): {_message(answer)}")
            return answer

    def _works(self, replica: Replica) -> bool:
        """Whether a server scores the probe that it scored in the handshake."""
        name, length = self._models[replica.url]
        question = self._question(self._probe_ids[: length - 1])
        try:
            return self._http.post(f"{replica.url}/v1/completions", json={**question, "model": name}).status_code == 200
        except httpx.TransportError:
            return False

    def _shake(self, replica: Replica, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
        """Name and context length of the model that a server serves, once it has shown that it can do its part."""
        served = self._told(replica, "/v1/models", None)["data"]
        if len(served) != 1:
            raise HandshakeError(
                f"{replica.url} serves {[each['id'] for each in served]}; expected one model: start a server for each"
            )
        name, length = str(served[0]["id"]), int(served[0]["max_model_len"])
        ids = self._probe_ids
        asked = {"model": name, "prompt": _PROBE, "add_special_tokens": False}
        theirs = self._told(replica, "/tokenize", asked)["tokens"]
        if theirs != ids:
            raise HandshakeError(f"tokenizer: {_PROBE!r} is {ids} here, {theirs} at {replica.url}")
        for index in tokenizer.all_special_ids:
            own = tokenizer.decode([index], skip_special_tokens=False)
            its = self._told(replica, "/detokenize", {"model": name, "tokens": [index]})["prompt"]
            if own != its:
                raise HandshakeError(f"special token {index}: {own!r} here, {its!r} at {replica.url}")
        self._told(replica, "/v1/completions", {**self._question(ids[: length - 1]), "model": name})
        return name, length

    def _told(self, replica: Replica, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """What a server says in the handshake, for which it is waited until the deadline."""
        deadline = time.monotonic() + self._config.deadline_s
        while True:
            try:
                url = replica.url + path
                answer = self._http.get(url) if body is None else self._http.post(url, json=body)
            except httpx.TransportError as error:
                replica.failed(repr(error))
            else:
                if answer.status_code == 200:
                    return answer.json()
                if answer.status_code < 500:
                    raise HandshakeError(
                        f"{replica.url}{path} answers {answer.status_code}: {_message(answer)}; expected a vLLM server "
                        "that takes token ids and gives prompt_logprobs (--max-logprobs at least the design's budget)"
                    )
                replica.failed(f"status {answer.status_code}")
            if time.monotonic() + self._replicas.next_try_s() >= deadline:
                raise ServiceError(f"no server answers ({self._replicas.problems()}); start it, or raise the deadline")
            self._while_waiting()
            time.sleep(self._replicas.next_try_s())


def _record(
    rows: Sequence[dict[str, Any]], request: ScoreRequest, design: SupportDesign | None, vocabulary: int, teacher: str
) -> Result:
    """The record of one answer, or the error where a token or a rank is missing, or a number is no logprob."""
    own, ids, scores = [], [], []
    if len(rows) != len(request.response_ids_T):
        return ScoringError(f"{request.uid}: {len(rows)} positions came back of {len(request.response_ids_T)}")
    budget = 0 if design is None else design.budget
    for position, (row, token) in enumerate(zip(rows, request.response_ids_T.tolist(), strict=True)):
        likeliest = {int(entry["rank"]): (int(index), _nats(entry)) for index, entry in row.items()}
        top = [likeliest[rank] for rank in range(1, budget + 1) if rank in likeliest]
        problem = None
        if str(token) not in row:
            problem = f"no logprob of its own token {token}"
        elif len(top) < budget:
            problem = f"{len(top)} of the {budget} likeliest tokens"
        elif any(index >= vocabulary for index, _ in top):
            problem = f"a token outside the vocabulary of {vocabulary} among the likeliest; compare the tokenizers"
        elif sum(math.exp(score) for _, score in top) > 1 + _SLACK or _nats(row[str(token)]) > _SLACK:
            problem = "numbers that are no logprobs; start the server with --logprobs-mode raw_logprobs"
        if problem is not None:
            return ScoringError(f"{request.uid}: position {position} came back with {problem}")
        own.append(_nats(row[str(token)]))
        ids.append([index for index, _ in top])
        scores.append([score for _, score in top])
    log_q_T = torch.tensor(own, dtype=torch.float32)
    sets: tuple[CandidateSet, ...] = ()
    if design is not None:
        log_q_TK = torch.tensor(scores, dtype=torch.float32).reshape(len(own), budget)
        sets = (
            CandidateSet(
                origin="teacher",
                design=design.spec,
                temperature=1.0,
                version=None,
                ids_TC=torch.tensor(ids, dtype=torch.int32).reshape(len(own), budget),
                log_w_TC=torch.zeros_like(log_q_TK).where(log_q_TK > -torch.inf, -torch.inf),
                log_q_TC=log_q_TK,
            ),
        )
    return TeacherRecord(
        temperature=1.0,
        teacher=teacher,
        log_q_T=log_q_T,
        entropy_T=torch.full_like(log_q_T, torch.nan),
        sets=sets,
    )


def _nats(entry: dict[str, Any]) -> float:
    logprob = float(entry["logprob"])
    return -math.inf if logprob <= LEAST_LOGPROB else logprob


def _message(answer: httpx.Response) -> str:
    return answer.text[:300]
