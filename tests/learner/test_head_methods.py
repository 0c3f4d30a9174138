"""What the head benchmark compares is one computation: every method has the loss and gradients of float64."""

import pytest
import torch

from tests.benchmarks.head import Case, loss_of, make_inputs, objective


@pytest.mark.parametrize("method", ["fused", "dense", "chunked_8"])
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("bf16", 0.02)])
def test_every_method_of_the_benchmark_has_the_gradients_of_float64(method: str, dtype: str, bound: float) -> None:
    inputs = make_inputs(Case(tokens=33, hidden=64, vocab=97, k=5, dtype=dtype))
    hidden, weight = (t.detach().double().requires_grad_() for t in (inputs.hidden, inputs.weight))
    log_p = (hidden @ weight.T).log_softmax(-1).gather(1, inputs.ids)
    expected = torch.autograd.grad(objective(log_p, inputs.log_q.double(), inputs.w.double()), (hidden, weight))
    loss_of(method)(inputs).backward()
    for found, exact in zip((inputs.hidden.grad, inputs.weight.grad), expected, strict=True):
        assert found is not None
        assert (found - exact).norm() / exact.norm() < bound
