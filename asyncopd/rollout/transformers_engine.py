"""Rollouts with transformers models: a small sampling loop over a batch whose rows come and go.

Shape suffixes: B rows in flight, P longest prompt of those that join, L positions in the cache, V real vocabulary,
T response positions of one answer, C candidates a position.

    submit ──> waiting ──prefill──┐
                                  ├──> logits_BV ──> token, log_b, candidates ──> answers that ended
               running ──decode───┘        ^
                                     load_weights, between steps
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncopd.errors import ConfigError, RolloutError
from asyncopd.rollout.grouped_attention import grouped_attention
from asyncopd.rollout.kv_cache import RowCache
from asyncopd.rollout.sampling import SamplingConfig, draw_tokens, sampling_logprobs, token_uniforms
from asyncopd.rollout.weights import load_weights_into
from asyncopd.types import FinishReason, Rollout, RolloutRequest
from teacher_cache.designs import SupportDesign, draw_candidates, parse_design
from teacher_cache.noise import noise_for
from teacher_cache.record import CandidateSet

CANDIDATE_STREAM = "candidates"
"""Noise stream of candidate draws."""

ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types whose state is one key and one value a position."""


@dataclass(slots=True)
class _Row:
    """One answer in flight; ``pad`` is how many positions of padding its prompt has on the left."""

    request: RolloutRequest
    pad: int = 0
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    log_b: list[float] = field(default_factory=list)
    drawn: list[tuple[CandidateSet, int]] = field(default_factory=list)


