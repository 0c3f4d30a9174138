"""The fused head: an objective's loss and gradients from hidden states, one chunk of logits at a time.

Shape suffixes: T tokens, H hidden size, R head rows, V real vocabulary, C candidates a token, t tokens of one chunk,
r tokens of one block.

Nothing of size [T, V] is ever held. For a token-local objective ``d loss / d log p`` is known as soon as a chunk's
logits are, so the gradients of hidden states and head weight are formed in the same pass: three matrix products, as
many as the dense path, and no recomputation (OBJECTIVES, section 5). ``selected.py`` has the general form.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncopd.learner.head_chunks import HeadChunks, HeadGradients, HeadShape, log_normaliser

__all__ = ["FusedLoss", "HeadShape", "fused_loss"]

EXACT_ABOVE = 1e-30
"""Probabilities whose float32 value is not denormal: their logarithm is a logprob."""
ChunkLoss = Callable[[slice, Tensor], Tensor]
"""``loss(rows, log_p_tC)``: the scaled, summed loss (scalar) of the tokens ``rows`` of the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FusedLoss:
    """What one pass over the chunks gives.

    loss        scalar; its backward hands on gradients that are already computed
    entropy_T   detached student entropy (nats); None where it was not asked for
    """

    loss: Tensor
    entropy_T: Tensor | None


class _FusedHead(torch.autograd.Function):
    """Forward computes loss and gradients; backward scales them by the incoming gradient."""

    @staticmethod
    def forward(ctx, hidden_TH, weight_RH, bias_R, ids_TC, shape, chunk_loss, entropy):  # type: ignore[no-untyped-def]
        chunks = HeadChunks(hidden_TH, weight_RH, bias_R, shape, dense=ids_TC is None)
        gradients = HeadGradients(chunks, hidden_TH, weight_RH, ctx.needs_input_grad[:3])
        loss = torch.zeros((), dtype=shape.sum_dtype, device=hidden_TH.device)
        entropy_T = loss.new_empty(len(hidden_TH)) if entropy else None
        for rows, logits_tV in chunks:
            ids_tC = None if ids_TC is None else ids_TC[rows]
            picked = _softmax(chunks, logits_tV, ids_tC, None if entropy_T is None else entropy_T[rows])
            log_p_tC = picked.requires_grad_()
            with torch.enable_grad():
                chunk = chunk_loss(rows, log_p_tC)
                (grad_tC,) = torch.autograd.grad(chunk, log_p_tC)
            loss += chunk.detach()
            _logit_gradient(chunks, logits_tV, grad_tC, ids_tC)
            gradients.add(rows, logits_tV)
        ctx.save_for_backward(gradients.hidden_TH, gradients.weight_RH, gradients.bias_R)
        if entropy_T is not None:
            ctx.mark_non_differentiable(entropy_T)
        return loss, entropy_T

    @staticmethod
    def backward(ctx, grad_loss, _entropy):  # type: ignore[no-untyped-def]
        gradients = ctx.saved_tensors
        # Nearly always; a product would hold the largest gradient twice.
        if grad_loss.item() != 1.0:
            gradients = [None if grad is None else grad * grad_loss for grad in gradients]
        return *gradients, None, None, None, None


def _softmax(chunks: HeadChunks, logits_tV: Tensor, ids_tC: Tensor | None, entropy_t: Tensor | None) -> Tensor:
    """Logprobs [t, C] at the ids (None: everywhere); the chunk's logits become probabilities in place."""
    width = logits_tV.shape[1] if ids_tC is None else ids_tC.shape[1]
    log_p_tC = torch.empty(len(logits_tV), width, dtype=chunks.shape.sum_dtype, device=logits_tV.device)
    for block in chunks.blocks(len(logits_tV)):
        logits_rV = chunks.transformed(logits_tV[block], block)
        p_rV = logits_rV.softmax(-1)
        if ids_tC is None:
            torch.sub(logits_rV, log_normaliser(logits_rV, p_rV), out=log_p_tC[block])
        else:
            log_p_tC[block] = _picked(logits_rV, p_rV, ids_tC[block])
        if entropy_t is not None:
            first_r = logits_rV[:, 0] if ids_tC is None else logits_rV.gather(1, ids_tC[block, :1])[:, 0]
            entropy_t[block] = first_r - log_p_tC[block, 0] - logits_rV.mul_(p_rV).sum(-1)
        logits_tV[block] = p_rV
    return log_p_tC


def _picked(logits_rV: Tensor, p_rV: Tensor, ids_rC: Tensor) -> Tensor:
    """Logprobs [r, C] at the ids."""
    p_rC = p_rV.gather(1, ids_rC)
    # Two passes over the logits fewer; elsewhere than on a CPU the question would cost more than they do.
    if p_rC.device.type == "cpu" and bool((p_rC > EXACT_ABOVE).all()):
        return p_rC.log_()
    return logits_rV.gather(1, ids_rC) - log_normaliser(logits_rV, p_rV)


def _logit_gradient(chunks: HeadChunks, p_tV: Tensor, grad_tC: Tensor, ids_tC: Tensor | None) -> None:
    """d loss / d raw logits in place of the probabilities: scatter(grad) - p * sum(grad), through the transform."""
    total_t1 = -grad_tC.sum(dim=1, keepdim=True)
    for block in chunks.blocks(len(p_tV)):
        grad_rV = p_tV[block].to(grad_tC.dtype).mul_(total_t1[block])
        if ids_tC is None:
            grad_rV += grad_tC[block]
        else:
            grad_rV.scatter_add_(1, ids_tC[block], grad_tC[block])
        grad_rV = chunks.through_transform(grad_rV, block)
        if p_tV.dtype != grad_rV.dtype:
            p_tV[block] = grad_rV


def fused_loss(
    hidden_TH: Tensor,
    weight_RH: Tensor,
    bias_R: Tensor | None,
    ids_TC: Tensor | None,
    shape: HeadShape,
    chunk_loss: ChunkLoss,
    *,
    entropy: bool = False,
) -> FusedLoss:
    """Loss of a token-local objective over all tokens, with gradients for hidden states, weight and bias.

    ``ids_TC`` None means the whole real vocabulary (C = V), for the ``full`` design. ``chunk_loss`` must depend on
    ``log_p_tC`` token by token; it is called once for each chunk, under autograd, and not again in backward.
    """
    loss, entropy_T = _FusedHead.apply(hidden_TH, weight_RH, bias_R, ids_TC, shape, chunk_loss, entropy)
    return FusedLoss(loss=loss, entropy_T=entropy_T)
