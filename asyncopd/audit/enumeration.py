"""Everything that a design can draw at one position, with its probability.

The design's own code draws; what is enumerated is its noise, on cells that are worked out here from the definition of
the design. Code whose cells lie elsewhere gets wrong probabilities, and fails.

Shape suffixes: N outcomes, C candidates, V vocabulary, D draws, M first-phase candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor

from asyncopd.errors import ConfigError
from teacher_cache.designs import Draw, SupportDesign, ThinningDesign
from teacher_cache.noise import Noise

_KAPPA_GRID = torch.linspace(-12.0, 45.0, 191, dtype=torch.float64)
"""Quadrature points of the gumbel threshold; the trapezium rule is exact to exp(-pi^2/0.3) for its density."""
_NEGLIGIBLE = 1e-26
"""Probability of a threshold so high that its weights, of about the square root of 1e26, do not show in the sum."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcomes:
    """The possible records of one position.

    token_N is the rollout's own token where the design reuses it; elsewhere token 0, which nothing may depend on.
    """

    ids_NC: Tensor
    log_w_NC: Tensor
    token_N: Tensor
    chance_N: Tensor

    def take(self, row_J: Tensor) -> "Outcomes":
        """Some of the outcomes, in this order."""
        return Outcomes(
            ids_NC=self.ids_NC[row_J],
            log_w_NC=self.log_w_NC[row_J],
            token_N=self.token_N[row_J],
            chance_N=self.chance_N[row_J],
        )


def outcomes(design: SupportDesign, log_g_V: Tensor, log_q_V: Tensor, *, student: bool) -> Outcomes:
    """All outcomes of ``design`` with proposal ``log_g_V``; ``student`` says whose proposal it is."""
    name = design.spec.partition("(")[0]
    if name not in _ENUMERATORS:
        raise ConfigError(f"the audit cannot enumerate {design.spec}; add its cells to asyncopd/audit/enumeration.py")
    return _ENUMERATORS[name](design, log_g_V.double(), log_q_V.double(), student)


def inclusion(g_V: Tensor, budget: int) -> Tensor:
    """``pi = min(1, c*g)`` with sum ``budget``, by saturating one token at a time."""
    pi_V = torch.zeros_like(g_V)
    order = g_V.argsort(descending=True)
    saturated = 0
    while saturated < min(budget, int((g_V > 0).sum())):
        rest = order[saturated:]
        pi_V[rest] = (budget - saturated) * g_V[rest] / g_V[rest].sum()
        if pi_V[rest[0]] <= 1.0:
            break
        pi_V[rest[0]] = 1.0
        saturated += 1
    return pi_V


