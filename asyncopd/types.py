"""The frozen records that cross stages, in the order in which a sample meets them.

Shape suffixes: T response positions, C candidates a position.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from teacher_cache.record import CandidateSet, TeacherRecord

FinishReason = Literal["eos", "length"]

NO_VERSION = -1
"""``versions_T`` of a token that no student sampled: a teacher's, or one of a data set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of the data set, tokenised.

    index   its place in the data set (after filtering), the key that the ledger refers to
    text    what a person would read, for samples shown in tables
    token_ids   with the chat template applied
    teacher name of the teacher that scores its answers
    max_new_tokens  longest answer to it, in tokens; None for that of ``rollout.sampling``
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    teacher: str = "default"
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One answer to generate.

    uid             stable name of the sample: ``epoch-prompt-sample-attempt``
    prompt_ids      token ids
    min_version     the engine must hold at least this policy version before the first token
    exact_version   the only version that may generate the answer (sync and lagged modes), or None
    max_new_tokens  longest answer, in tokens, where it is shorter than that of ``rollout.sampling``; or None
    """

    uid: str
    prompt_ids: tuple[int, ...]
    min_version: int
    exact_version: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """One answer of the student, as sampled; or one that no student wrote.

    response_ids_T  int32 token ids, EOS included where it was sampled
    versions_T      int32 policy version that sampled each token; NO_VERSION where none did: such a token has no
                    staleness, and only teacher-drawn and whole-vocabulary sets may be trained on it
    log_b_T         float32 logprob (nats) of each token under the distribution it was drawn from; NaN where versions_T
                    is NO_VERSION
    candidates      student-drawn candidate set without teacher scores, or None where the objective needs none
    """

    uid: str
    prompt_ids: tuple[int, ...]
    response_ids_T: Tensor
    versions_T: Tensor
    log_b_T: Tensor
    finish: FinishReason
    candidates: CandidateSet | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredRollout:
    """One answer with the teacher's record: all that the learner needs."""

    rollout: Rollout
    record: TeacherRecord
