"""Which positions of a record may be trained on.

Shape suffixes: T response positions, C candidates.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from teacher_cache.record import Origin, TeacherRecord


def valid_positions(record: TeacherRecord, origins: Collection[Origin]) -> Tensor:
    """Bool [T]: the teacher's scores are whole.

    One score that is not finite at a candidate of nonzero weight masks the whole position: to leave only that candidate
    out would bias the estimate, and to read it as 0 would say that the teacher is certain. A weight that is NaN or
    infinite does the same. ``origins`` are those that the objective reads (``Objective.origins``); where it reads none,
    the score of the sampled token must be finite instead.
    """
    if not origins:
        return record.log_q_T.isfinite()
    whole_T = torch.ones_like(record.log_q_T, dtype=torch.bool)
    for origin in origins:
        candidates = record.of_origin(origin)
        empty_TC = candidates.log_w_TC == -torch.inf
        scored = candidates.log_q_TC
        if scored is not None:
            whole_T &= ((scored.isfinite() & candidates.log_w_TC.isfinite()) | empty_TC).all(-1)
    return whole_T
