"""Every combination that the registries offer, as subjects.

Shape suffixes: T positions, C candidates.
"""

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from asyncopd.audit.subject import AuditBatch, Loss, Subject
from asyncopd.audit.targets import TARGETS
from asyncopd.errors import ConfigError
from asyncopd.objectives import (
    DIVERGENCES,
    SURROGATES,
    Candidates,
    Objective,
    ObjectiveConfig,
    Tokens,
    build_objective,
    valid_positions,
)
from asyncopd.objectives.centring import Centring
from asyncopd.objectives.resolution import parts
from asyncopd.objectives.sparse import Form
from teacher_cache.designs import DESIGNS
from teacher_cache.record import CandidateSet, TeacherRecord

SMALL_SPECS = {
    "full": ("full",),
    "gumbel": ("gumbel(2)",),
    "head_tail": ("head_tail(2,2)", "head_tail(2,1)"),
    "multi_sample": ("multi_sample(2)",),
    "sampled": ("sampled",),
    "systematic": ("systematic(1)", "systematic(3)"),
    "top_k": ("top_k(2)",),
    "top_k_tail": ("top_k_tail(2)",),
    "two_phase": ("two_phase(3,2)",),
    "two_phase_centred": ("two_phase_centred(3,2)",),
}
"""Each design at budgets at which a small vocabulary leaves something to draw."""

_ORIGINS: tuple[Literal["auto", "student", "teacher"], ...] = ("auto", "student", "teacher")
_FORMS: tuple[Form, ...] = ("bregman", "bounded", "plain")
_CENTRINGS: tuple[Centring, ...] = ("none", "mean", "leave_one_out", "hajek")

_SURROGATE_CLAIMS = {
    "decoupled": ("reverse_kl", True, False, True),
    "icepop": ("reverse_kl", True, False, True),
    "pg_cached": ("reverse_kl_minus_drift", True, True, True),
    "pg_recompute": ("reverse_kl", True, True, True),
    "pg_uncorrected": ("reverse_kl", True, False, False),
    "ppo_clip": ("reverse_kl", True, False, True),
    "second_moment": ("reverse_kl", True, False, True),
    "sequence_ratio": ("reverse_kl", True, False, True),
}
"""Target of each surrogate; whether its gradient is unbiased fresh and stale; whether its value is, too."""


def registered_subjects() -> Iterator[Subject]:
    """Divergence x design x origin x form x centring as far as ``ObjectiveConfig`` accepts it, and every surrogate."""
    specs = [spec for design in DESIGNS for spec in SMALL_SPECS[design]]
    for name, spec in product(DIVERGENCES, specs):
        seen: set[object] = set()
        for origin, form, centring in product(_ORIGINS, _FORMS, _CENTRINGS):
            try:
                config = ObjectiveConfig(
                    name=name, design=spec, origin=origin, form=form, centring=centring, allow_unbounded=True
                )
            except ConfigError:
                continue
            resolved = tuple((part.origin, part.form, part.centring) for _, part in parts(config))
            if resolved not in seen:
                seen.add(resolved)
                yield divergence_subject(config)
    # hajek needs four candidates, so it gets a vocabulary in which four leave something out
    yield divergence_subject(ObjectiveConfig(design="systematic(4)", centring="hajek"))
    for name in SURROGATES:
        yield surrogate_subject(ObjectiveConfig(name=name))


def divergence_subject(config: ObjectiveConfig) -> Subject:
    """A divergence as a subject; it claims to be unbiased where its design is and its centring cannot bias."""
    found = [part for _, part in parts(config)]
    centring = "/".join(sorted({part.centring for part in found} - {"none"}))
    unbiased = found[0].design.unbiased and centring != "hajek"
    objective = _quietly(config)
    return Subject(
        name=f"{config.name}+{centring}" if centring else config.name,
        loss=objective_loss(objective),
        target=TARGETS[config.name],
        design=config.design,
        origins=tuple(sorted({part.origin for part in found})),
        form="/".join(dict.fromkeys(part.form for part in found)),
        unbiased_fresh=unbiased,
        unbiased_stale=unbiased,
        token_local=objective.token_local,
    )


def surrogate_subject(config: ObjectiveConfig) -> Subject:
    """A policy-gradient surrogate as a subject."""
    objective, (target, fresh, stale, value) = _quietly(config), _SURROGATE_CLAIMS[config.name]
    return Subject(
        name=config.name,
        loss=objective_loss(objective),
        target=TARGETS[target],
        unbiased_fresh=fresh,
        unbiased_stale=stale,
        estimates_value=value,
        token_local=objective.token_local,
    )


def objective_loss(objective: Objective) -> Loss:
    """An objective as a loss under audit: what the learner does, without the fused head."""

    def loss(batch: AuditBatch) -> Tensor:
        index_T = (batch.mask_T & valid_positions(_record(batch), objective.origins)).nonzero()[:, 0]
        tokens = _tokens(batch, index_T)
        context = objective.step_context(tokens) if objective.needs_step_pass else None
        found_T, _ = objective.token_losses(tokens, context)
        return torch.zeros(len(batch.token_T), dtype=found_T.dtype).index_add(0, index_T, found_T)

    return loss


def _record(batch: AuditBatch) -> TeacherRecord:
    """The teacher's record that the batch stands for."""
    sets = tuple(
        CandidateSet(
            origin=origin,
            design="audit",
            temperature=1.0,
            version=None,
            ids_TC=drawn.ids_TC,
            log_w_TC=drawn.log_w_TC,
            log_q_TC=drawn.log_q_TC,
        )
        for origin, drawn in batch.sets.items()
    )
    log_q_T = batch.log_q_T()
    return TeacherRecord(temperature=1.0, teacher="audit", log_q_T=log_q_T, entropy_T=log_q_T, sets=sets)


def _tokens(batch: AuditBatch, index_T: Tensor) -> Tokens:
    """Some positions of the batch, as an objective reads them."""
    log_p_TV = batch.log_p_TV()
    candidates = {
        origin: Candidates(
            log_p_TC=log_p_TV.gather(1, drawn.ids_TC)[index_T],
            log_q_TC=drawn.log_q_TC[index_T],
            log_w_TC=drawn.log_w_TC[index_T],
        )
        for origin, drawn in batch.sets.items()
    }
    return Tokens(
        log_p_T=batch.log_p_T()[index_T],
        log_q_T=batch.log_q_T()[index_T],
        log_b_T=batch.log_b_T()[index_T],
        sequence_T=batch.sequence_T[index_T],
        staleness_T=torch.zeros_like(index_T),
        student=candidates.get("student"),
        teacher=candidates.get("teacher"),
    )


def _quietly(config: ObjectiveConfig) -> Objective:
    """The objective without advice: that a choice is poor is what the table shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_objective(config)
