"""Logprobs at chosen tokens as an ordinary differentiable function: backward computes each chunk's logits once more.

Shape suffixes: T tokens, H hidden size, R head rows, V real vocabulary, C chosen tokens, K likeliest tokens, t tokens
of one chunk, r tokens of one block.

For losses that are not known chunk by chunk; four matrix products instead of the three of ``head.fused_loss``
(OBJECTIVES, section 5). Nothing of size [T, V] is held, in forward or backward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncopd.learner.head_chunks import HeadChunks, HeadGradients, HeadShape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SelectedLogprobs:
    """What the student says at each token.

    log_p_TC    logprobs (nats) at the chosen ids; differentiable
    entropy_T   entropy (nats), differentiable; None where it was not asked for
    top_ids_TK, top_log_p_TK   the likeliest tokens, likeliest first, and their logprobs (nats), detached; K may be 0
    """

    log_p_TC: Tensor
    entropy_T: Tensor | None
    top_ids_TK: Tensor
    top_log_p_TK: Tensor


def selected_logprobs(
    hidden_TH: Tensor,
    weight_RH: Tensor,
    bias_R: Tensor | None,
    ids_TC: Tensor,
    shape: HeadShape,
    *,
    entropy: bool = False,
    top: int = 0,
) -> SelectedLogprobs:
    """Logprobs at ``ids_TC`` (any of them more than once if need be), and entropy and the ``top`` likeliest tokens.

    For a loss of one's own on whole sequences or steps:

        log_p_TC = selected_logprobs(hidden_TH, head.weight, head.bias, ids_TC, shape).log_p_TC
        my_loss(log_p_TC).backward()
    """
    log_p_TC, entropy_T, top_ids_TK, top_log_p_TK = _SelectedLogprobs.apply(
        hidden_TH, weight_RH, bias_R, ids_TC, shape, entropy, top
    )
    return SelectedLogprobs(log_p_TC=log_p_TC, entropy_T=entropy_T, top_ids_TK=top_ids_TK, top_log_p_TK=top_log_p_TK)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TH, weight_RH, bias_R, ids_TC, shape, entropy, top):  # type: ignore[no-untyped-def]
        chunks = HeadChunks(hidden_TH, weight_RH, bias_R, shape)
        log_p_TC = torch.empty(ids_TC.shape, dtype=shape.sum_dtype, device=hidden_TH.device)
        entropy_T = log_p_TC.new_empty(len(hidden_TH)) if entropy else None
        top_log_p_TK = log_p_TC.new_empty(len(hidden_TH), top)
        top_ids_TK = torch.empty(len(hidden_TH), top, dtype=torch.int64, device=hidden_TH.device)
        for rows, logits_tV in chunks:
            for block in chunks.blocks(len(logits_tV)):
                place = slice(rows.start + block.start, rows.start + block.stop)
                log_p_rV = chunks.transformed(logits_tV[block], block).log_softmax(-1)
                torch.gather(log_p_rV, 1, ids_TC[place], out=log_p_TC[place])
                if top:
                    top_log_p_TK[place], top_ids_TK[place] = log_p_rV.topk(top)
                if entropy_T is not None:
                    entropy_T[place] = -log_p_rV.exp().mul_(log_p_rV).sum(-1)
        ctx.save_for_backward(hidden_TH, weight_RH, bias_R, ids_TC, entropy_T)
        ctx.shape = shape
        ctx.mark_non_differentiable(top_ids_TK, top_log_p_TK)
        return log_p_TC, entropy_T, top_ids_TK, top_log_p_TK

    @staticmethod
    def backward(ctx, grad_TC, grad_entropy_T, _ids, _log_p):  # type: ignore[no-untyped-def]
        hidden_TH, weight_RH, bias_R, ids_TC, entropy_T = ctx.saved_tensors
        chunks = HeadChunks(hidden_TH, weight_RH, bias_R, ctx.shape)
        gradients = HeadGradients(chunks, hidden_TH, weight_RH, ctx.needs_input_grad[:3])
        for rows, logits_tV in chunks:
            for block in chunks.blocks(len(logits_tV)):
                place = slice(rows.start + block.start, rows.start + block.stop)
                logits_rV = chunks.transformed(logits_tV[block], block)
                part = None if entropy_T is None else (entropy_T[place], grad_entropy_T[place])
                grad_rV = _logit_gradient(logits_rV, ids_TC[place], grad_TC[place], part)
                logits_tV[block] = chunks.through_transform(grad_rV, block)
            gradients.add(rows, logits_tV)
        return gradients.hidden_TH, gradients.weight_RH, gradients.bias_R, None, None, None, None


def _logit_gradient(
    logits_rV: Tensor, ids_rC: Tensor, grad_rC: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient of the transformed logits: scatter(grad) - p * sum(grad), and ``-p * (log p + H)`` of the entropy H."""
    if entropy is None:
        grad_rV = logits_rV.softmax(-1).mul_(-grad_rC.sum(dim=1, keepdim=True))
    else:
        entropy_r, grad_r = entropy
        log_p_rV = logits_rV.log_softmax(-1)
        slope_rV = (log_p_rV + entropy_r[:, None]).mul_(grad_r[:, None]).add_(grad_rC.sum(dim=1, keepdim=True))
        grad_rV = log_p_rV.exp_().mul_(slope_rV).neg_()
    return grad_rV.scatter_add_(1, ids_rC, grad_rC)
