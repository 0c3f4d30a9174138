"""Tokens of random models, for tests of objectives.

Shape suffixes: T tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncopd.objectives import Candidates, Objective, Tokens
from teacher_cache.designs import Draw
from teacher_cache.noise import noise_for
from teacher_cache.record import Origin


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class World:
    """Student logits (with gradient), teacher and behaviour logprobs, and the sampled tokens."""

    logits_TV: Tensor
    log_q_TV: Tensor
    log_b_TV: Tensor
    token_T: Tensor
    sequence_T: Tensor

    @property
    def log_p_TV(self) -> Tensor:
        return self.logits_TV.log_softmax(-1)

    def tokens(self, objective: Objective, run_seed: int = 0) -> Tokens:
        """Candidates drawn by the objective's own designs, in the weights' full precision."""
        rows = [("sample", position) for position in range(len(self.token_T))]
        sets: dict[Origin, Candidates] = {}
        for origin, design in objective.draws.items():
            log_g_TV = self.log_b_TV if origin == "student" else self.log_q_TV
            noise = noise_for(run_seed, rows, f"candidates-{origin}")
            sets[origin] = self.candidates(design.draw(log_g_TV, noise, self.token_T if origin == "student" else None))
        return self.tokens_with(sets)

    def candidates(self, draw: Draw) -> Candidates:
        """The draw with the scores of both models."""
        return Candidates(
            log_p_TC=self.log_p_TV.gather(1, draw.ids_TC),
            log_q_TC=self.log_q_TV.gather(1, draw.ids_TC),
            log_w_TC=draw.log_w_TC,
        )

    def tokens_with(self, sets: dict[Origin, Candidates]) -> Tokens:
        """Tokens with these candidate sets."""
        own_T1 = self.token_T[:, None]
        return Tokens(
            log_p_T=self.log_p_TV.gather(1, own_T1)[:, 0],
            log_q_T=self.log_q_TV.gather(1, own_T1)[:, 0],
            log_b_T=self.log_b_TV.gather(1, own_T1)[:, 0],
            sequence_T=self.sequence_T,
            staleness_T=torch.arange(len(self.token_T)) % 12,
            student=sets.get("student"),
            teacher=sets.get("teacher"),
        )


def world(tokens: int = 12, vocabulary: int = 40, *, stale: bool = True, seed: int = 0, spread: float = 1.5) -> World:
    """Float64, three sequences of unequal length; a stale behaviour policy is half a nat off."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)

    logits_TV, teacher_TV, drift_TV = spread * normal(), spread * normal(), normal()
    behaviour_TV = logits_TV + 0.5 * drift_TV if stale else logits_TV
    log_b_TV = behaviour_TV.log_softmax(-1)
    token_T = torch.multinomial(log_b_TV.exp(), 1, generator=generator)[:, 0]
    length = torch.tensor([tokens // 4, tokens // 4, tokens - 2 * (tokens // 4)])
    return World(
        logits_TV=logits_TV.requires_grad_(),
        log_q_TV=teacher_TV.log_softmax(-1),
        log_b_TV=log_b_TV,
        token_T=token_T,
        sequence_T=torch.arange(3).repeat_interleave(length),
    )


def gradient(loss: Tensor, at: World) -> Tensor:
    """Gradient with respect to the student's logits."""
    return torch.autograd.grad(loss, at.logits_TV, retain_graph=True)[0]