class TransformersEngine:
    """A RolloutEngine over one model in this process.

    What a token is depends on (run seed, uid, position) and the distribution it is drawn from, never on the other rows.

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
        if isinstance(model, (str, Path)):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
        self._model = model.eval()
        self._device = self._model.device
        self._vocabulary = vocabulary
        self._end_ids = tuple(dict.fromkeys((*eos_token_ids, *sampling.stop_token_ids)))
        self._sampling = sampling
        self._run_seed = run_seed
        self._design = parse_design(design) if design is not None else None
        self._temperature = temperature
        self._version = version
        self._waiting: list[_Row] = []
        self._rows: list[_Row] = []
        self._cache: RowCache | None = None
        config = self._model.config.get_text_config(decoder=True)
        self._max_context: int = config.max_position_embeddings
        _check_model(config.to_dict(), vocabulary)
        _check_design(self._design, sampling, temperature)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token will be sampled from; -1 before the first load."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._waiting) + len(self._rows)

    def load_weights(self, directory: Path, version: int) -> None:
        """Take the weights published as ``version``; tokens sampled from now on carry that version.

        Answers in flight go on over the keys and values that older weights left. CheckpointError if the file does not
        fit the model; RolloutError if an answer in flight may only be generated by another version.
        """
        for row in (*self._waiting, *self._rows):
            _check_version(row.request, version)
        load_weights_into(self._model, directory)
        self._version = version

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Take requests; they start together at the next step.

        RolloutError, and none is taken, if one needs other weights than those loaded, is in flight already, has an
        empty prompt, or would outgrow the model's context.
        """
        taken = {row.request.uid for row in (*self._waiting, *self._rows)}
        for request in requests:
            _check_version(request, self._version)
            longest = len(request.prompt_ids) + self._sampling.max_new_tokens
            if not request.prompt_ids or longest > self._max_context:
                raise RolloutError(
                    f"{request.uid}: {len(request.prompt_ids)} prompt tokens and up to "
                    f"{self._sampling.max_new_tokens} new ones; expected at least one prompt token and at most "
                    f"{self._max_context} in all: leave the prompt out or lower sampling.max_new_tokens"
                )
            if request.uid in taken:
                raise RolloutError(f"{request.uid} is in flight already; submit each uid once")
            taken.add(request.uid)
        self._waiting.extend(_Row(request) for request in requests)

    def abandon(self, uids: Sequence[str]) -> None:
        """Forget requests whose lease was lost; uids that are not in flight are ignored."""
        lost = set(uids)
        self._waiting = [row for row in self._waiting if row.request.uid not in lost]
        self._remove([index for index, row in enumerate(self._rows) if row.request.uid in lost])

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        """Sample one token for every answer in flight; the answers that ended with it.

        RolloutError if the logits of an answer are not finite.
        """
        if not self.in_flight:
            return []
        parts = []
        if self._rows:
            parts.append(self._decode())
        if self._waiting:
            parts.append(self._prefill())
        self._sample(torch.cat(parts)[:, : self._vocabulary].float())
        reasons = [self._finish_reason(row) for row in self._rows]
        ended = [
            self._rollout(row, reason) for row, reason in zip(self._rows, reasons, strict=True) if reason is not None
        ]
        self._remove([index for index, reason in enumerate(reasons) if reason is not None])
        return ended

    def _decode(self) -> Tensor:
        """Logits [B, head rows] after the newest token of every running row."""
        cache = self._running_cache()
        shared = min(row.pad for row in self._rows)
        # Padding that every row has is dropped when room must be made anyway, or when it costs a quarter of attention.
        if shared and (cache.full or 4 * shared > cache.length):
            cache.trim(shared)
            for row in self._rows:
                row.pad -= shared
        pads_B = torch.tensor([row.pad for row in self._rows])
        ids_B1 = torch.tensor([[row.tokens[-1]] for row in self._rows])
        return self._forward(ids_B1, pads_B, cache.length + 1, cache)

    def _prefill(self) -> Tensor:
        """Logits [rows that join, head rows] after their prompts; the rows are running from then on."""
        width = max(len(row.request.prompt_ids) for row in self._waiting)
        for row in self._waiting:
            row.pad = width - len(row.request.prompt_ids)
        filler = self._end_ids[0] if self._end_ids else 0
        ids_BP = torch.tensor([[filler] * row.pad + list(row.request.prompt_ids) for row in self._waiting])
        joining = RowCache()
        logits = self._forward(ids_BP, torch.tensor([row.pad for row in self._waiting]), width, joining)
        if self._cache is None:
            self._cache = joining
        else:
            length = max(self._cache.length, joining.length)
            for row in self._rows:
                row.pad += length - self._cache.length
            for row in self._waiting:
                row.pad += length - joining.length
            self._cache.add_rows(joining)
        self._rows.extend(self._waiting)
        self._waiting = []
        return logits

    def _forward(self, ids: Tensor, pads_B: Tensor, length: int, cache: RowCache) -> Tensor:
        """Logits [B, head rows] after ``ids`` [B, new], the last of ``length`` positions, ``pads_B`` padding."""
        index_L = torch.arange(length)
        positions = (index_L[-ids.shape[1] :] - pads_B[:, None]).clamp(min=0)
        mask_BL = (index_L >= pads_B[:, None]).long().to(self._device) if pads_B.any() else None
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

    def _sample(self, logits_BV: Tensor) -> None:
        """Append one token, its behaviour logprob, its version and its candidates to every running row."""
        uids = [row.request.uid for row in self._rows]
        positions = [len(row.tokens) for row in self._rows]
        log_b_BV = sampling_logprobs(
            logits_BV,
            self._sampling,
            generated_B=torch.tensor(positions, device=self._device),
            end_ids=self._end_ids,
        )
        tokens_B = draw_tokens(log_b_BV, token_uniforms(self._run_seed, uids, positions))
        log_b_B = log_b_BV.gather(1, tokens_B[:, None])[:, 0].tolist()
        for row, token, log_b in zip(self._rows, tokens_B.tolist(), log_b_B, strict=True):
            if not -float("inf") < log_b <= 0:
                raise RolloutError(
                    f"{row.request.uid}: token {len(row.tokens)} has logprob {log_b} under version {self._version}; "
                    "the weights give no finite logits: look at the learner's losses, or roll out in float32"
                )
            row.tokens.append(token)
            row.log_b.append(log_b)
            row.versions.append(self._version)
        if self._design is not None and self._design.budget:
            plain = not self._sampling.truncated and self._sampling.temperature == self._temperature
            drawn = draw_candidates(
                self._design,
                log_g_TV=log_b_BV if plain else torch.log_softmax(logits_BV / self._temperature, dim=-1),
                noise=noise_for(self._run_seed, list(zip(uids, positions, strict=True)), CANDIDATE_STREAM),
                sampled_T=tokens_B,
                origin="student",
                temperature=self._temperature,
                version=self._version,
            )
            for index, row in enumerate(self._rows):
                row.drawn.append((drawn, index))

    def _finish_reason(self, row: _Row) -> FinishReason | None:
        if row.tokens[-1] in self._end_ids:
            return "eos"
        return "length" if len(row.tokens) == self._sampling.max_new_tokens else None

    def _remove(self, indices: list[int]) -> None:
        """Rows leave; from the last to the first, because the last row takes the place of one that leaves."""
        if not indices:
            return
        if len(indices) == len(self._rows):
            self._rows, self._cache = [], None
            return
        for index in reversed(indices):
            self._running_cache().remove_row(index)
            self._rows[index] = self._rows[-1]
            self._rows.pop()

    def _running_cache(self) -> RowCache:
        if self._cache is None:
            raise RolloutError("no answer is running, so there is no cache; this is a fault of the engine")
        return self._cache

    def _rollout(self, row: _Row, finish: FinishReason) -> Rollout:
        return Rollout(
            uid=row.request.uid,
            prompt_ids=row.request.prompt_ids,
            response_ids_T=torch.tensor(row.tokens, dtype=torch.int32),
            versions_T=torch.tensor(row.versions, dtype=torch.int32),
            log_b_T=torch.tensor(row.log_b, dtype=torch.float32),
            finish=finish,
            candidates=self._candidates(row),
        )

    def _candidates(self, row: _Row) -> CandidateSet | None:
        """The candidates of a whole answer; their version is that of the oldest token, which bounds staleness."""
        if self._design is None:
            return None
        ids_TC, log_w_TC, log_g_TC = _gathered(row, self._vocabulary)
        return CandidateSet(
            origin="student",
            design=self._design.spec,
            temperature=self._temperature,
            version=min(row.versions),
            ids_TC=ids_TC,
            log_w_TC=log_w_TC,
            log_g_TC=log_g_TC,
        )


