"""What a record tells about training: metrics of each token, and their means by staleness.

Shape suffixes: T tokens, C candidates a token.
"""

import torch
from torch import Tensor

from asyncopd.objectives.divergences.divergence import where_emitted
from teacher_cache.record import Origin

METRICS = {
    "divergence": "estimated divergence of the token, nats (total variation: probability), without centring",
    # These two read the sampled token as a draw from the student's softmax at the objective's temperature.
    "k1": "log p - log q of the sampled token, nats: a one-sample reverse KL where the token is fresh",
    "log_ratio": "log p - log b of the sampled token, nats: how far the policy moved since",
    "ess": "effective sample size of the weights, candidates",
    "weight_max": "largest weight times mass (w*p student-drawn, w*q teacher-drawn)",
    "student_entropy": "estimated entropy of the student, nats",
    "teacher_entropy": "estimated entropy of the teacher, nats",
    "student_mass": "student's probability of the distinct candidates",
    "teacher_mass": "teacher's probability of the distinct candidates",
    "top_agreement": "1 where the student's likeliest candidate is the teacher's",
    "truncated": "share of candidates whose p/g was capped",
    "clipped": "1 where a clip, a cap or a mask took the token's gradient away",
    "sequence_ratio": "geometric mean of p/b over the token's sequence",
}
"""Every metric of ``Objective.token_losses``. ``mixed`` prefixes those of its parts: ``forward_kl/ess``."""

BUCKETS = (("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3-4", 3, 4), ("5-8", 5, 8), ("9+", 9, None))
"""Name, first and last staleness (policy versions) of each bucket."""


@torch.no_grad()
def candidate_metrics(
    log_p_TC: Tensor, log_q_TC: Tensor, w_TC: Tensor, origin: Origin, distinct: bool
) -> dict[str, Tensor]:
    """Metrics of the candidates, each [T]. Weight zero is an empty slot; ``distinct``: no token occurs twice."""
    p_TC, q_TC, alive_TC = log_p_TC.exp(), log_q_TC.exp(), w_TC > 0
    share_TC = w_TC * (p_TC if origin == "student" else q_TC)
    total_T = share_TC.sum(-1)
    first_TC = alive_TC if distinct else alive_TC & _first_occurrence(log_p_TC, log_q_TC, w_TC)
    top_p_T = log_p_TC.where(alive_TC, -torch.inf).argmax(-1)
    top_q_T = log_q_TC.where(alive_TC, -torch.inf).argmax(-1)
    return {
        "ess": total_T.square() / share_TC.square().sum(-1).clamp(min=torch.finfo(w_TC.dtype).tiny),
        "weight_max": share_TC.amax(-1),
        "student_entropy": -(w_TC * p_TC * where_emitted(log_p_TC, log_p_TC)).sum(-1),
        "teacher_entropy": -(w_TC * q_TC * where_emitted(log_q_TC, log_q_TC)).sum(-1),
        "student_mass": p_TC.where(first_TC, 0.0).sum(-1),
        "teacher_mass": q_TC.where(first_TC, 0.0).sum(-1),
        "top_agreement": (top_p_T == top_q_T).to(w_TC.dtype),
    }


def _first_occurrence(log_p_TC: Tensor, log_q_TC: Tensor, w_TC: Tensor) -> Tensor:
    """Bool [T, C]: no earlier candidate has the same three numbers, which only a repeated token has."""
    same_TCC = w_TC[:, :, None] == w_TC[:, None, :]
    same_TCC &= log_p_TC[:, :, None] == log_p_TC[:, None, :]
    same_TCC &= log_q_TC[:, :, None] == log_q_TC[:, None, :]
    return ~same_TCC.tril(-1).any(-1)


@torch.no_grad()
def by_staleness(metrics: dict[str, Tensor], staleness_T: Tensor) -> dict[str, float]:
    """Mean of every metric in each bucket that has tokens: ``ess/staleness_3-4``.

    With them ``tokens/staleness_...`` (a count) and, for the estimated divergence, ``divergence_se/staleness_...``: its
    standard error over tokens, which contains the noise of the candidates.
    """
    means: dict[str, float] = {}
    for bucket, first, last in BUCKETS:
        inside_T = staleness_T >= first
        if last is not None:
            inside_T = inside_T & (staleness_T <= last)
        count = int(inside_T.sum())
        if count == 0:
            continue
        means[f"tokens/staleness_{bucket}"] = float(count)
        for name, value_T in metrics.items():
            chosen_T = value_T[inside_T].double()
            means[f"{name}/staleness_{bucket}"] = float(chosen_T.mean())
            if name.endswith("divergence") and count > 1:
                means[f"{name}_se/staleness_{bucket}"] = float(chosen_T.std() / count**0.5)
    return means
