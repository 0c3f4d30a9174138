"""Logprobs at chosen tokens and their gradients are those of the dense path, for losses that no chunk knows alone."""

from itertools import product

import pytest
import torch
from torch import Tensor

from asyncopd.learner.head import HeadShape, fused_loss
from asyncopd.learner.selected import selected_logprobs

TOKENS, HIDDEN, ROWS, REAL, CHOSEN = 11, 6, 23, 19, 4


@pytest.fixture(autouse=True)
def blocks_of_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that borders of blocks are crossed."""
    monkeypatch.setattr("asyncopd.learner.head_chunks.BLOCK_BYTES", REAL * 8 * 2)


def _inputs(bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(ROWS, generator=generator, dtype=torch.float64, requires_grad=True) if bias else None
    ids = torch.randint(REAL, (TOKENS, CHOSEN), generator=generator)
    ids[:, 1] = ids[:, 0]
    return hidden, weight, offset, ids


def _shape(softcap: float | None, scale: float, temperature: float) -> HeadShape:
    return HeadShape(
        vocabulary=REAL,
        compute_dtype=torch.float64,
        chunk_bytes=REAL * 8 * 5,
        softcap=softcap,
        logit_scale=scale,
        temperature=temperature,
    )


def _dense(hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: HeadShape) -> Tensor:
    """Log-softmax over the real vocabulary [T, V]."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits * shape.logit_scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    return (logits / shape.temperature)[:, :REAL].log_softmax(-1)


def _step_loss(log_p_TC: Tensor, entropy_T: Tensor) -> Tensor:
    """Not token-local: every term depends on all tokens."""
    return log_p_TC.mean().exp() * (log_p_TC.square().sum() + entropy_T.sum().tanh())


SHAPES = list(product([False, True], [None, 2.0], [1.0, 0.25], [1.0, 0.7]))


@pytest.mark.parametrize(("bias", "softcap", "scale", "temperature"), SHAPES)
def test_values_and_gradients_equal_the_dense_path(
    bias: bool, softcap: float | None, scale: float, temperature: float
) -> None:
    hidden, weight, offset, ids = _inputs(bias)
    shape = _shape(softcap, scale, temperature)
    inputs = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    log_p = _dense(hidden, weight, offset, shape)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ours = selected_logprobs(hidden, weight, offset, ids, shape, entropy=True, top=3)
    assert ours.entropy_T is not None
    torch.testing.assert_close(ours.log_p_TC, log_p.gather(1, ids), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(ours.entropy_T, entropy, atol=1e-12, rtol=1e-12)
    top = log_p.topk(3)
    assert torch.equal(ours.top_ids_TK, top.indices)
    torch.testing.assert_close(ours.top_log_p_TK, top.values, atol=1e-12, rtol=1e-12)
    expected = torch.autograd.grad(_step_loss(log_p.gather(1, ids), entropy), inputs)
    found = torch.autograd.grad(_step_loss(ours.log_p_TC, ours.entropy_T), inputs)
    for ours_grad, dense_grad in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_grad, dense_grad, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(("bias", "softcap", "scale", "temperature"), SHAPES)
def test_gradcheck_in_float64(bias: bool, softcap: float | None, scale: float, temperature: float) -> None:
    hidden, weight, offset, ids = _inputs(bias)
    shape = _shape(softcap, scale, temperature)

    def both(hidden: Tensor, weight: Tensor, *offsets: Tensor) -> tuple[Tensor, Tensor]:
        found = selected_logprobs(hidden, weight, *offsets or (None,), ids, shape, entropy=True)
        assert found.entropy_T is not None
        return found.log_p_TC, found.entropy_T

    offsets = () if offset is None else (offset,)
    assert torch.autograd.gradcheck(both, (hidden, weight, *offsets), fast_mode=True)


def test_a_token_local_loss_has_the_gradients_of_the_fused_form() -> None:
    hidden, weight, offset, ids = _inputs(bias=True)
    shape = _shape(None, 1.0, 1.0)

    def loss(log_p: Tensor) -> Tensor:
        return (log_p.exp() * (log_p + 0.3)).sum()

    inputs = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    recomputed = torch.autograd.grad(loss(selected_logprobs(hidden, weight, offset, ids, shape).log_p_TC), inputs)
    fused = fused_loss(hidden, weight, offset, ids, shape, lambda _, log_p: loss(log_p))
    for ours, theirs in zip(recomputed, torch.autograd.grad(fused.loss, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_without_tokens_gradients_are_zero_and_there_is_a_graph() -> None:
    _, weight, _, ids = _inputs(bias=False)
    hidden = torch.empty(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    selected_logprobs(hidden, weight, None, ids[:0], _shape(None, 1.0, 1.0)).log_p_TC.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum().item() == 0
