"""Teacher records from a causal model, whoever runs its body.

Shape suffixes: L positions of one sequence, R response positions of a batch, H hidden size.

    requests ──> checked ──> batches of like length ──body──> hidden_RH ──head, a few rows at a time──> records
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from teacher_cache.errors import ScoringError
from teacher_cache.logit_rows import LogitRows
from teacher_cache.record import TeacherRecord
from teacher_cache.record_builder import RecordBuilder, refusal
from teacher_cache.scorer import ScoreRequest


class CausalModel(Protocol):
    """A language model in two halves: a body that gives final hidden states, and the head."""

    @property
    def vocabulary(self) -> int:
        """Real token ids."""

    @property
    def max_context(self) -> int:
        """Longest sequence, in tokens."""

    def hidden(self, sequences: Sequence[Sequence[int]]) -> Iterable[Tensor]:
        """Final hidden states [at least L, H] of each token sequence, in order; what follows the L is padding."""

    def distributions(self, hidden_RH: Tensor, temperature: float, rows: int | None = None) -> Iterator[LogitRows]:
        """Distributions at the rows in order, ``rows`` at a time; None: as many as suit the device."""


class RowReader(Protocol):
    """What is done with the distributions of one answer's positions."""

    def add(self, rows: LogitRows) -> None:
        """Take the distributions of the next response positions."""


class CausalScorer:
    """A Scorer over one causal model.

    temperature    of every returned logprob; logits are scaled and soft-capped first, then divided by it
    batch_tokens   padded tokens that go through the body at once; a longer sequence goes alone
    teacher        name written into the records

    Logprobs are normalised over the vocabulary in float32, whatever the dtype of the model.
    """

    def __init__(self, model: CausalModel, *, temperature: float, batch_tokens: int, teacher: str) -> None:
        if not temperature > 0:
            raise ScoringError(f"temperature is {temperature}; expected above 0, the objective's temperature")
        self.model = model
        self._temperature = temperature
        self._batch_tokens = batch_tokens
        self._teacher = teacher

    @property
    def max_context(self) -> int:
        """Longest prompt plus response, in tokens."""
        return self.model.max_context

    def score(self, requests: Sequence[ScoreRequest]) -> list[TeacherRecord | ScoringError]:
        """One result a request, in order: its record, or the error of a request that cannot be scored.

        A record depends on its own request only: not on the batch, the padding or the order. DesignError for a
        ``draw`` that no teacher can make, which is a mistake of the configuration and not of the request.
        """
        results: list[TeacherRecord | ScoringError | None] = [
            refusal(
                request,
                vocabulary=self.model.vocabulary,
                max_context=self.max_context,
                temperature=self._temperature,
            )
            for request in requests
        ]
        accepted = [place for place, refused in enumerate(results) if refused is None]
        builders = {
            place: RecordBuilder(requests[place], self._temperature, self._teacher, self.model.vocabulary)
            for place in accepted
        }
        read_answers(
            self.model,
            [(requests[place], builders[place]) for place in accepted],
            temperature=self._temperature,
            batch_tokens=self._batch_tokens,
        )
        for place, builder in builders.items():
            results[place] = builder.record()
        return [result for result in results if result is not None]


def read_answers(
    model: CausalModel,
    answers: Sequence[tuple[ScoreRequest, RowReader]],
    *,
    temperature: float,
    batch_tokens: int,
) -> None:
    """Give each answer's reader the model's distributions at the answer's positions, in order.

    The requests must fit the model; only their tokens are looked at.
    """
    for batch in in_batches([request for request, _ in answers], batch_tokens):
        read_batch(model, [answers[place] for place in batch], temperature)


def in_batches(requests: Sequence[ScoreRequest], batch_tokens: int) -> Iterator[list[int]]:
    """Places of the answers that have tokens, grouped by like length: little of the token budget is padding."""
    batch: list[int] = []
    answered = [place for place, request in enumerate(requests) if len(request.response_ids_T)]
    for place in sorted(answered, key=lambda place: len(_context(requests[place])), reverse=True):
        longest = len(_context(requests[batch[0]])) if batch else 0
        if batch and (len(batch) + 1) * longest > batch_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


@torch.no_grad()
def read_batch(model: CausalModel, answers: Sequence[tuple[ScoreRequest, RowReader]], temperature: float) -> None:
    """One pass of the body. A slice of rows from the head may end one answer and begin the next."""
    states = model.hidden([_context(request) for request, _ in answers])
    # The state after token i gives the distribution of token i + 1, so response token t is scored at
    # position len(prompt) - 1 + t.
    hidden_RH = torch.cat(
        [
            hidden_LH[len(request.prompt_ids) - 1 : len(_context(request))]
            for hidden_LH, (request, _) in zip(states, answers, strict=True)
        ]
    )
    left = [len(request.response_ids_T) for request, _ in answers]
    current = 0
    for rows in model.distributions(hidden_RH, temperature):
        at, count = 0, len(rows.log_z_R)
        while at < count:
            if left[current] == 0:
                current += 1
            taken = min(left[current], count - at)
            answers[current][1].add(rows.part(at, at + taken))
            left[current] -= taken
            at += taken


def _context(request: ScoreRequest) -> list[int]:
    """What the body must read: nothing is asked about what follows the last response token."""
    return [*request.prompt_ids, *request.response_ids_T[:-1].tolist()]
