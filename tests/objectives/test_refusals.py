"""What makes no sense is refused, with the value, the reason and the remedy."""

import warnings

import pytest

from asyncopd.errors import ConfigError
from asyncopd.objectives import DIVERGENCES, SURROGATES, ObjectiveConfig, build_objective
from asyncopd.objectives.resolution import parts
from asyncopd.objectives.traps import TRAPS
from asyncopd.rollout.sampling import SamplingConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"origin": "teacher"}, "use origin student"),
        ({"design": "gumbel(1)"}, "infinite variance"),
        ({"name": "jsd", "beta": 0.0}, "forward_kl"),
        ({"name": "jsd", "beta": 1.0}, "reverse_kl"),
        ({"name": "jsd", "beta": 1.5}, "0 < beta < 1"),
        ({"name": "skew_forward_kl", "alpha": 0.0}, "use forward_kl"),
        ({"name": "skew_reverse_kl", "alpha": 1.0}, "0 < alpha < 1"),
        ({"name": "mixed", "mix": 1.0}, "forward_kl for 1"),
        ({"name": "mixed", "origin": "student"}, "leave it at auto"),
        ({"design": "systematic(3)", "centring": "hajek"}, "under 4"),
        ({"design": "systematic(8)", "centring": "leave_one_out"}, "multi_sample"),
        ({"design": "multi_sample(1)", "centring": "leave_one_out"}, "multi_sample(2)"),
        ({"design": "top_k(8)", "centring": "hajek"}, "leave it at auto"),
        ({"design": "full", "centring": "mean"}, "leave it at auto"),
        ({"name": "forward_kl", "centring": "hajek"}, "leave it at auto"),
        ({"design": "two_phase(32,8)", "name": "forward_kl"}, "second phase"),
        ({"design": "two_phase_centred(32,8)", "origin": "teacher", "allow_unbounded": True}, "second phase"),
        ({"form": "bounded"}, "no linear term bounds it"),
        ({"truncate": 2.0}, "multi_sample(64)"),
        ({"truncate": 0.0, "design": "multi_sample(4)"}, "> 0"),
        ({"temperature": 0.0}, "> 0"),
        ({"reduction": "fixed_length"}, "set both or neither"),
        ({"fixed_length": 128}, "set both or neither"),
        ({"reduction": "fixed_length", "fixed_length": 0}, "at least 1"),
        ({"name": "reverse_k"}, "did you mean reverse_kl"),
        ({"design": "sistematic(4)"}, "did you mean systematic"),
        ({"origin": "both"}, "one of auto, student, teacher"),
        ({"origin": None}, "one of auto, student, teacher"),
        ({"centring": "median"}, "one of auto, none"),
        ({"form": "dense"}, "one of auto, bregman"),
        ({"reduction": "sum"}, "one of token_mean"),
        ({"name": "ppo_clip", "signal": "reward"}, "one of cached, recompute"),
        ({"name": "ppo_clip", "clip_low": 1.5}, "clip_low"),
        ({"name": "ppo_clip", "dual": 1.1}, "exceed 1 + clip_high"),
        ({"name": "decoupled", "cap": 0.0}, "positive"),
        ({"name": "second_moment", "budget": 0.0}, "positive"),
        ({"name": "icepop", "ratio_low": 2.0}, "ratio_low < 1"),
    ],
)
def test_a_config_that_cannot_work_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ObjectiveConfig(**fields)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize("name", TRAPS)
def test_a_known_trap_is_refused_by_name_with_what_to_use_instead(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        ObjectiveConfig(name=name)
    assert "use " in str(error.value)


PARAMETERS: dict[str, object] = {
    "beta": 0.3,
    "scaled": True,
    "alpha": 0.3,
    "mix": 0.3,
    "signal": "cached",
    "clip_low": 0.1,
    "clip_high": 0.1,
    "dual": 3.0,
    "cap": 2.0,
    "budget": 0.1,
    "ratio_low": 0.4,
    "ratio_high": 4.0,
}


@pytest.mark.parametrize("name", [*DIVERGENCES, *SURROGATES])
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_a_parameter_is_read_or_refused(name: str, parameter: str) -> None:
    reads = parameter in (DIVERGENCES | SURROGATES)[name].__slots__
    if reads:
        config = ObjectiveConfig(name=name, **{parameter: PARAMETERS[parameter]})  # type: ignore[arg-type]
        assert config != ObjectiveConfig(name=name)
    else:
        with pytest.raises(ConfigError, match=parameter):
            ObjectiveConfig(name=name, **{parameter: PARAMETERS[parameter]})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize(
    "fields",
    [{"design": "full"}, {"origin": "student"}, {"centring": "none"}, {"form": "plain"}, {"truncate": 1.0}],
    ids=lambda fields: next(iter(fields)),
)
def test_a_surrogate_refuses_what_only_candidates_have(name: str, fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="sampled tokens only"):
        ObjectiveConfig(name=name, **fields)  # type: ignore[arg-type]


def check(config: ObjectiveConfig, **sampling: float) -> None:
    """With answers sampled so, from 100 tokens."""
    how = SamplingConfig(**sampling)  # type: ignore[arg-type]
    config.validate_with_sampling(temperature=how.temperature, truncated=how.truncated, vocabulary=100)


OWN_TOKEN = [
    ObjectiveConfig(design="sampled"),
    ObjectiveConfig(design="multi_sample(8)"),
    ObjectiveConfig(design="head_tail(8,1)"),
    *[ObjectiveConfig(name=name) for name in SURROGATES],
]


@pytest.mark.parametrize("config", OWN_TOKEN, ids=lambda c: f"{c.name}-{c.design}")
@pytest.mark.parametrize(
    "change", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"min_new_tokens": 5}, {"temperature": 0.7}], ids=str
)
def test_designs_that_reuse_the_sampled_token_refuse_another_sampling_distribution(
    config: ObjectiveConfig, change: dict[str, float]
) -> None:
    check(config)
    with pytest.raises(ConfigError, match="systematic"):
        check(config, **change)


