"""Rollouts with transformers models: a small sampling loop over a batch whose rows come and go.

Shape suffixes: B rows in flight, P longest prompt of those that join, L positions in the cache.

    submit ──> waiting ──prefill──┐
                                  ├──> logits ──> token, log_b, candidates ──> answers that ended
               running ──decode───┘       ^
                                    load_weights, between steps
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncopd.errors import ConfigError
from asyncopd.rollout.answers import Answer, AnswerSampler, check_version
from asyncopd.rollout.grouped_attention import grouped_attention
from asyncopd.rollout.kv_cache import RowCache
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.weights import load_weights_into
from asyncopd.types import Rollout, RolloutRequest

ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types whose state is one key and one value a position."""


@dataclass(slots=True)
class _Running:
    """Answers that share a cache: row i of the cache starts with ``pads[i]`` positions of padding."""

    cache: RowCache
    answers: list[Answer]
    pads: list[int]

    def remove(self, indices: Sequence[int]) -> None:
        """Rows leave; from the last to the first, because the last row takes the place of one that leaves."""
        for index in reversed(indices):
            self.cache.remove_row(index)
            self.answers[index], self.pads[index] = self.answers[-1], self.pads[-1]
            self.answers.pop()
            self.pads.pop()

    def join(self, other: "_Running") -> None:
        """Take the rows of ``other``; whoever is shorter is padded."""
        length = max(self.cache.length, other.cache.length)
        for side in (self, other):
            side.pads = [pad + length - side.cache.length for pad in side.pads]
        self.cache.add_rows(other.cache)
        self.answers += other.answers
        self.pads += other.pads

    def trim(self) -> None:
        """Drop padding that every row has, when room must be made anyway or when it costs a quarter of attention."""
        shared = min(self.pads)
        if shared and (self.cache.full or 4 * shared > self.cache.length):
            self.cache.trim(shared)
            self.pads = [pad - shared for pad in self.pads]