def offsets(g_V: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Midpoint and length of each stretch of the systematic offset on which the draw is constant."""
    edge_N = torch.cat([inclusion(g_V, budget).cumsum(0).frac(), torch.tensor([0.0, 1.0], dtype=torch.float64)])
    edge_N = edge_N.sort().values
    length_N = edge_N.diff()
    kept = length_N > 1e-12
    return (edge_N[:-1] + length_N / 2)[kept], length_N[kept]


def _cells(mass_V: Tensor) -> tuple[Tensor, Tensor]:
    """Middle of each token's stretch of the line [0, 1), and its length."""
    share_V = mass_V / mass_V.sum()
    return share_V.cumsum(0) - share_V / 2, share_V


def _draw(design: SupportDesign, log_g_V: Tensor, noise_ND: Tensor, token_N: Tensor | None) -> Draw:
    rows = noise_ND.shape[0]
    return design.draw(log_g_V.expand(rows, -1).contiguous(), feed(noise_ND), token_N)


def feed(noise_ND: Tensor) -> Noise:
    """Noise that gives these numbers; asked for another count, the design would read noise that was not enumerated."""

    def give(count: int) -> Tensor:
        if count != noise_ND.shape[1]:
            raise ConfigError(f"the design drew {count} uniforms a position where {noise_ND.shape[1]} were enumerated")
        return noise_ND

    return give


def _constant(design: SupportDesign, log_g_V: Tensor, log_q_V: Tensor, student: bool) -> Outcomes:
    draw = _draw(design, log_g_V, torch.empty(1, 0, dtype=torch.float64), None)
    return _outcomes(draw, torch.ones(1, dtype=torch.float64), None)


def _offset(design: SupportDesign, log_g_V: Tensor, log_q_V: Tensor, student: bool) -> Outcomes:
    middle_N, chance_N = offsets(log_g_V.exp(), design.budget)
    return _outcomes(_draw(design, log_g_V, middle_N[:, None], None), chance_N, None)


def _independent(design: SupportDesign, log_g_V: Tensor, log_q_V: Tensor, student: bool) -> Outcomes:
    """``budget`` draws; the first is the rollout's own token where the student proposes."""
    middle_V, share_V = _cells(log_g_V.exp())
    pick_ND = torch.tensor(list(product(range(len(share_V)), repeat=design.budget)))
    chance_N = share_V[pick_ND].prod(-1)
    if not student:
        return _outcomes(_draw(design, log_g_V, middle_V[pick_ND], None), chance_N, None)
    token_N = pick_ND[:, 0]
    return _outcomes(_draw(design, log_g_V, middle_V[pick_ND[:, 1:]], token_N), chance_N, token_N)


def _head_tail(design: SupportDesign, log_g_V: Tensor, log_q_V: Tensor, student: bool) -> Outcomes:
    g_V = log_g_V.exp()
    if student and design.reuses_sampled_token:
        token_N = torch.arange(len(g_V))
        draw = _draw(design, log_g_V, torch.empty(len(g_V), 0, dtype=torch.float64), token_N)
        return _outcomes(draw, g_V / g_V.sum(), token_N)
    head = int(design.spec.partition("(")[2].partition(",")[0])
    tail_V = g_V.clone()
    tail_V[g_V.topk(head).indices] = 0.0
    middle_V, share_V = _cells(tail_V)
    alive = [token for token in range(len(g_V)) if share_V[token] > 0]
    pick_ND = torch.tensor(list(product(alive, repeat=design.budget - head)))
    return _outcomes(_draw(design, log_g_V, middle_V[pick_ND], None), share_V[pick_ND].prod(-1), None)


def _gumbel(design: SupportDesign, log_g_V: Tensor, log_q_V: Tensor, student: bool) -> Outcomes:
    """Sets above the threshold, and the threshold on a grid: its density given the set is ``R e^-k exp(-R e^-k)``."""
    g_V, size = log_g_V.exp(), len(log_g_V)
    g_V = g_V / g_V.sum()
    noise, chance = [], []
    step = float(_KAPPA_GRID[1] - _KAPPA_GRID[0])
    for chosen in combinations(range(size), design.budget):
        outside = [token for token in range(size) if token not in chosen]
        rest = g_V[outside].sum()
        level_N1 = (-_KAPPA_GRID).exp()[:, None]
        above_N = (-torch.expm1(-g_V[list(chosen)] * level_N1)).prod(-1)
        chance.append(above_N * (rest * level_N1 * (-rest * level_N1).exp())[:, 0] * step)
        key_NV = _KAPPA_GRID[:, None] + torch.full((size,), -1.0, dtype=torch.float64)
        key_NV[:, list(chosen)] += 2.0
        key_NV[:, outside[0]] += 1.0
        noise.append((-(log_g_V - key_NV).exp()).exp().clamp(min=1e-300, max=1.0 - 2.0**-53))
    chance_N = torch.cat(chance)
    kept = chance_N > _NEGLIGIBLE
    return _outcomes(_draw(design, log_g_V, torch.cat(noise)[kept], None), chance_N[kept], None)


def _two_phase(design: SupportDesign, log_g_V: Tensor, log_q_V: Tensor, student: bool) -> Outcomes:
    """Each first-phase outcome, and what the scorer can keep of it."""
    if not isinstance(design, ThinningDesign):
        raise ConfigError(f"{design.spec} is not a two-phase design")
    middle_N, chance_N = offsets(log_g_V.exp(), design.first_budget)
    first = _draw(design, log_g_V, middle_N[:, None], None)
    ids, log_w, chance = [], [], []
    for row, probability in enumerate(chance_N):
        ids_M, log_w_M = first.ids_TC[row], first.log_w_TC[row]
        scores = log_g_V[ids_M], log_q_V[ids_M]
        middle_R, length_R = offsets(design.log_sizes(log_w_M, *scores).exp(), design.budget)
        rows = len(middle_R)
        draw, _ = design.thin(
            ids_TC=ids_M.expand(rows, -1),
            log_w_TC=log_w_M.expand(rows, -1),
            log_g_TC=scores[0].expand(rows, -1),
            log_q_TC=scores[1].expand(rows, -1),
            noise=feed(middle_R[:, None]),
        )
        ids.append(draw.ids_TC)
        log_w.append(draw.log_w_TC)
        chance.append(probability * length_R)
    return _outcomes(Draw(ids_TC=torch.cat(ids), log_w_TC=torch.cat(log_w)), torch.cat(chance), None)


def _outcomes(draw: Draw, chance_N: Tensor, token_N: Tensor | None) -> Outcomes:
    return Outcomes(
        ids_NC=draw.ids_TC,
        log_w_NC=draw.log_w_TC,
        token_N=torch.zeros(len(chance_N), dtype=torch.int64) if token_N is None else token_N,
        chance_N=chance_N,
    )


_ENUMERATORS: dict[str, Callable[[SupportDesign, Tensor, Tensor, bool], Outcomes]] = {
    "full": _constant,
    "gumbel": _gumbel,
    "head_tail": _head_tail,
    "multi_sample": _independent,
    "sampled": _independent,
    "systematic": _offset,
    "top_k": _constant,
    "top_k_tail": _constant,
    "two_phase": _two_phase,
    "two_phase_centred": _two_phase,
}
