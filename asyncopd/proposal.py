"""The proposal pass: a student that reads finished answers and draws the candidates of every position.

Where the rollout engine gives no whole distributions, or to have candidates of a fresher student than the one that
generated. The weights of a candidate come from the distribution that it was drawn from, so an estimate stays unbiased
whichever version proposes (OBJECTIVES, section 1); the candidate set says which did.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncopd.errors import ConfigError
from asyncopd.objectives import Objective
from asyncopd.rollout.answers import CANDIDATE_STREAM
from asyncopd.rollout.weights import load_weights_into
from teacher_cache.causal_head import CausalHead
from teacher_cache.causal_scorer import read_answers
from teacher_cache.designs import SupportDesign, draw_candidates, parse_design
from teacher_cache.logit_rows import LogitRows
from teacher_cache.noise import noise_for
from teacher_cache.record import CandidateSet, joined
from teacher_cache.scorer import ScoreRequest


class ProposalPass:
    """Draws candidates from one student, whose weights follow the published versions.

    model         directory of the student's checkpoint, or the loaded model
    design        spec of the support design; the sampled token is not reused, because other weights may have drawn it
    vocabulary    real token ids of the tokenizer
    temperature   of the objective: candidates come from the untruncated softmax at this temperature
    batch_tokens  padded tokens that go through the body at once
    version       policy version of the weights that ``model`` holds; -1 where they are of no version

    A draw depends on (run seed, uid, position) and the weights only, so the version that generated an answer draws
    the very candidates here that a rollout engine draws, unless the design reuses the sampled token there.
    """

    def __init__(
        self,
        model: PreTrainedModel | Path | str,
        *,
        design: str,
        vocabulary: int,
        temperature: float = 1.0,
        batch_tokens: int = 4096,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        version: int = -1,
    ) -> None:
        if isinstance(model, (str, Path)):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
        self._model = model.eval()
        self._head = CausalHead(self._model, vocabulary)
        self._design = parse_design(design)
        self._temperature = temperature
        self._batch_tokens = batch_tokens
        self.version = version

    def load_weights(self, directory: Path, version: int) -> None:
        """Take the weights published as ``version``. CheckpointError if the file does not fit the model."""
        load_weights_into(self._model, directory)
        self.version = version

    def draw(self, requests: Sequence[ScoreRequest]) -> list[ScoreRequest]:
        """The requests, in order, with candidates of their answers, none of which may be empty."""
        drawings = [_Drawing(request, self._design, self._temperature, self.version) for request in requests]
        read_answers(
            self._head,
            list(zip(requests, drawings, strict=True)),
            temperature=self._temperature,
            batch_tokens=self._batch_tokens,
        )
        return [
            replace(request, candidates=joined(drawing.pieces))
            for request, drawing in zip(requests, drawings, strict=True)
        ]


def check_proposal(proposal: str, objective: Objective) -> None:
    """ConfigError where ``teacher.proposal`` is a pass that has nothing to draw, or may not draw it."""
    if proposal != "pass":
        return
    design = objective.draws.get("student")
    if design is None:
        raise ConfigError(
            f"teacher.proposal is pass and {objective.config.name} reads no candidates of the student's: leave it out"
        )
    if design.reuses_sampled_token and not design.spec.startswith("multi_sample"):
        raise ConfigError(
            f"teacher.proposal is pass and {design.spec} is made of the sampled token and its own logprob, which only "
            "the rollout has: leave it out, or take systematic(16)"
        )


@dataclass(slots=True)
class _Drawing:
    """The candidates of one answer, drawn a few positions at a time, in order."""

    request: ScoreRequest
    design: SupportDesign
    temperature: float
    version: int
    pieces: list[CandidateSet] = field(default_factory=list)
    _done: int = 0

    def add(self, rows: LogitRows) -> None:
        """Draw at the next response positions."""
        request, first = self.request, self._done
        self._done += len(rows.log_z_R)
        drawn = draw_candidates(
            self.design,
            log_g_TV=rows.all(),
            noise=noise_for(
                request.run_seed, [(request.uid, position) for position in range(first, self._done)], CANDIDATE_STREAM
            ),
            sampled_T=None,
            origin="student",
            temperature=self.temperature,
            version=self.version,
        )
        self.pieces.append(drawn)
