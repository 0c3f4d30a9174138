"""The fused head: an objective's loss and gradients from hidden states, one chunk of logits at a time.

Shape suffixes: T tokens, H hidden size, V head rows, C candidates a token, t tokens of one chunk.

Nothing of size [T, V] is ever held. For a token-local objective ``d loss / d log p`` is known as soon as a chunk's
logits are, so the gradients of hidden states and head weight are formed in the same pass: three matrix products, as
many as the dense path, and no recomputation (OBJECTIVES, section 5).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from teacher_cache.causal_head import logit_transform

ChunkLoss = Callable[[slice, Tensor], Tensor]
"""``loss(rows, log_p_tC)``: the scaled, summed loss (scalar) of the tokens ``rows`` of the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """How hidden states become the logprobs that the objective reads.

    vocabulary      real token ids; head rows beyond are padding and get no probability
    temperature     of the objective; divides the logits last
    logit_scale     multiplies the logits first (1 / ``logits_scaling`` of Granite)
    softcap         ``softcap * tanh(logits / softcap)`` after scaling (Gemma); None for no cap
    compute_dtype   of the matrix products; softmax and sums are float32 (float64 for float64)
    chunk_bytes     memory for one chunk's float32 logits, in bytes
    """

    vocabulary: int
    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    compute_dtype: torch.dtype = torch.float32
    chunk_bytes: int = 64 * 2**20

    @classmethod
    def of(
        cls, model: PretrainedConfig, *, vocabulary: int, temperature: float = 1.0, chunk_bytes: int = 64 * 2**20
    ) -> "HeadShape":
        """The shape for a model."""
        factor, softcap = logit_transform(model)
        return cls(
            vocabulary=vocabulary,
            temperature=temperature,
            logit_scale=factor,
            softcap=softcap,
            chunk_bytes=chunk_bytes,
        )

    def chunks(self, tokens: int, head_rows: int) -> list[slice]:
        """The chunks of ``tokens`` rows that keep within ``chunk_bytes``."""
        rows = max(1, self.chunk_bytes // (4 * head_rows))
        return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FusedLoss:
    """What one pass over the chunks gives.

    loss        scalar; its backward hands on gradients that are already computed
    entropy_T   detached student entropy (nats)
    """

    loss: Tensor
    entropy_T: Tensor


def _chunk_logprobs(
    hidden_tH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, shape: HeadShape
) -> tuple[Tensor, Tensor | None]:
    """Float32 (float64 for float64 weights) log-softmax [t, V] and, under a soft-cap, the cap's derivative."""
    logits_tV = hidden_tH @ weight_VH.T
    logits_tV = logits_tV if logits_tV.dtype == torch.float64 else logits_tV.float()
    if bias_V is not None:
        logits_tV += bias_V
    if shape.logit_scale != 1.0:
        logits_tV *= shape.logit_scale
    slope_tV = None
    if shape.softcap is not None:
        capped_tV = torch.tanh(logits_tV / shape.softcap)
        slope_tV = 1 - capped_tV * capped_tV
        logits_tV = capped_tV * shape.softcap
    if shape.temperature != 1.0:
        logits_tV /= shape.temperature
    if shape.vocabulary < logits_tV.shape[1]:
        logits_tV[:, shape.vocabulary :] = -torch.inf
    return logits_tV.sub_(logits_tV.logsumexp(dim=-1, keepdim=True)), slope_tV


def _entropy(log_p_tV: Tensor, p_tV: Tensor, vocabulary: int) -> Tensor:
    """Entropy (nats) [t]; the padding rows are left out because 0 * -inf is NaN."""
    return -torch.einsum("tv,tv->t", p_tV[:, :vocabulary], log_p_tV[:, :vocabulary])


def selected_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, ids_TC: Tensor, shape: HeadShape
) -> Tensor:
    """Logprobs (nats) [T, C] at ``ids_TC``, without gradient, chunk by chunk."""
    with torch.no_grad():
        weight, hidden = weight_VH.to(shape.compute_dtype), hidden_TH.to(shape.compute_dtype)
        accumulate = torch.float64 if shape.compute_dtype == torch.float64 else torch.float32
        log_p_TC = torch.empty(ids_TC.shape, dtype=accumulate, device=hidden.device)
        for rows in shape.chunks(len(hidden), len(weight)):
            log_p_TC[rows] = _chunk_logprobs(hidden[rows], weight, bias_V, shape)[0].gather(1, ids_TC[rows])
    return log_p_TC


