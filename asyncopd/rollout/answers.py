"""Answers in flight: what every engine does alike once it has logits.

Shape suffixes: B answers in flight, V real vocabulary, T response positions of one answer, C candidates a position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncopd.errors import ConfigError, RequestRefusedError, RolloutError
from asyncopd.rollout.sampling import SamplingConfig, draw_tokens, sampling_logprobs, token_uniforms
from asyncopd.types import FinishReason, Rollout, RolloutRequest
from teacher_cache.designs import SupportDesign, draw_candidates, parse_design
from teacher_cache.noise import noise_for
from teacher_cache.record import CandidateSet

CANDIDATE_STREAM = "candidates"
"""Noise stream of candidate draws."""


@dataclass(slots=True)
class Answer:
    """One answer in flight; ``drawn`` holds, for each token, a candidate set of many answers and this answer's row."""

    request: RolloutRequest
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    log_b: list[float] = field(default_factory=list)
    drawn: list[tuple[CandidateSet, int]] = field(default_factory=list)

    def forget_tokens(self) -> None:
        """Begin anew."""
        for kept in (self.tokens, self.versions, self.log_b, self.drawn):
            kept.clear()


@dataclass(frozen=True, slots=True)
class Draws:
    """What one step drew: of each answer a token, its behaviour logprob (nats) and a row of the candidates, if any."""

    tokens: list[int]
    log_b: list[float]
    candidates: CandidateSet | None


class AnswerSampler:
    """Samples tokens and candidates from logits, and turns ended answers into rollouts.

    What a token is depends on (run seed, uid, position) and its distribution, never on the other answers.

    vocabulary   real token ids of the tokenizer
    end_ids      tokens that end an answer, besides ``sampling.stop_token_ids``
    design       spec of the support design that draws the student's candidates, or None where none are needed
    temperature  of the objective: candidates come from the untruncated softmax at this temperature

    ConfigError for a design that reuses the rollout's own token although it is not drawn from that softmax.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        end_ids: Sequence[int],
        sampling: SamplingConfig,
        run_seed: int,
        design: str | None,
        temperature: float,
    ) -> None:
        self.vocabulary = vocabulary
        self.end_ids = tuple(dict.fromkeys((*end_ids, *sampling.stop_token_ids)))
        self.sampling = sampling
        self._run_seed = run_seed
        self._design = parse_design(design) if design is not None else None
        self._temperature = temperature
        _check_design(self._design, sampling, temperature)

    def admit(
        self, requests: Sequence[RolloutRequest], in_flight: Sequence[Answer], *, version: int, max_context: int
    ) -> list[Answer]:
        """The requests as new answers.

        None is admitted on RequestRefusedError, for a prompt that is empty, would outgrow ``max_context`` or has a
        token beyond the vocabulary, and on RolloutError, for a request that needs other weights than ``version`` or is
        in flight already.
        """
        taken = {answer.request.uid for answer in in_flight}
        for request in requests:
            check_version(request, version)
            longest = len(request.prompt_ids) + self.max_new_tokens(request)
            if not request.prompt_ids or longest > max_context:
                raise RequestRefusedError(
                    f"{request.uid}: {len(request.prompt_ids)} prompt tokens and up to "
                    f"{self.max_new_tokens(request)} new ones; expected at least one prompt token and at most "
                    f"{max_context} in all: leave the prompt out or lower sampling.max_new_tokens"
                )
            if max(request.prompt_ids) >= self.vocabulary:
                raise RequestRefusedError(
                    f"{request.uid} has the token id {max(request.prompt_ids)} in its prompt; expected ids below "
                    f"{self.vocabulary}, the tokenizer's size: tokenise the prompts with the student's tokenizer"
                )
            if request.uid in taken:
                raise RolloutError(f"{request.uid} is in flight already; submit each uid once")
            taken.add(request.uid)
        return [Answer(request) for request in requests]

    def sample(self, answers: Sequence[Answer], logits_BV: Tensor, version: int) -> None:
        """Append one token, its behaviour logprob, its version and its candidates to every answer.

        Arguments and errors as ``draw`` says.
        """
        draws = self.draw(
            [answer.request.uid for answer in answers], [len(answer.tokens) for answer in answers], logits_BV, version
        )
        for row, answer in enumerate(answers):
            self.append(answer, draws, row, version)

    def draw(self, uids: Sequence[str], positions: Sequence[int], logits_BV: Tensor, version: int) -> Draws:
        """The token at ``positions[i]`` of the answer ``uids[i]``, and candidates beside it.

        logits_BV    float32, after the model's own scale and soft-cap, real vocabulary only
        RolloutError if the logits of an answer are not finite.
        """
        log_b_BV = sampling_logprobs(
            logits_BV,
            self.sampling,
            generated_B=torch.tensor(positions, device=logits_BV.device),
            end_ids=self.end_ids,
        )
        tokens_B = draw_tokens(log_b_BV, token_uniforms(self._run_seed, uids, positions))
        log_b_B = log_b_BV.gather(1, tokens_B[:, None])[:, 0].tolist()
        for uid, position, log_b in zip(uids, positions, log_b_B, strict=True):
            if not -float("inf") < log_b <= 0:
                raise RolloutError(
                    f"{uid}: token {position} has logprob {log_b} under version {version}; "
                    "the weights give no finite logits: look at the learner's losses, or roll out in float32"
                )
        candidates = None
        if self._design is not None and self._design.budget > 0:
            plain = not self.sampling.truncated and self.sampling.temperature == self._temperature
            candidates = draw_candidates(
                self._design,
                log_g_TV=log_b_BV if plain else torch.log_softmax(logits_BV / self._temperature, dim=-1),
                noise=noise_for(self._run_seed, list(zip(uids, positions, strict=True)), CANDIDATE_STREAM),
                sampled_T=tokens_B,
                origin="student",
                temperature=self._temperature,
                version=version,
            )
        return Draws(tokens_B.tolist(), log_b_B, candidates)

    def append(self, answer: Answer, draws: Draws, row: int, version: int) -> None:
        """Row ``row`` of the draws becomes the answer's next token."""
        answer.tokens.append(draws.tokens[row])
        answer.log_b.append(draws.log_b[row])
        answer.versions.append(version)
        if draws.candidates is not None:
            answer.drawn.append((draws.candidates, row))

    def finish(self, answer: Answer) -> FinishReason | None:
        """Why the answer has ended; None if it has not."""
        if answer.tokens[-1] in self.end_ids:
            return "eos"
        return "length" if len(answer.tokens) == self.max_new_tokens(answer.request) else None

    def max_new_tokens(self, request: RolloutRequest) -> int:
        """Tokens of the longest answer to a request."""
        longest = self.sampling.max_new_tokens
        return longest if request.max_new_tokens is None else min(longest, request.max_new_tokens)

    def rollout(self, answer: Answer, finish: FinishReason) -> Rollout:
        """An answer that has ended, as it travels on."""
        return Rollout(
            uid=answer.request.uid,
            prompt_ids=answer.request.prompt_ids,
            response_ids_T=torch.tensor(answer.tokens, dtype=torch.int32),
            versions_T=torch.tensor(answer.versions, dtype=torch.int32),
            log_b_T=torch.tensor(answer.log_b, dtype=torch.float32),
            finish=finish,
            candidates=self._candidates(answer),
        )

    def _candidates(self, answer: Answer) -> CandidateSet | None:
        """The candidates of a whole answer; their version is that of the oldest token, which bounds staleness."""
        if self._design is None:
            return None
        ids_TC, log_w_TC, log_g_TC = _gathered(answer, self.vocabulary)
        return CandidateSet(
            origin="student",
            design=self._design.spec,
            temperature=self._temperature,
            version=min(answer.versions),
            ids_TC=ids_TC,
            log_w_TC=log_w_TC,
            log_g_TC=log_g_TC,
        )


