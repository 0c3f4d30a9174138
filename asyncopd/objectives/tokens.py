"""What an objective may read: tensors of the valid response tokens of one micro-batch.

Shape suffixes: T tokens (of several sequences, concatenated), C candidates a token, N sequences.
"""

from dataclasses import dataclass

from torch import Tensor

from teacher_cache.record import Origin


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """One candidate set with the current student's logprobs.

    log_p_TC    current student, nats; the only tensor that carries gradient
    log_q_TC    teacher, nats
    log_w_TC    log weights; -inf is weight zero
    """

    log_p_TC: Tensor
    log_q_TC: Tensor
    log_w_TC: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """Tokens of one micro-batch.

    log_p_T     current student's logprob (nats) of the sampled token at the objective's temperature; with gradient
    log_q_T     teacher's, same token and temperature
    log_b_T     behaviour policy's: the distribution the token was drawn from
    sequence_T  int64 index of the sequence each token belongs to
    staleness_T int64 policy versions between the token's behaviour policy and the learner
    student, teacher   candidate sets by origin, None where absent
    """

    log_p_T: Tensor
    log_q_T: Tensor
    log_b_T: Tensor
    sequence_T: Tensor
    staleness_T: Tensor
    student: Candidates | None = None
    teacher: Candidates | None = None

    def of_origin(self, origin: Origin) -> Candidates:
        """The set that ``origin`` proposed; ValueError if the record holds none."""
        found = self.student if origin == "student" else self.teacher
        if found is None:
            raise ValueError(f"the objective needs {origin}-drawn candidates and the record holds none")
        return found