@pytest.mark.parametrize(
    "config",
    [
        ObjectiveConfig(),
        ObjectiveConfig(design="head_tail(8,8)"),
        ObjectiveConfig(name="forward_kl", design="multi_sample(8)"),
        ObjectiveConfig(design="full"),
    ],
    ids=lambda c: f"{c.name}-{c.design}",
)
def test_designs_that_draw_their_own_accept_any_sampling(config: ObjectiveConfig) -> None:
    check(config, top_p=0.9, temperature=0.7)


@pytest.mark.parametrize("design", ["top_k(101)", "top_k_tail(101)", "head_tail(101,4)"])
def test_a_head_larger_than_the_vocabulary_is_refused(design: str) -> None:
    with pytest.raises(ConfigError, match="100 tokens in the vocabulary"):
        check(ObjectiveConfig(design=design))


@pytest.mark.parametrize(
    "design", ["systematic(200)", "gumbel(200)", "multi_sample(200)", "two_phase(200,150)", "full"]
)
def test_a_budget_beyond_the_vocabulary_is_taken_where_it_can_be_drawn(design: str) -> None:
    check(ObjectiveConfig(design=design))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("student", "bregman", "hajek")]),
        ({"design": "systematic(3)"}, [("student", "bregman", "none")]),
        ({"design": "top_k(8)"}, [("student", "bregman", "none")]),
        ({"design": "full"}, [("teacher", "bregman", "none")]),
        ({"name": "forward_kl"}, [("teacher", "bounded", "none")]),
        ({"name": "forward_kl", "design": "top_k(8)"}, [("teacher", "bregman", "none")]),
        ({"name": "jsd"}, [("teacher", "bounded", "none")]),
        ({"name": "skew_reverse_kl"}, [("student", "bregman", "none")]),
        ({"name": "mixed"}, [("teacher", "bounded", "none"), ("student", "bregman", "hajek")]),
        ({"origin": "teacher", "allow_unbounded": True}, [("teacher", "bregman", "none")]),
    ],
)
def test_auto_chooses_origin_form_and_centring(fields: dict[str, object], expected: list[tuple[str, ...]]) -> None:
    config = ObjectiveConfig(**fields)  # type: ignore[arg-type]
    assert [(part.origin, part.form, part.centring) for _, part in parts(config)] == expected
    objective = build_objective(config)
    assert objective.origins == {origin for origin, _, _ in expected}
    assert set(objective.draws) == objective.origins


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "forward_kl", "origin": "student"}, "use origin teacher"),
        ({"design": "head_tail(8,1)"}, "several times the error"),
    ],
)
def test_what_works_but_is_poor_is_warned_about(fields: dict[str, object], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        build_objective(ObjectiveConfig(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*DIVERGENCES, *SURROGATES])
def test_the_defaults_of_every_objective_build_without_a_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build_objective(ObjectiveConfig(name=name)).config.name == name
