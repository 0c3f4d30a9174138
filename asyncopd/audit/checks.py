"""What a loss must do beyond being right on average; each check gives a reason where it fails.

Shape suffixes: T positions, C candidates, V columns of a head.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncopd.audit.batches import batch_of, spaces
from asyncopd.audit.measure import measure
from asyncopd.audit.states import State, disjoint, near, random_state, same_model
from asyncopd.audit.subject import AuditBatch, Drawn, Subject, logprobs

VOCABULARY = 5
EXACT = 1e-9
"""Relative error that float64 allows."""


def equal_at_same_model(subject: Subject) -> str | None:
    """Student and teacher alike: expected value and gradient are zero."""
    if not subject.unbiased_fresh:
        return None
    found = measure(subject, same_model(VOCABULARY))
    if float(found.gradient_TV.norm()) > EXACT:
        return f"expected gradient {float(found.gradient_TV.norm()):.2g} at p = q"
    if subject.estimates_value and abs(found.value) > EXACT:
        return f"expected value {found.value:.2g} at p = q"
    return None


def disjoint_supports(subject: Subject) -> str | None:
    """Student and teacher on different tokens: the gradient is finite and, where claimed, still the true one."""
    found = measure(subject, disjoint(VOCABULARY))
    if not bool(found.gradient_TV.isfinite().all()):
        return "gradient is not finite at disjoint supports"
    if subject.unbiased_fresh and not found.grad_bias <= 1e-6:
        vanished = float(found.gradient_TV.norm()) < 1e-3
        return "gradient vanishes at disjoint supports" if vanished else f"gradient bias {found.grad_bias:.2g} there"
    return None


def infinities(subject: Subject) -> str | None:
    """A token that nobody can emit (-inf everywhere), and an empty candidate slot, change nothing."""
    batch = _some(subject, random_state(VOCABULARY, stale=True))
    value, gradient_TV = _evaluate(subject, batch)
    sets = {
        origin: Drawn(
            ids_TC=pad(drawn.ids_TC, (0, 1)),
            log_w_TC=pad(drawn.log_w_TC, (0, 1), value=-torch.inf),
            log_q_TC=pad(drawn.log_q_TC, (0, 1), value=torch.nan),
        )
        for origin, drawn in batch.sets.items()
    }
    if "full" not in subject.design:
        found, found_TV = _evaluate(subject, replace(batch, sets=sets))
        if not _close(found, value) or not _close(found_TV, gradient_TV):
            return "an empty candidate slot changes loss or gradient, or makes them NaN"
    banned = replace(
        batch,
        logits_TV=_leaf(pad(batch.logits_TV, (0, 1), value=-torch.inf)),
        teacher_TV=pad(batch.teacher_TV, (0, 1), value=-torch.inf),
        behaviour_TV=pad(batch.behaviour_TV, (0, 1), value=-torch.inf),
        vocabulary=batch.vocabulary + 1,
    )
    found, found_TV = _evaluate(subject, banned)
    if not bool(found_TV.isfinite().all()) or not _close(found, value):
        return "a token at -inf in both models makes loss or gradient NaN"
    return None


def bf16(subject: Subject) -> str | None:
    """Logits in bf16, models close to each other: within 2% of float64 on the same rounded logits."""
    exact = near(VOCABULARY)
    state = State(
        student_TV=exact.student_TV.bfloat16().double(),
        teacher_TV=exact.teacher_TV.bfloat16().double(),
        behaviour_TV=exact.behaviour_TV.bfloat16().double(),
    )
    batch = _some(subject, state)
    _, exact_TV = _evaluate(subject, batch)
    sets = {
        origin: replace(drawn, log_w_TC=drawn.log_w_TC.float(), log_q_TC=drawn.log_q_TC.float())
        for origin, drawn in batch.sets.items()
    }
    halved = replace(
        batch,
        logits_TV=_leaf(batch.logits_TV.bfloat16()),
        teacher_TV=batch.teacher_TV.bfloat16(),
        behaviour_TV=batch.behaviour_TV.bfloat16(),
        sets=sets,
    )
    _, found_TV = _evaluate(subject, halved)
    error = float((found_TV.double() - exact_TV).norm() / exact_TV.norm().clamp(min=1e-12))
    return None if error <= 0.02 else f"gradient is off by {error:.0%} with bf16 logits"


def all_masked(subject: Subject) -> str | None:
    """No valid token: zero loss with a graph, and zero gradient."""
    batch = _some(subject, random_state(VOCABULARY, stale=True))
    batch = replace(batch, mask_T=torch.zeros_like(batch.mask_T), step_tokens=0)
    loss = subject.loss(batch).sum()
    if not loss.requires_grad:
        return "an all-masked batch has no graph, so backward fails"
    (gradient_TV,) = torch.autograd.grad(loss, batch.logits_TV)
    if float(loss.detach()) != 0.0 or bool((gradient_TV != 0).any()):
        return f"an all-masked batch has loss {float(loss.detach()):.2g}, or a gradient that is not zero"
    return None


def micro_batches(subject: Subject) -> str | None:
    """Cutting the optimizer step into micro-batches of unequal numbers of valid tokens changes nothing."""
    if not subject.token_local:
        return None
    batch = _some(subject, random_state(VOCABULARY, stale=True))
    mask_T = batch.mask_T.clone()
    mask_T[[0, 1, 4]] = False
    batch = replace(batch, mask_T=mask_T, step_tokens=int(mask_T.sum()))
    value, gradient_TV = _evaluate(subject, batch)
    pieces = [_evaluate(subject, _rows(batch, piece)) for piece in (slice(0, 4), slice(4, None))]
    if not _close(pieces[0][0] + pieces[1][0], value):
        return "the loss depends on how the step is split into micro-batches"
    if not _close(torch.cat([piece[1] for piece in pieces]), gradient_TV):
        return "the gradient depends on how the step is split into micro-batches"
    return None


def padded_heads(subject: Subject) -> str | None:
    """Heads of different padded width, with garbage in the padding, change nothing."""
    batch = _some(subject, random_state(VOCABULARY, stale=True))
    value, gradient_TV = _evaluate(subject, batch)
    padded = replace(
        batch,
        logits_TV=_leaf(pad(batch.logits_TV, (0, 3), value=9.0)),
        teacher_TV=pad(batch.teacher_TV, (0, 5), value=7.0),
        behaviour_TV=pad(batch.behaviour_TV, (0, 3), value=8.0),
    )
    found, found_TV = _evaluate(subject, padded)
    if not _close(found, value) or not _close(found_TV, pad(gradient_TV, (0, 3))):
        return "padded vocabulary rows get probability or gradient"
    return None


def missing_score(subject: Subject) -> str | None:
    """A missing teacher score (NaN) masks its token or shows as NaN; it is never read as a number."""
    batch = _some(subject, random_state(VOCABULARY, stale=True))
    without, without_TV = _evaluate(subject, replace(batch, mask_T=_without_first(batch.mask_T)))
    sets = {origin: replace(drawn, log_q_TC=_without_score(drawn)) for origin, drawn in batch.sets.items()}
    teacher_TV = batch.teacher_TV.clone()
    teacher_TV[0] = torch.nan
    found, found_TV = _evaluate(subject, replace(batch, sets=sets, teacher_TV=teacher_TV))
    if bool(found.isnan()) or (_close(found, without) and _close(found_TV, without_TV)):
        return None
    return "a missing teacher score is read as a number"


def own_position(subject: Subject) -> str | None:
    """The teacher's scores of the next position do not change the gradient at this one."""
    if not subject.token_local:
        return None
    state = random_state(VOCABULARY, stale=True)
    batch = _some(subject, state)
    _, gradient_TV = _evaluate(subject, batch)
    other_TV = batch.teacher_TV.clone()
    other_TV[1::2] = other_TV[1::2].flip(-1)
    log_q_TV = logprobs(other_TV, batch.vocabulary)
    sets = {origin: replace(drawn, log_q_TC=log_q_TV.gather(1, drawn.ids_TC)) for origin, drawn in batch.sets.items()}
    _, found_TV = _evaluate(subject, replace(batch, teacher_TV=other_TV, sets=sets))
    return None if _close(found_TV[::2], gradient_TV[::2]) else "a token's gradient reads another position's scores"


