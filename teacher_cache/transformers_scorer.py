"""Teacher records from a transformers model.

Shape suffixes: N sequences of a batch, L positions, R response positions of the whole batch, T response positions of
one request, C candidates a position, H hidden size, V real vocabulary.

    requests ──> checked ──> batches of like length ──body──> hidden_RH ──head, a few rows at a time──> records
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from teacher_cache.causal_head import CausalHead, LogitRows
from teacher_cache.designs import SupportDesign, draw_candidates, parse_design
from teacher_cache.designs.two_phase import TwoPhase
from teacher_cache.errors import DesignError, ScoringError
from teacher_cache.noise import Noise, noise_for
from teacher_cache.record import CandidateSet, TeacherRecord
from teacher_cache.scorer import ScoreRequest

CANDIDATE_STREAM = "candidates"
"""Noise stream of teacher-drawn candidates."""

THIN_STREAM = "thin"
"""Noise stream of the second phase; its own, because the first phase's uniforms chose what there is to keep."""


@dataclass(slots=True)
class _Partial:
    """What is known of one request so far: a piece for each slice of rows, in order."""

    request: ScoreRequest
    own: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    candidates: list[Tensor] = field(default_factory=list)
    drawn: list[CandidateSet] = field(default_factory=list)


class TransformersScorer:
    """A Scorer over one model in this process.

    model          a loaded causal language model (quantised, compiled or spread over devices as its owner likes),
                   or the directory of one
    vocabulary     real token ids of the tokenizer; head rows beyond them take no mass
    temperature    of every returned logprob; logits are scaled and soft-capped first, then divided by it
    batch_tokens   padded tokens that go through the body at once; a longer sequence goes alone
    teacher        name written into the records

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
    ) -> None:
        if not temperature > 0:
            raise ScoringError(f"temperature is {temperature}; expected above 0, the objective's temperature")
        if isinstance(model, (str, Path)):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
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

        A record depends on its own request only: not on the batch, the padding or the order.
        """
        results: list[TeacherRecord | ScoringError | None] = [self._refusal(request) for request in requests]
        accepted = [index for index, refusal in enumerate(results) if refusal is None]
        for batch in self._batches(requests, accepted):
            for index, record in zip(batch, self._score_batch([requests[index] for index in batch]), strict=True):
                results[index] = record
        return [result for result in results if result is not None]

    def _refusal(self, request: ScoreRequest) -> ScoringError | None:
        prompt, response = len(request.prompt_ids), len(request.response_ids_T)
        candidates = request.candidates
        if prompt == 0:
            problem = "the prompt is empty, so its first response token has no distribution; give a token of context"
        elif prompt + response > self.max_context:
            problem = (
                f"{prompt} prompt and {response} response tokens; the teacher's context holds {self.max_context}: "
                "drop the sample or lower max_new_tokens"
            )
        elif not _within(request.response_ids_T, self._head.vocabulary) or not all(
            0 <= token < self._head.vocabulary for token in request.prompt_ids
        ):
            problem = f"a token id outside the teacher's vocabulary of {self._head.vocabulary}; compare the tokenizers"
        elif candidates is not None and candidates.temperature != self._temperature:
            problem = f"candidates at temperature {candidates.temperature}; this teacher is at {self._temperature}"
        elif candidates is not None and len(candidates.ids_TC) != response:
            problem = f"candidates for {len(candidates.ids_TC)} positions; the response has {response}"
        elif candidates is not None and not _within(candidates.ids_TC, self._head.vocabulary):
            problem = f"a candidate outside the teacher's vocabulary of {self._head.vocabulary}; compare the tokenizers"
        else:
            return None
        return ScoringError(f"{request.uid}: {problem}")

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
        partials = [_Partial(request) for request in requests]
        wanted = [partial for partial in partials if len(partial.request.response_ids_T)]
        if wanted:
            hidden_NLH = self._head.hidden([_context(partial.request) for partial in wanted])
            # The state after token i gives the distribution of token i + 1, so response token t is scored at
            # position len(prompt) - 1 + t.
            hidden_RH = torch.cat(
                [
                    hidden_LH[len(partial.request.prompt_ids) - 1 : len(_context(partial.request))]
                    for hidden_LH, partial in zip(hidden_NLH, wanted, strict=True)
                ]
            )
            self._fill(wanted, hidden_RH)
        return [self._record(partial) for partial in partials]

    def _fill(self, partials: Sequence[_Partial], hidden_RH: Tensor) -> None:
        """Score slices of rows; a slice may end one answer and begin the next."""
        owners = [(partial, t) for partial in partials for t in range(len(partial.request.response_ids_T))]
        for rows in self._head.distributions(hidden_RH, self._temperature):
            at, count = 0, len(rows.log_z_R)
            while at < count:
                partial, t = owners[rows.first + at]
                taken = min(len(partial.request.response_ids_T) - t, count - at)
                self._score_piece(partial, rows.part(at, at + taken), slice(t, t + taken))
                at += taken

    def _score_piece(self, partial: _Partial, rows: LogitRows, positions: slice) -> None:
        request, device = partial.request, rows.log_z_R.device
        own_T1 = request.response_ids_T[positions].long()[:, None].to(device)
        partial.own.append(rows.at(own_T1)[:, 0].cpu())
        partial.entropy.append(rows.entropy().cpu())
        if request.candidates is not None:
            partial.candidates.append(rows.at(request.candidates.ids_TC[positions].long().to(device)).cpu())
        if request.draw is not None:
            log_q_TV = rows.all()
            drawn = draw_candidates(
                _teacher_design(request.draw),
                log_g_TV=log_q_TV,
                noise=_noise(request, CANDIDATE_STREAM, positions),
                sampled_T=None,
                origin="teacher",
                temperature=self._temperature,
                version=None,
            )
            partial.drawn.append(drawn.scored(log_q_TV.gather(1, drawn.ids_TC.long())))

    def _record(self, partial: _Partial) -> TeacherRecord:
        sets = []
        request, empty_T = partial.request, torch.empty(0)
        if request.candidates is not None:
            log_q_TC = (
                torch.cat(partial.candidates) if partial.candidates else torch.empty(request.candidates.ids_TC.shape)
            )
            sets.append(_thinned(request, request.candidates.scored(log_q_TC)))
        if request.draw is not None:
            sets.append(_joined(partial.drawn) if partial.drawn else self._nothing_drawn(request.draw))
        return TeacherRecord(
            temperature=self._temperature,
            teacher=self._teacher,
            log_q_T=torch.cat(partial.own) if partial.own else empty_T,
            entropy_T=torch.cat(partial.entropy) if partial.entropy else empty_T,
            sets=tuple(sets),
        )

    def _nothing_drawn(self, spec: str) -> CandidateSet:
        """The teacher-drawn set of an empty answer."""
        design = _teacher_design(spec)
        width = design.budget or self._head.vocabulary
        nothing_TC = torch.empty((0, width))
        return CandidateSet(
            origin="teacher",
            design=design.spec,
            temperature=self._temperature,
            version=None,
            ids_TC=nothing_TC.to(torch.int32),
            log_w_TC=nothing_TC,
            log_q_TC=nothing_TC,
        )


