"""The sampling distribution and the draw from it, against plain float64 arithmetic."""

import math

import pytest
import torch

from asyncopd.errors import ConfigError
from asyncopd.rollout.sampling import SamplingConfig, draw_tokens, sampling_logprobs, token_uniforms

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0], [0.0, 0.1, 0.2, 0.3, 0.4, 5.0]])
NONE_YET = torch.zeros(2, dtype=torch.int64)


def probabilities(**settings: float) -> torch.Tensor:
    sampling = SamplingConfig(**settings)
    return sampling_logprobs(LOGITS, sampling, generated_B=NONE_YET, end_ids=(5,)).double().exp()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_plain_sampling_is_the_softmax_at_the_temperature(temperature: float) -> None:
    expected = torch.softmax(LOGITS.double() / temperature, dim=-1)
    torch.testing.assert_close(probabilities(temperature=temperature), expected, atol=1e-6, rtol=0)


def test_top_k_keeps_the_k_most_likely_and_renormalises() -> None:
    expected = torch.softmax(LOGITS[0, :2].double(), dim=-1)
    torch.testing.assert_close(
        probabilities(top_k=2)[0], torch.cat([expected, torch.zeros(4).double()]), atol=1e-6, rtol=0
    )


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    plain = torch.softmax(LOGITS[0].double(), dim=-1)
    mass = float(plain[:3].sum())
    assert (probabilities(top_p=mass - 1e-3)[0] > 0).tolist() == [True] * 3 + [False] * 3
    assert (probabilities(top_p=mass + 1e-3)[0] > 0).tolist() == [True] * 4 + [False] * 2


def test_top_p_always_keeps_the_most_likely_token() -> None:
    torch.testing.assert_close(probabilities(top_p=1e-6).max(dim=-1).values, torch.ones(2).double())


def test_min_p_keeps_tokens_near_the_most_likely_one() -> None:
    plain = torch.softmax(LOGITS[0].double(), dim=-1)
    assert (probabilities(min_p=0.2)[0] > 0).tolist() == (plain >= 0.2 * plain.max()).tolist()


def test_no_answer_ends_before_min_new_tokens() -> None:
    sampling = SamplingConfig(min_new_tokens=3)
    log_b = sampling_logprobs(LOGITS, sampling, generated_B=torch.tensor([2, 3]), end_ids=(5,))
    assert log_b[0, 5] == -math.inf
    torch.testing.assert_close(log_b[1], torch.log_softmax(LOGITS[1], dim=-1))
    torch.testing.assert_close(log_b.exp().sum(-1), torch.ones(2))


def test_without_an_end_there_is_nothing_to_ban() -> None:
    log_b = sampling_logprobs(LOGITS, SamplingConfig(min_new_tokens=3), generated_B=NONE_YET, end_ids=())
    torch.testing.assert_close(log_b, torch.log_softmax(LOGITS, dim=-1))


def test_the_logits_are_left_alone() -> None:
    before = LOGITS.clone()
    probabilities(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1, min_new_tokens=1)
    assert torch.equal(LOGITS, before)


def test_a_token_is_where_the_cumulative_mass_passes_the_uniform() -> None:
    mass = torch.tensor([[0.2, 0.0, 0.3, 0.5]])
    for uniform, token in ((1e-9, 0), (0.19, 0), (0.21, 2), (0.49, 2), (0.51, 3), (1 - 1e-16, 3)):
        assert draw_tokens(mass.log(), torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_draws_follow_the_distribution() -> None:
    torch.manual_seed(0)
    log_b = torch.log_softmax(torch.randn(1, 300), dim=-1)
    uniforms = token_uniforms(7, [f"u{index}" for index in range(20_000)], [3] * 20_000)
    tokens = draw_tokens(log_b.expand(20_000, -1), uniforms)
    expected = log_b[0].double().exp() * 20_000
    observed = torch.bincount(tokens, minlength=300)
    chi2 = ((observed - expected) ** 2 / expected).sum().item()
    assert chi2 < 299 + 5 * math.sqrt(2 * 299)


def test_the_uniform_depends_on_seed_uid_and_position_only() -> None:
    both = token_uniforms(1, ["a", "b"], [0, 4])
    assert both[1] == token_uniforms(1, ["b"], [4])[0]
    assert len({*both.tolist(), *token_uniforms(2, ["a"], [0]).tolist(), *token_uniforms(1, ["a"], [1]).tolist()}) == 4


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"min_new_tokens": 1}], ids=lambda s: next(iter(s))
)
def test_whatever_takes_mass_from_a_token_counts_as_truncated(settings: dict[str, float]) -> None:
    assert SamplingConfig(**settings).truncated
    assert not SamplingConfig(temperature=0.7).truncated


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"max_new_tokens": 0},
        {"min_new_tokens": 9, "max_new_tokens": 8},
        {"stop_token_ids": (-1,)},
    ],
    ids=str,
)
def test_a_wrong_setting_is_named_with_its_value(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"sampling\.{next(iter(settings))} is .*expected"):
        SamplingConfig(**settings)