def depends_on_teacher(subject: Subject) -> str | None:
    """Another teacher gives another expected gradient."""
    state = random_state(VOCABULARY, stale=False)
    other = replace(state, teacher_TV=state.teacher_TV.flip(-1))
    first, second = measure(subject, state).gradient_TV, measure(subject, other).gradient_TV
    if float((first - second).norm()) <= EXACT:
        return "the expected gradient does not depend on the teacher"
    return None


CHECKS: dict[str, Callable[[Subject], str | None]] = {
    "same_model": equal_at_same_model,
    "disjoint": disjoint_supports,
    "infinities": infinities,
    "bf16": bf16,
    "all_masked": all_masked,
    "micro_batches": micro_batches,
    "padded_heads": padded_heads,
    "missing_score": missing_score,
    "own_position": own_position,
    "teacher": depends_on_teacher,
}
"""By the name that the table uses."""


def _some(subject: Subject, state: State, count: int = 6) -> AuditBatch:
    """A batch of some outcomes, spread over what can be drawn."""
    drawn = spaces(subject, state)
    rows = [torch.linspace(0, len(space.groups[0]) - 1, count).round().long() for space in drawn]
    return batch_of(state, drawn, rows)


def _evaluate(subject: Subject, batch: AuditBatch) -> tuple[Tensor, Tensor]:
    """Contribution to the step's loss, and its logit gradient; a loss of one number a token is reduced here."""
    loss = subject.loss(batch)
    total = loss.sum() / max(batch.step_tokens, 1) if loss.dim() == 1 else loss
    (gradient_TV,) = torch.autograd.grad(total, batch.logits_TV)
    return total.detach(), gradient_TV


def _rows(batch: AuditBatch, rows: slice) -> AuditBatch:
    """A micro-batch; ``step_tokens`` stays that of the step."""
    sets = {
        origin: Drawn(ids_TC=drawn.ids_TC[rows], log_w_TC=drawn.log_w_TC[rows], log_q_TC=drawn.log_q_TC[rows])
        for origin, drawn in batch.sets.items()
    }
    return replace(
        batch,
        logits_TV=_leaf(batch.logits_TV[rows]),
        teacher_TV=batch.teacher_TV[rows],
        behaviour_TV=batch.behaviour_TV[rows],
        token_T=batch.token_T[rows],
        mask_T=batch.mask_T[rows],
        sequence_T=batch.sequence_T[rows],
        sets=sets,
    )


def _leaf(logits_TV: Tensor) -> Tensor:
    return logits_TV.detach().clone().requires_grad_()


def _without_first(mask_T: Tensor) -> Tensor:
    return mask_T & (torch.arange(len(mask_T)) > 0)


def _without_score(drawn: Drawn) -> Tensor:
    """Teacher logprobs with NaN at the first candidate of nonzero weight of the first position."""
    log_q_TC = drawn.log_q_TC.clone()
    log_q_TC[0, int((drawn.log_w_TC[0] > -torch.inf).int().argmax())] = torch.nan
    return log_q_TC


def _close(found: Tensor, expected: Tensor) -> bool:
    """Equal to float64 rounding; NaN equals nothing."""
    return bool(torch.allclose(found, expected, rtol=1e-9, atol=1e-12))
