"""From distributions to the teacher record of one request: what every scorer does alike.

Shape suffixes: T response positions, C candidates a position, V real vocabulary.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from teacher_cache.designs import SupportDesign, ThinningDesign, draw_candidates, parse_design
from teacher_cache.errors import DesignError, ScoringError
from teacher_cache.logit_rows import LogitRows
from teacher_cache.noise import Noise, noise_for
from teacher_cache.record import CandidateSet, TeacherRecord, joined
from teacher_cache.scorer import ScoreRequest

CANDIDATE_STREAM = "candidates"
"""Noise stream of teacher-drawn candidates."""

THIN_STREAM = "thin"
"""Noise stream of the second phase; its own, because the first phase's uniforms chose what there is to keep."""


def refusal(request: ScoreRequest, *, vocabulary: int, max_context: int, temperature: float) -> ScoringError | None:
    """Why a teacher with these limits cannot score the request; None if it can."""
    prompt, response = len(request.prompt_ids), len(request.response_ids_T)
    candidates = request.candidates
    if prompt == 0:
        problem = "the prompt is empty, so its first response token has no distribution; give a token of context"
    elif prompt + response > max_context:
        problem = (
            f"{prompt} prompt and {response} response tokens; the teacher's context holds {max_context}: "
            "drop the sample or lower max_new_tokens"
        )
    elif not _within(request.response_ids_T, vocabulary) or not all(
        0 <= id_ < vocabulary for id_ in request.prompt_ids
    ):
        problem = f"a token id outside the teacher's vocabulary of {vocabulary}; compare the tokenizers"
    elif candidates is not None and candidates.temperature != temperature:
        problem = f"candidates at temperature {candidates.temperature}; this teacher is at {temperature}"
    elif candidates is not None and len(candidates.ids_TC) != response:
        problem = f"candidates for {len(candidates.ids_TC)} positions; the response has {response}"
    elif candidates is not None and not _within(candidates.ids_TC, vocabulary):
        problem = f"a candidate outside the teacher's vocabulary of {vocabulary}; compare the tokenizers"
    else:
        return None
    return ScoringError(f"{request.uid}: {problem}")


@dataclass(slots=True)
class RecordBuilder:
    """The record of one request, built from distributions that arrive a few positions at a time, in order."""

    request: ScoreRequest
    temperature: float
    teacher: str
    vocabulary: int
    _own: list[Tensor] = field(default_factory=list)
    _entropy: list[Tensor] = field(default_factory=list)
    _candidates: list[Tensor] = field(default_factory=list)
    _drawn: list[CandidateSet] = field(default_factory=list)
    _done: int = 0

    def add(self, rows: LogitRows) -> None:
        """Take the distributions of the next response positions. DesignError for a design no teacher can draw."""
        request, device = self.request, rows.log_z_R.device
        positions = slice(self._done, self._done + len(rows.log_z_R))
        own_T1 = request.response_ids_T[positions].long()[:, None].to(device)
        self._own.append(rows.at(own_T1)[:, 0].cpu())
        self._entropy.append(rows.entropy().cpu())
        if request.candidates is not None:
            self._candidates.append(rows.at(request.candidates.ids_TC[positions].long().to(device)).cpu())
        if request.draw is not None:
            log_q_TV = rows.all()
            drawn = draw_candidates(
                _teacher_design(request.draw),
                log_g_TV=log_q_TV,
                noise=_noise(request, CANDIDATE_STREAM, positions),
                sampled_T=None,
                origin="teacher",
                temperature=self.temperature,
                version=None,
            )
            self._drawn.append(drawn.scored(log_q_TV.gather(1, drawn.ids_TC.long())))
        self._done = positions.stop

    def record(self) -> TeacherRecord:
        """The record of all positions that were added."""
        sets = []
        request, empty_T = self.request, torch.empty(0)
        if request.candidates is not None:
            unscored_TC = torch.empty(request.candidates.ids_TC.shape)
            log_q_TC = torch.cat(self._candidates) if self._candidates else unscored_TC
            sets.append(_thinned(request, request.candidates.scored(log_q_TC)))
        if request.draw is not None:
            sets.append(joined(self._drawn) if self._drawn else self._nothing_drawn(request.draw))
        return TeacherRecord(
            temperature=self.temperature,
            teacher=self.teacher,
            log_q_T=torch.cat(self._own) if self._own else empty_T,
            entropy_T=torch.cat(self._entropy) if self._entropy else empty_T,
            sets=tuple(sets),
        )

    def _nothing_drawn(self, spec: str) -> CandidateSet:
        """The teacher-drawn set of an empty answer."""
        design = _teacher_design(spec)
        nothing_TC = torch.empty((0, design.budget or self.vocabulary))
        return CandidateSet(
            origin="teacher",
            design=design.spec,
            temperature=self.temperature,
            version=None,
            ids_TC=nothing_TC.to(torch.int32),
            log_w_TC=nothing_TC,
            log_q_TC=nothing_TC,
        )


def _within(ids: Tensor, vocabulary: int) -> bool:
    return ids.numel() == 0 or (int(ids.min()) >= 0 and int(ids.max()) < vocabulary)


def _noise(request: ScoreRequest, stream: str, positions: slice) -> Noise:
    rows = [(request.uid, position) for position in range(positions.start, positions.stop)]
    return noise_for(request.run_seed, rows, stream)


def _teacher_design(spec: str) -> SupportDesign:
    design = parse_design(spec)
    if isinstance(design, ThinningDesign):
        raise DesignError(f"{spec} keeps what a student drew; a teacher draws in one phase: take systematic(16)")
    return design


def _thinned(request: ScoreRequest, scored: CandidateSet) -> CandidateSet:
    """The second phase of a two-phase design; any other set as it is, and one that was thinned before too."""
    design = parse_design(scored.design)
    if not isinstance(design, ThinningDesign) or scored.log_g_TC is None or scored.log_q_TC is None:
        return scored
    if not len(scored.ids_TC):
        # An empty answer has nothing to thin.
        none = {name: getattr(scored, name)[:, : design.budget] for name in ("ids_TC", "log_w_TC", "log_q_TC")}
        return replace(scored, log_g_TC=None, **none)
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