def _gathered(row: _Row, vocabulary: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, log weights and, for a design that thins, proposal logprobs of every position."""
    if not row.drawn:
        # The whole vocabulary with weight 1: one row, seen once a position.
        shape = (len(row.tokens), vocabulary)
        return torch.arange(vocabulary, dtype=torch.int32).expand(shape), torch.zeros(()).expand(shape), None
    ids_TC = torch.stack([drawn.ids_TC[index] for drawn, index in row.drawn]).cpu()
    log_w_TC = torch.stack([drawn.log_w_TC[index] for drawn, index in row.drawn]).cpu()
    log_g = [drawn.log_g_TC[index] for drawn, index in row.drawn if drawn.log_g_TC is not None]
    return ids_TC, log_w_TC, torch.stack(log_g).cpu() if log_g else None


def _check_version(request: RolloutRequest, version: int) -> None:
    if request.exact_version is not None and request.exact_version != version:
        raise RolloutError(
            f"{request.uid} may only be generated by version {request.exact_version}; the weights are {version}: "
            "load that version first"
        )
    if version < request.min_version:
        raise RolloutError(
            f"{request.uid} needs version {request.min_version} or newer; the weights are {version}: load them first"
        )


def _check_model(config: dict[str, object], vocabulary: int) -> None:
    layer_types = config.get("layer_types")
    other = sorted(set(layer_types) - ATTENTION) if isinstance(layer_types, list) else []
    if other:
        raise ConfigError(f"the model has layers of type {other}; this engine keeps {sorted(ATTENTION)}: use vLLM")
    rows = config["vocab_size"]
    if not isinstance(rows, int) or not 0 < vocabulary <= rows:
        raise ConfigError(f"vocabulary is {vocabulary}; the model's head has {rows} rows: give len(tokenizer)")


def _check_design(design: SupportDesign | None, sampling: SamplingConfig, temperature: float) -> None:
    if design is None or not design.reuses_sampled_token:
        return
    if sampling.truncated or sampling.temperature != temperature:
        raise ConfigError(
            f"{design.spec} reuses the rollout's own token, so it must be drawn from the softmax at the objective's "
            f"temperature {temperature}; sampling has temperature {sampling.temperature}, truncated: "
            f"{sampling.truncated}: sample plainly, or take systematic(16)"
        )