class TransformersEngine:
    """A RolloutEngine over one model in this process.

    model        a loaded causal language model, taken as it is and put into evaluation mode, or the directory of one
    vocabulary   real token ids of the tokenizer; head rows beyond them can neither be drawn nor be candidates
    eos_token_ids   tokens that end an answer, besides ``sampling.stop_token_ids``
    design       spec of the support design that draws the student's candidates, or None where none are needed
    temperature  of the objective: candidates come from the untruncated softmax at this temperature
    dtype, device   for a model that is loaded from a directory
    version      policy version of the weights that the model already holds; -1 admits no request before a load

    ConfigError for a model that keeps more than keys and values (no linear attention), and for a design that reuses
    the rollout's own token although it is not drawn from the softmax at ``temperature``.
    """

    def __init__(
        self,
        model: PreTrainedModel | Path | str,
        *,
        vocabulary: int,
        eos_token_ids: Sequence[int],
        sampling: SamplingConfig,
        run_seed: int,
        design: str | None = None,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        version: int = -1,
    ) -> None:
        self._sampler = AnswerSampler(
            vocabulary=vocabulary,
            end_ids=eos_token_ids,
            sampling=sampling,
            run_seed=run_seed,
            design=design,
            temperature=temperature,
        )
        if isinstance(model, (str, Path)):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
        self._model = model.eval()
        self._device = self._model.device
        self._version = version
        self._waiting: list[Answer] = []
        self._running: _Running | None = None
        config = self._model.config.get_text_config(decoder=True)
        self._max_context: int = config.max_position_embeddings
        _check_model(config.to_dict(), vocabulary)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token will be sampled from; -1 before the first load."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._answers())

    def load_weights(self, directory: Path, version: int) -> None:
        """Take the weights published as ``version``; tokens sampled from now on carry that version.

        Answers in flight go on over the keys and values that older weights left. CheckpointError if the file does not
        fit the model; RolloutError if an answer in flight may only be generated by another version.
        """
        for answer in self._answers():
            check_version(answer.request, version)
        load_weights_into(self._model, directory)
        self._version = version

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Take requests; they start together at the next step.

        RolloutError, and none is taken, if one needs other weights than those loaded, is in flight already, has an
        empty prompt, or would outgrow the model's context.
        """
        self._waiting += self._sampler.admit(
            requests, self._answers(), version=self._version, max_context=self._max_context
        )

    def abandon(self, uids: Sequence[str]) -> None:
        """Forget requests whose lease was lost; uids that are not in flight are ignored."""
        lost = set(uids)
        self._waiting = [answer for answer in self._waiting if answer.request.uid not in lost]
        if self._running is not None:
            answers = self._running.answers
            self._remove([index for index, answer in enumerate(answers) if answer.request.uid in lost])

    def restart(self, keep_tokens: bool) -> None:
        """Compute the keys and values of every answer in flight anew, or begin them anew."""
        self._waiting = self._answers()
        self._running = None
        if not keep_tokens:
            for answer in self._waiting:
                answer.forget_tokens()

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """Logprobs of each token after the first, from one forward."""
        ids_1L = torch.tensor([list(ids)], device=self._device)
        logits_LV = self._model(input_ids=ids_1L, use_cache=False).logits[0, :-1, : self._sampler.vocabulary].float()
        return torch.log_softmax(logits_LV, dim=-1).gather(1, ids_1L[0, 1:, None])[:, 0].cpu()

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        """Sample one token for every answer in flight; the answers that ended with it.

        RolloutError if the logits of an answer are not finite.
        """
        parts = []
        if self._running is not None:
            parts.append(self._decode(self._running))
        if self._waiting:
            parts.append(self._prefill())
        if self._running is None:
            return []
        answers = self._running.answers
        self._sampler.sample(answers, torch.cat(parts)[:, : self._sampler.vocabulary].float(), self._version)
        reasons = [self._sampler.finish(answer) for answer in answers]
        ended = [
            self._sampler.rollout(answer, reason)
            for answer, reason in zip(answers, reasons, strict=True)
            if reason is not None
        ]
        self._remove([index for index, reason in enumerate(reasons) if reason is not None])
        return ended

    def _answers(self) -> list[Answer]:
        return [*self._waiting, *(self._running.answers if self._running is not None else ())]

    def _decode(self, running: _Running) -> Tensor:
        """Logits [B, head rows] after the newest token of every running answer."""
        running.trim()
        ids_B1 = torch.tensor([[answer.tokens[-1]] for answer in running.answers])
        return self._forward(ids_B1, running.pads, running.cache.length + 1, running.cache)

    def _prefill(self) -> Tensor:
        """Logits [answers that join, head rows] after all their tokens; the answers are running from then on."""
        prompts = [[*answer.request.prompt_ids, *answer.tokens] for answer in self._waiting]
        width = max(len(prompt) for prompt in prompts)
        joining = _Running(RowCache(), self._waiting, [width - len(prompt) for prompt in prompts])
        self._waiting = []
        ids_BP = torch.tensor([[0] * pad + prompt for pad, prompt in zip(joining.pads, prompts, strict=True)])
        logits = self._forward(ids_BP, joining.pads, width, joining.cache)
        if self._running is None:
            self._running = joining
        else:
            self._running.join(joining)
        return logits

    def _forward(self, ids: Tensor, pads: Sequence[int], length: int, cache: RowCache) -> Tensor:
        """Logits [B, head rows] after ``ids`` [B, new], the last of ``length`` positions, ``pads`` of them padding."""
        pads_B1 = torch.tensor(pads)[:, None]
        index_L = torch.arange(length)
        positions = (index_L[-ids.shape[1] :] - pads_B1).clamp(min=0)
        mask_BL = (index_L >= pads_B1).long().to(self._device) if any(pads) else None
        with grouped_attention(self._model):
            output = self._model(
                input_ids=ids.to(self._device),
                attention_mask=mask_BL,
                position_ids=positions.to(self._device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1]

    def _remove(self, indices: list[int]) -> None:
        if self._running is None:
            return
        if len(indices) == len(self._running.answers):
            self._running = None
        else:
            self._running.remove(indices)


def _check_model(config: dict[str, object], vocabulary: int) -> None:
    layer_types = config.get("layer_types")
    other = sorted(set(layer_types) - ATTENTION) if isinstance(layer_types, list) else []
    if other:
        raise ConfigError(f"the model has layers of type {other}; this engine keeps {sorted(ATTENTION)}: use vLLM")
    rows = config["vocab_size"]
    if not isinstance(rows, int) or not 0 < vocabulary <= rows:
        raise ConfigError(
            f"vocabulary is {vocabulary}; the model's head has {rows} rows: give vocabulary_of(tokenizer)"
        )