def _context(request: ScoreRequest) -> list[int]:
    """What the body must read: nothing is asked about what follows the last response token."""
    return [*request.prompt_ids, *request.response_ids_T[:-1].tolist()]


def _within(ids: Tensor, vocabulary: int) -> bool:
    return ids.numel() == 0 or (int(ids.min()) >= 0 and int(ids.max()) < vocabulary)


def _noise(request: ScoreRequest, stream: str, positions: slice) -> Noise:
    rows = [(request.uid, position) for position in range(positions.start, positions.stop)]
    return noise_for(request.run_seed, rows, stream)


def _teacher_design(spec: str) -> SupportDesign:
    design = parse_design(spec)
    if isinstance(design, TwoPhase):
        raise DesignError(f"{spec} keeps what a student drew; a teacher draws in one phase: take systematic(16)")
    return design


def _joined(pieces: list[CandidateSet]) -> CandidateSet:
    """Candidate sets of consecutive positions as one."""
    return replace(
        pieces[0],
        ids_TC=torch.cat([piece.ids_TC for piece in pieces]).cpu(),
        log_w_TC=torch.cat([piece.log_w_TC for piece in pieces]).cpu(),
        log_q_TC=torch.cat([piece.log_q_TC for piece in pieces if piece.log_q_TC is not None]).cpu(),
    )


def _thinned(request: ScoreRequest, scored: CandidateSet) -> CandidateSet:
    """The second phase of a two-phase design; any other set as it is, and one that was thinned before too."""
    design = parse_design(scored.design)
    if not isinstance(design, TwoPhase) or scored.log_g_TC is None or scored.log_q_TC is None:
        return scored
    kept, log_q_TK = design.thin(
        ids_TC=scored.ids_TC,
        log_w_TC=scored.log_w_TC,
        log_g_TC=scored.log_g_TC,
        log_q_TC=scored.log_q_TC,
        noise=_noise(request, THIN_STREAM, slice(0, len(scored.ids_TC))),
    )
    return replace(
        scored,
        ids_TC=kept.ids_TC.to(torch.int32),
        log_w_TC=kept.log_w_TC.float(),
        log_q_TC=log_q_TK,
        log_g_TC=None,
    )
