"""The one formula of every sparse estimator: ``sum_i w_i * phi(log p(a_i), log q(a_i))``.

Shape suffixes: T tokens, C candidates a token.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncopd.objectives.centring import Centring, hajek, leave_one_out
from asyncopd.objectives.diagnostics import candidate_metrics
from asyncopd.objectives.divergences import Divergence
from asyncopd.objectives.tokens import Candidates
from teacher_cache.designs import SupportDesign
from teacher_cache.record import Origin

Form = Literal["bregman", "bounded", "plain"]
"""Linear term: ``f'(1)``, ``f'(inf)`` or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseDivergence:
    """A divergence on the candidates of one origin (OBJECTIVES, section 1).

    linear      coefficient of ``p - q``, which ``form`` stands for
    truncate    cap on ``p/g`` (detached), or None; draws with replacement only
    """

    divergence: Divergence
    origin: Origin
    design: SupportDesign
    form: Form
    linear: float
    centring: Centring
    truncate: float | None

    def losses(self, candidates: Candidates, baseline_T: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Estimate of the divergence of each token [T], nats, and detached metrics [T].

        baseline_T  the baseline of ``mean`` centring, nats; None for the others
        """
        log_p_TC, log_q_TC, w_TC = _alive(candidates)
        extra: dict[str, Tensor] = {}
        if self.truncate is not None:
            ratio_TC = self.design.budget * w_TC * log_p_TC.detach().exp()
            extra["truncated"] = (ratio_TC > self.truncate).to(w_TC.dtype).mean(-1)
            w_TC = w_TC * (self.truncate / ratio_TC).clamp(max=1.0).where(w_TC > 0, 1.0)
        estimate_T = (w_TC * self.divergence.phi(log_p_TC, log_q_TC, self.linear)).sum(-1)
        if self.design.tail_bucket:
            log_tail_p_T, log_tail_q_T = _log_rest(log_p_TC, w_TC), _log_rest(log_q_TC, w_TC)
            estimate_T = estimate_T + self.divergence.phi(log_tail_p_T, log_tail_q_T, self.linear)
        metrics = candidate_metrics(log_p_TC.detach(), log_q_TC, w_TC, self.origin, self.design.distinct)
        metrics |= {"divergence": estimate_T.detach()} | extra
        baseline_TC = self._baseline(log_p_TC.detach(), log_q_TC, w_TC, baseline_T)
        if baseline_TC is None:
            return estimate_T, metrics
        return estimate_T - (w_TC * baseline_TC * (log_p_TC.exp() - log_q_TC.exp())).sum(-1), metrics

    def estimate(self, candidates: Candidates) -> Tensor:
        """The detached estimate alone [T], nats, without centring."""
        with torch.no_grad():
            log_p_TC, log_q_TC, w_TC = _alive(candidates)
            return (w_TC * self.divergence.phi(log_p_TC, log_q_TC, self.linear)).sum(-1)

    def _baseline(self, log_p_TC: Tensor, log_q_TC: Tensor, w_TC: Tensor, baseline_T: Tensor | None) -> Tensor | None:
        """B, broadcastable to [T, C], or None without centring."""
        if self.centring == "hajek":
            return hajek(log_p_TC, log_q_TC, w_TC)
        if self.centring == "leave_one_out":
            return leave_one_out(log_p_TC, log_q_TC, w_TC)
        if self.centring == "mean" and baseline_T is not None:
            return baseline_T[:, None].to(log_p_TC.dtype)
        return None


def _alive(candidates: Candidates) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of both and weights [T, C], in float32 at least.

    Empty slots get p = q = 1 and weight 0: whatever was cached there reaches neither the loss nor the gradient.
    """
    dtype = torch.promote_types(candidates.log_p_TC.dtype, torch.float32)
    alive_TC = candidates.log_w_TC > -torch.inf
    log_p_TC = candidates.log_p_TC.to(dtype).where(alive_TC, 0.0)
    log_q_TC = candidates.log_q_TC.to(dtype).where(alive_TC, 0.0)
    return log_p_TC, log_q_TC, candidates.log_w_TC.to(dtype).exp()


def _log_rest(log_mass_TC: Tensor, w_TC: Tensor) -> Tensor:
    """``log(1 - sum of the mass)`` [T], from below at the rounding error of the mass itself."""
    drawn_T = log_mass_TC.double().exp().where(w_TC > 0, 0.0).sum(-1)
    return (1.0 - drawn_T).clamp(min=torch.finfo(log_mass_TC.dtype).eps).log().to(log_mass_TC.dtype)
