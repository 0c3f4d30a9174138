"""Teacher records from a transformers model.

Shape suffixes: N sequences of a batch, L positions, R response positions of the whole batch, H hidden size.

    requests ──> checked ──> batches of like length ──body──> hidden_RH ──head, a few rows at a time──> records
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from teacher_cache.causal_head import CausalHead
from teacher_cache.errors import ScoringError
from teacher_cache.record import TeacherRecord
from teacher_cache.record_builder import RecordBuilder, refusal
from teacher_cache.scorer import ScoreRequest


class TransformersScorer:
    """A Scorer over one model in this process.

    model          a loaded causal language model (quantised, compiled or spread over devices as its owner likes),
                   or the directory of one
    vocabulary     real token ids of the tokenizer; head rows beyond them take no mass
    temperature    of every returned logprob; logits are scaled and soft-capped first, then divided by it
    batch_tokens   padded tokens that go through the body at once; a longer sequence goes alone
    teacher        name written into the records
    device_map     spreads a model that is given as a directory over devices, ``auto`` for example; else ``device``
    compiled       puts the body through torch.compile

    Logprobs are normalised over the vocabulary in float32, whatever the dtype of the model.
    """

    def __init__(
        self,
        model: PreTrainedModel | Path | str,
        *,
        vocabulary: int,
        temperature: float = 1.0,
        batch_tokens: int = 4096,
        teacher: str = "default",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        device_map: str | None = None,
        compiled: bool = False,
    ) -> None:
        if not temperature > 0:
            raise ScoringError(f"temperature is {temperature}; expected above 0, the objective's temperature")
        if isinstance(model, (str, Path)):
            # A checkpoint that was saved quantised says so in its config and is loaded as such.
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map=device_map)
            model = loaded if device_map is not None else loaded.to(device)
        if compiled:
            model.get_decoder().compile(dynamic=True)
        self._head = CausalHead(model.eval(), vocabulary)
        self._temperature = temperature
        self._batch_tokens = batch_tokens
        self._teacher = teacher

    @property
    def max_context(self) -> int:
        """Longest prompt plus response, in tokens."""
        return self._head.max_context

    def score(self, requests: Sequence[ScoreRequest]) -> list[TeacherRecord | ScoringError]:
        """One result a request, in order: its record, or the error of a request that cannot be scored.

        A record depends on its own request only: not on the batch, the padding or the order. DesignError for a
        ``draw`` that no teacher can make, which is a mistake of the configuration and not of the request.
        """
        results: list[TeacherRecord | ScoringError | None] = [
            refusal(
                request,
                vocabulary=self._head.vocabulary,
                max_context=self.max_context,
                temperature=self._temperature,
            )
            for request in requests
        ]
        accepted = [index for index, refusal in enumerate(results) if refusal is None]
        for batch in self._batches(requests, accepted):
            for index, record in zip(batch, self._score_batch([requests[index] for index in batch]), strict=True):
                results[index] = record
        return [result for result in results if result is not None]

    def _batches(self, requests: Sequence[ScoreRequest], accepted: list[int]) -> Iterator[list[int]]:
        """Indices grouped by like length, so that little of the token budget is padding."""
        batch: list[int] = []
        for index in sorted(accepted, key=lambda index: len(_context(requests[index])), reverse=True):
            longest = len(_context(requests[batch[0]])) if batch else 0
            if batch and (len(batch) + 1) * longest > self._batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    @torch.no_grad()
    def _score_batch(self, requests: Sequence[ScoreRequest]) -> list[TeacherRecord]:
        builders = [
            RecordBuilder(request, self._temperature, self._teacher, self._head.vocabulary) for request in requests
        ]
        answered = [builder for builder in builders if len(builder.request.response_ids_T)]
        if answered:
            hidden_NLH = self._head.hidden([_context(builder.request) for builder in answered])
            # The state after token i gives the distribution of token i + 1, so response token t is scored at
            # position len(prompt) - 1 + t.
            hidden_RH = torch.cat(
                [
                    hidden_LH[len(builder.request.prompt_ids) - 1 : len(_context(builder.request))]
                    for hidden_LH, builder in zip(hidden_NLH, answered, strict=True)
                ]
            )
            self._fill(answered, hidden_RH)
        return [builder.record() for builder in builders]

    def _fill(self, builders: Sequence[RecordBuilder], hidden_RH: Tensor) -> None:
        """Score slices of rows; a slice may end one answer and begin the next."""
        left = [len(builder.request.response_ids_T) for builder in builders]
        current = 0
        for rows in self._head.distributions(hidden_RH, self._temperature):
            at, count = 0, len(rows.log_z_R)
            while at < count:
                if left[current] == 0:
                    current += 1
                taken = min(left[current], count - at)
                builders[current].add(rows.part(at, at + taken))
                left[current] -= taken
                at += taken


def _context(request: ScoreRequest) -> list[int]:
    """What the body must read: nothing is asked about what follows the last response token."""
    return [*request.prompt_ids, *request.response_ids_T[:-1].tolist()]
