"""Losses that people have shipped, and that are wrong; each claims to be unbiased.

Shape suffixes: T positions, C candidates, V vocabulary.
"""

import torch
from torch import Tensor

from asyncopd.audit import AuditBatch, audited


def _mask(batch: AuditBatch, loss_T: Tensor) -> Tensor:
    return loss_T.where(batch.mask_T, 0.0)


@audited(target="reverse_kl")
def k1(batch: AuditBatch) -> Tensor:
    """log p - log q on the sampled token, differentiated."""
    return _mask(batch, batch.log_p_T() - batch.log_q_T())


@audited(target="reverse_kl", unbiased_stale=False)
def k3(batch: AuditBatch) -> Tensor:
    """q/p - 1 - log(q/p) on the sampled token, differentiated."""
    log_ratio_T = batch.log_q_T() - batch.log_p_T()
    return _mask(batch, log_ratio_T.exp() - 1 - log_ratio_T)


@audited(target="forward_kl", unbiased_stale=False, estimates_value=False)
def k3_taken_for_what_it_is(batch: AuditBatch) -> Tensor:
    """The same loss, claimed to descend the other KL direction: on fresh tokens it does."""
    return k3.loss(batch)


@audited(target="reverse_kl", design="top_k(2)")
def top_k_clamped(batch: AuditBatch) -> Tensor:
    """Plain KL over the likeliest tokens, clamped at 0 from below."""
    log_p_TC = batch.log_p_TC()
    alive_TC = batch.log_w_TC > -torch.inf
    kl_T = (log_p_TC.exp() * (log_p_TC - batch.log_q_TC)).where(alive_TC, 0.0).sum(-1)
    return _mask(batch, kl_T.clamp(min=0.0))


@audited(target="forward_kl", design="full", origin="teacher")
def student_top_k_clamped(batch: AuditBatch) -> Tensor:
    """Plain forward KL over the student's likeliest tokens, clamped at 0: negative exactly where p >> q."""
    log_p_TC, top_TC = batch.log_p_TV().topk(2)
    log_q_TC = batch.log_q_TC.gather(1, top_TC)
    return _mask(batch, (log_q_TC.exp() * (log_q_TC - log_p_TC)).sum(-1).clamp(min=0.0))


@audited(target="reverse_kl", design="top_k(1)")
def top_k_renormalised(batch: AuditBatch) -> Tensor:
    """KL between both models renormalised over the candidates."""
    log_p_TC, log_q_TC = batch.log_p_TC().log_softmax(-1), batch.log_q_TC.log_softmax(-1)
    return _mask(batch, (log_p_TC.exp() * (log_p_TC - log_q_TC)).sum(-1))


@audited(target="reverse_kl")
def detached_top_k_reward(batch: AuditBatch) -> Tensor:
    """Policy gradient whose reward is the detached KL over the likeliest tokens: the same for every sampled token."""
    log_p_TC, top_TC = batch.log_p_TV().detach().topk(2)
    log_q_TC = batch.log_q_TV().gather(1, top_TC)
    reward_T = -(log_p_TC.exp() * (log_p_TC - log_q_TC)).sum(-1)
    return _mask(batch, -(batch.log_p_T() - batch.log_b_T()).exp() * reward_T)


@audited(target="reverse_kl", design="multi_sample(2)")
def zero_filled(batch: AuditBatch) -> Tensor:
    """Right, but for a missing teacher score, which becomes logprob 0: probability 1."""
    log_p_TC, log_q_TC = batch.log_p_TC(), batch.log_q_TC.nan_to_num(nan=0.0)
    alive_TC = batch.log_w_TC > -torch.inf
    phi_TC = log_p_TC.exp() * (log_p_TC - log_q_TC) - log_p_TC.exp() + log_q_TC.exp()
    return _mask(batch, (batch.log_w_TC.exp() * phi_TC).where(alive_TC, 0.0).sum(-1))


@audited(target="reverse_kl", design="multi_sample(2)")
def off_by_one(batch: AuditBatch) -> Tensor:
    """Right, but for the teacher's scores, which are those of the next position."""
    log_p_TC, log_q_TC = batch.log_p_TC(), batch.log_q_TC.roll(-1, 0)
    alive_TC = (batch.log_w_TC > -torch.inf) & (batch.log_w_TC.roll(-1, 0) > -torch.inf)
    phi_TC = log_p_TC.exp() * (log_p_TC - log_q_TC) - log_p_TC.exp() + log_q_TC.exp()
    return _mask(batch, (batch.log_w_TC.exp() * phi_TC).where(alive_TC, 0.0).sum(-1))


@audited(target="reverse_kl", design="full")
def mean_of_micro_batches(batch: AuditBatch) -> Tensor:
    """Right on a whole step, but it divides by the tokens of its own micro-batch."""
    log_p_TC = batch.log_p_TC()
    alive_TC = batch.log_w_TC > -torch.inf
    kl_T = (log_p_TC.exp() * (log_p_TC - batch.log_q_TC)).where(alive_TC, 0.0).sum(-1)
    return _mask(batch, kl_T).sum() / batch.mask_T.sum().clamp(min=1)


@audited(target="reverse_kl", design="full")
def padded_softmax(batch: AuditBatch) -> Tensor:
    """Dense reverse KL that normalises over the padded rows of the head."""
    width = min(batch.logits_TV.shape[1], batch.teacher_TV.shape[1])
    log_p_TV = batch.logits_TV[:, :width].log_softmax(-1)
    log_q_TV = batch.teacher_TV[:, :width].log_softmax(-1)
    kl_TV = (log_p_TV.exp() * (log_p_TV - log_q_TV)).where(log_p_TV > -torch.inf, 0.0)
    return _mask(batch, kl_TV.sum(-1))


@audited(target="reverse_kl", design="full")
def half_precision(batch: AuditBatch) -> Tensor:
    """Dense reverse KL in whatever precision the logits have."""
    log_p_TV = batch.logits_TV[:, : batch.vocabulary].log_softmax(-1)
    log_q_TV = batch.teacher_TV[:, : batch.vocabulary].log_softmax(-1)
    apart_TV = (log_p_TV - log_q_TV).where(log_p_TV > -torch.inf, 0.0)
    return _mask(batch, (log_p_TV.exp() * apart_TV).sum(-1))


@audited(target="reverse_kl", design="systematic(3)")
def weightless(batch: AuditBatch) -> Tensor:
    """Sampled candidates without their weights."""
    log_p_TC, log_q_TC = batch.log_p_TC(), batch.log_q_TC
    alive_TC = batch.log_w_TC > -torch.inf
    phi_TC = log_p_TC.exp() * (log_p_TC - log_q_TC) - log_p_TC.exp() + log_q_TC.exp()
    return _mask(batch, phi_TC.where(alive_TC, 0.0).sum(-1))


@audited(target="reverse_kl")
def right(batch: AuditBatch) -> Tensor:
    """Importance-weighted reverse KL of the sampled token, one number a token."""
    ratio_T = (batch.log_p_T() - batch.log_b_T()).exp()
    return _mask(batch, -ratio_T * (batch.log_q_T() - batch.log_p_T()).detach())


@audited(target="reverse_kl")
def right_scalar(batch: AuditBatch) -> Tensor:
    """The same as one scalar over the step's tokens."""
    return right.loss(batch).sum() / max(batch.step_tokens, 1)