def check_version(request: RolloutRequest, version: int) -> None:
    """RolloutError if weights of ``version`` may not generate the request."""
    if request.exact_version is not None and request.exact_version != version:
        raise RolloutError(
            f"{request.uid} may only be generated by version {request.exact_version}; the weights are {version}: "
            "load that version first"
        )
    if version < request.min_version:
        raise RolloutError(
            f"{request.uid} needs version {request.min_version} or newer; the weights are {version}: load them first"
        )


def _gathered(answer: Answer, vocabulary: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, log weights and, for a design that thins, proposal logprobs of every position."""
    if not answer.drawn:
        # The whole vocabulary with weight 1: one row, seen once a position.
        shape = (len(answer.tokens), vocabulary)
        return torch.arange(vocabulary, dtype=torch.int32).expand(shape), torch.zeros(()).expand(shape), None
    ids_TC = torch.stack([drawn.ids_TC[row] for drawn, row in answer.drawn]).cpu()
    log_w_TC = torch.stack([drawn.log_w_TC[row] for drawn, row in answer.drawn]).cpu()
    log_g = [drawn.log_g_TC[row] for drawn, row in answer.drawn if drawn.log_g_TC is not None]
    return ids_TC, log_w_TC, torch.stack(log_g).cpu() if log_g else None


def _check_design(design: SupportDesign | None, sampling: SamplingConfig, temperature: float) -> None:
    if design is None or not design.reuses_sampled_token:
        return
    if sampling.truncated or sampling.temperature != temperature:
        raise ConfigError(
            f"{design.spec} reuses the rollout's own token, so it must be drawn from the softmax at the objective's "
            f"temperature {temperature}; sampling has temperature {sampling.temperature}, truncated: "
            f"{sampling.truncated}: sample plainly, or take systematic(16)"
        )