class _FusedHead(torch.autograd.Function):
    """Forward computes loss and gradients; backward scales them by the incoming gradient."""

    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, bias_V, ids_TC, shape, chunk_loss):  # type: ignore[no-untyped-def]
        weight, hidden = weight_VH.to(shape.compute_dtype), hidden_TH.to(shape.compute_dtype)
        accumulate = torch.float64 if shape.compute_dtype == torch.float64 else torch.float32
        device, (wants_hidden, wants_weight, wants_bias) = hidden.device, ctx.needs_input_grad[:3]
        entropy_T = torch.empty(len(hidden), dtype=accumulate, device=device)
        grad_hidden = torch.empty_like(hidden_TH) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=accumulate, device=device) if wants_weight else None
        grad_bias = torch.zeros(len(weight), dtype=accumulate, device=device) if wants_bias else None
        loss = torch.zeros((), dtype=accumulate, device=device)
        for rows in shape.chunks(len(hidden), len(weight)):
            ids_tC = None if ids_TC is None else ids_TC[rows]
            log_p_tV, slope_tV = _chunk_logprobs(hidden[rows], weight, bias_V, shape)
            picked = log_p_tV[:, : shape.vocabulary] if ids_tC is None else log_p_tV.gather(1, ids_tC)
            log_p_tC = picked.detach().requires_grad_()
            with torch.enable_grad():
                chunk = chunk_loss(rows, log_p_tC)
                (grad_tC,) = torch.autograd.grad(chunk, log_p_tC)
            loss += chunk.detach()
            p_tV = log_p_tV.exp()
            entropy_T[rows] = _entropy(log_p_tV, p_tV, shape.vocabulary)
            grad_logits = _logit_gradient(p_tV, grad_tC, ids_tC, slope_tV, shape)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(shape.compute_dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_logits @ weight).to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.mark_non_differentiable(entropy_T)
        return loss, entropy_T

    @staticmethod
    def backward(ctx, grad_loss, _entropy):  # type: ignore[no-untyped-def]
        hidden, weight, bias = (None if grad is None else grad * grad_loss for grad in ctx.saved_tensors)
        return hidden, weight, bias, None, None, None


def _logit_gradient(
    p_tV: Tensor, grad_tC: Tensor, ids_tC: Tensor | None, slope_tV: Tensor | None, shape: HeadShape
) -> Tensor:
    """d loss / d raw logits: scatter(grad) - p * sum(grad), then temperature, cap and scale; reuses ``p_tV``."""
    grad_tV = p_tV.mul_(-grad_tC.sum(dim=1, keepdim=True))
    if ids_tC is None:
        grad_tV[:, : shape.vocabulary] += grad_tC
    else:
        grad_tV.scatter_add_(1, ids_tC, grad_tC)
    factor = shape.logit_scale / shape.temperature
    if slope_tV is not None:
        grad_tV *= slope_tV
    return grad_tV if factor == 1.0 else grad_tV.mul_(factor)


def fused_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids_TC: Tensor | None,
    shape: HeadShape,
    chunk_loss: ChunkLoss,
) -> FusedLoss:
    """Loss of a token-local objective over all tokens, with gradients for hidden states, weight and bias.

    ``ids_TC`` None means the whole real vocabulary (C = V), for the ``full`` design. ``chunk_loss`` must depend on
    ``log_p_tC`` token by token; it is called once for each chunk, under autograd, and not again in backward.
    """
    loss, entropy_T = _FusedHead.apply(hidden_TH, weight_VH, bias_V, ids_TC, shape, chunk_loss)
    return FusedLoss(loss=loss, entropy_T=entropy_T)
