"""From a design to the candidate set that travels.

Shape suffixes: T positions, C candidates, V vocabulary.
"""

import torch
from torch import Tensor

from teacher_cache.designs.design import SupportDesign
from teacher_cache.noise import Noise
from teacher_cache.record import CandidateSet, Origin


def draw_candidates(
    design: SupportDesign,
    *,
    log_g_TV: Tensor,
    noise: Noise,
    sampled_T: Tensor | None,
    origin: Origin,
    temperature: float,
    version: int | None,
) -> CandidateSet:
    """Candidates of T positions without teacher scores: int32 ids, float32 weights.

    log_g_TV    proposal logprobs (nats) at ``temperature``; -inf for padded rows
    sampled_T   the rollout's own tokens; ignored where the teacher proposes, whose draws they are not
    version     policy version of the student that proposes; None for a teacher
    """
    draw = design.draw(log_g_TV, noise, sampled_T if origin == "student" else None)
    thins = design.thins and origin == "student"
    return CandidateSet(
        origin=origin,
        design=design.spec,
        temperature=temperature,
        version=version,
        ids_TC=draw.ids_TC.to(torch.int32),
        log_w_TC=draw.log_w_TC.float(),
        log_g_TC=log_g_TV.gather(1, draw.ids_TC).float() if thins else None,
    )
