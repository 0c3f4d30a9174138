"""Normalisation of logits, against float64."""

import pytest
import torch

from teacher_cache.logit_rows import normalised


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("offset", [0.0, 40.0, -40.0])
def test_float32_normalisation_is_within_1e_5_of_float64(temperature: float, spread: float, offset: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50_000) * spread + offset
    expected = torch.log_softmax(logits.double() / temperature, dim=-1)
    rows = normalised(logits, temperature)
    likely = expected > -30
    torch.testing.assert_close(rows.all().double()[likely], expected[likely], atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.entropy().double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=1e-6)
    ids = expected.topk(5).indices
    torch.testing.assert_close(rows.at(ids).double(), expected.gather(1, ids), atol=1e-5, rtol=0)


def test_a_row_without_finite_logits_gives_nan_and_leaves_the_others() -> None:
    logits = torch.randn(2, 10)
    logits[0, 3] = torch.nan
    log_q = normalised(logits, 1.0).all()
    assert log_q[0].isnan().all()
    torch.testing.assert_close(log_q[1], torch.log_softmax(logits[1], dim=-1))
