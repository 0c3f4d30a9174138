"""The fused head gives the loss and the gradients of the dense path, whatever the head does to its logits."""

from itertools import product

import pytest
import torch
from torch import Tensor

from asyncopd.learner.head import HeadShape, fused_loss

TOKENS, HIDDEN, ROWS, REAL, CANDIDATES = 11, 6, 23, 19, 4


@pytest.fixture(autouse=True)
def blocks_of_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that borders of blocks are crossed too."""
    monkeypatch.setattr("asyncopd.learner.head_chunks.BLOCK_BYTES", REAL * 8 * 2)


def _shape(**changes: object) -> HeadShape:
    # Chunks of five tokens, fewer where a row needs more, so that borders of chunks are crossed.
    return HeadShape(vocabulary=REAL, compute_dtype=torch.float64, chunk_bytes=REAL * 8 * 5, **changes)  # type: ignore[arg-type]


def _inputs(bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(ROWS, generator=generator, dtype=torch.float64, requires_grad=True) if bias else None
    ids = torch.randint(REAL, (TOKENS, CANDIDATES), generator=generator)
    ids[:, 1] = ids[:, 0]  # a duplicate keeps its multiplicity
    weights = torch.rand(TOKENS, REAL, generator=generator, dtype=torch.float64)
    return hidden, weight, offset, ids, weights


def _dense_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: HeadShape) -> Tensor:
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * shape.logit_scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    return (logits / shape.temperature)[:, :REAL].log_softmax(-1)


def _nonlinear(log_p: Tensor, weights: Tensor) -> Tensor:
    return (weights * log_p.exp() * (log_p + 0.3)).sum()


@pytest.mark.parametrize(
    ("bias", "softcap", "scale", "temperature", "dense"),
    [
        *product([False, True], [None, 2.0], [1.0, 0.25], [1.0, 0.7], [False]),
        (True, 2.0, 0.25, 0.7, True),
        (False, None, 1.0, 1.0, True),
    ],
)
def test_fused_loss_and_gradients_equal_the_dense_path(
    bias: bool, softcap: float | None, scale: float, temperature: float, dense: bool
) -> None:
    hidden, weight, offset, ids, weights = _inputs(bias)
    shape = _shape(softcap=softcap, logit_scale=scale, temperature=temperature)
    inputs = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    log_p = _dense_logprobs(hidden, weight, offset, shape)
    picked = log_p if dense else log_p.gather(1, ids)
    expected = _nonlinear(picked, weights[:, : picked.shape[1]])
    expected_grads = torch.autograd.grad(expected * 3, inputs)
    fused = fused_loss(
        hidden,
        weight,
        offset,
        None if dense else ids,
        shape,
        lambda rows, log_p_tC: _nonlinear(log_p_tC, weights[rows, : log_p_tC.shape[1]]),
        entropy=True,
    )
    grads = torch.autograd.grad(fused.loss * 3, inputs)
    torch.testing.assert_close(fused.loss, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(fused.entropy_T, -(log_p.exp() * log_p).sum(-1), atol=1e-12, rtol=1e-12)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_gradcheck_of_the_fused_head_in_float64() -> None:
    hidden, weight, offset, ids, weights = _inputs(bias=True)
    shape = _shape(softcap=3.0, logit_scale=0.5, temperature=1.3)

    def loss(hidden: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
        return fused_loss(
            hidden, weight, offset, ids, shape, lambda rows, log_p: _nonlinear(log_p, weights[rows, :CANDIDATES])
        ).loss

    assert torch.autograd.gradcheck(loss, (hidden, weight, offset))


def test_a_candidate_that_the_student_all_but_rules_out_has_its_exact_logprob() -> None:
    """Its probability is below the smallest float32."""
    hidden = torch.tensor([[1.0], [0.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [-150.0], [-1.0]], requires_grad=True)
    seen: list[Tensor] = []

    def loss(rows: slice, log_p: Tensor) -> Tensor:
        seen.append(log_p.detach())
        return log_p.sum()

    ids = torch.tensor([[1, 0], [1, 0]])
    fused_loss(hidden, weight, None, ids, HeadShape(vocabulary=3), loss).loss.backward()
    expected = (hidden @ weight.T).log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(torch.cat(seen), expected.detach(), atol=1e-6, rtol=1e-6)
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


def test_padded_head_rows_change_nothing() -> None:
    hidden, weight, _, ids, weights = _inputs(bias=False)
    wider = torch.cat([weight.detach(), torch.full((7, HIDDEN), 50.0, dtype=torch.float64)]).requires_grad_()

    def run(rows_VH: Tensor) -> tuple[Tensor, Tensor]:
        fused = fused_loss(
            hidden, rows_VH, None, ids, _shape(), lambda rows, log_p: _nonlinear(log_p, weights[rows, :CANDIDATES])
        )
        return fused.loss, torch.autograd.grad(fused.loss, rows_VH)[0][:REAL]

    for narrow, wide in zip(run(weight), run(wider), strict=True):
        torch.testing.assert_close(narrow, wide, atol=1e-12, rtol=1e-12)


def test_no_tokens_give_a_zero_loss_with_a_graph() -> None:
    _, weight, _, ids, _ = _inputs(bias=False)
    hidden = torch.empty(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    fused = fused_loss(hidden, weight, None, ids[:0], _shape(), lambda rows, log_p: log_p.sum())
    fused.loss.backward()
    assert fused.loss.item() == 0
    assert weight.grad is not None
    assert weight.grad.abs().sum().item() == 0


def test_bf16_products_stay_within_two_percent_of_float64_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(64, 128, generator=generator, requires_grad=True)
    weight = (torch.randn(512, 128, generator=generator) / 11).requires_grad_()
    ids = torch.randint(512, (64, 8), generator=generator)

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        shape = HeadShape(vocabulary=512, compute_dtype=dtype)
        fused = fused_loss(hidden, weight, None, ids, shape, lambda rows, log_p: (log_p.exp() * log_p).sum())
        return [g.double() for g in torch.autograd.grad(fused.loss, (hidden, weight))]

    for rough, exact in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert (rough - exact).norm() / exact.norm() < 0.02
