"""From plain fields to the objective they name, and what they may not say."""

import math
from dataclasses import asdict, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, get_args

import torch

from asyncopd.errors import ConfigError
from asyncopd.objectives.divergences import DIVERGENCES, Divergence, Mixed
from asyncopd.objectives.parts import resolve_part
from asyncopd.objectives.policy_gradients import SURROGATES, Surrogate
from asyncopd.objectives.sparse import SparseDivergence
from asyncopd.objectives.traps import TRAPS
from teacher_cache.designs import SupportDesign, parse_design
from teacher_cache.errors import DesignError
from teacher_cache.noise import noise_for

if TYPE_CHECKING:
    from asyncopd.objectives.config import ObjectiveConfig

_OF_ALL = {"name", "temperature", "reduction", "fixed_length"}
_OF_DIVERGENCES = {"design", "origin", "form", "centring", "truncate", "allow_unbounded", "temperature_squared"}


def surrogate(config: "ObjectiveConfig") -> Surrogate:
    """The policy-gradient surrogate that the name and its parameters make."""
    return SURROGATES[config.name](**_parameters(config, SURROGATES[config.name]))


def divergence(config: "ObjectiveConfig") -> Divergence | Mixed:
    """The divergence that the name and its parameters make."""
    return DIVERGENCES[config.name](**_parameters(config, DIVERGENCES[config.name]))


def parts(config: "ObjectiveConfig") -> tuple[tuple[float, SparseDivergence], ...]:
    """Share and estimator of each part of a divergence, every ``auto`` resolved; none for a surrogate."""
    if config.name in SURROGATES:
        return ()
    whole, design = divergence(config), support(config)
    mixed = isinstance(whole, Mixed)
    return tuple(
        (
            share,
            resolve_part(
                part,
                design,
                origin=config.origin,
                form=config.form,
                centring="auto" if mixed and part.name != "reverse_kl" else config.centring,
                truncate=None if mixed and part.origin == "teacher" else config.truncate,
                allow_unbounded=config.allow_unbounded,
            ),
        )
        for share, part in (whole.parts if isinstance(whole, Mixed) else ((1.0, whole),))
    )


def support(config: "ObjectiveConfig") -> SupportDesign:
    """The parsed design; its errors become ConfigError."""
    try:
        return parse_design(config.design)
    except DesignError as error:
        raise ConfigError(str(error)) from error


def check(config: "ObjectiveConfig") -> None:
    """Refuse what makes no sense, as far as the fields alone can tell."""
    kinds = DIVERGENCES | SURROGATES
    if config.name in TRAPS:
        raise ConfigError(f"{config.name} as a loss: {TRAPS[config.name]}")
    if config.name not in kinds:
        near = get_close_matches(config.name, kinds, n=1, cutoff=0.0)[0]
        raise ConfigError(f"no objective {config.name!r}; did you mean {near}? There are {', '.join(sorted(kinds))}")
    _check_choices(config)
    _check_unread(config)
    if config.temperature <= 0.0:
        raise ConfigError(f"temperature is {config.temperature}; both models' logits are divided by it: it must be > 0")
    if (config.reduction == "fixed_length") != (config.fixed_length is not None):
        raise ConfigError(
            f"reduction {config.reduction} with fixed_length {config.fixed_length}; set both or neither: "
            "the loss is then divided by sequences x fixed_length"
        )
    if config.fixed_length is not None and config.fixed_length < 1:
        raise ConfigError(f"fixed_length is {config.fixed_length}; give a number of tokens, at least 1")
    if config.truncate is not None and config.truncate <= 0.0:
        raise ConfigError(f"truncate is {config.truncate}; it caps p/g, so it must be > 0, for example 4")
    if config.name == "mixed" and config.origin != "auto":
        raise ConfigError(f"origin {config.origin} with mixed; it draws one set from each: leave it at auto")
    if config.name in SURROGATES:
        surrogate(config)
    parts(config)


def check_sampling(config: "ObjectiveConfig", *, temperature: float, truncated: bool, vocabulary: int) -> None:
    """Refuse what does not fit the sampling of tokens or the vocabulary."""
    if config.name in SURROGATES:
        reader: str | None = config.name
    else:
        design = support(config)
        reuses = any(part.origin == "student" and design.reuses_sampled_token for _, part in parts(config))
        reader = design.spec if reuses else None
        _draw_once(design, vocabulary)
    if reader is None:
        return
    remedy = "or use a design that draws its own candidates, such as systematic(16)"
    if truncated:
        raise ConfigError(
            f"{reader} reads the sampled token, but sampling is truncated (top_p, top_k, min_p or min_new_tokens), so "
            "the token is not drawn from the student's softmax: sample with top_p 1, top_k 0, min_p 0 and "
            f"min_new_tokens 0, {remedy}"
        )
    if temperature != config.temperature:
        raise ConfigError(
            f"{reader} reads the sampled token, but sampling is at temperature {temperature} and the objective at "
            f"{config.temperature}: make them equal, {remedy}"
        )


def _draw_once(design: SupportDesign, vocabulary: int) -> None:
    """A design that cannot draw from so many tokens says so now, and not in the first rollout worker."""
    even_V = torch.full((1, vocabulary), -math.log(vocabulary))
    try:
        design.draw(even_V, noise_for(0, [("check", 0)], "candidates"), torch.zeros(1, dtype=torch.int64))
    except DesignError as error:
        raise ConfigError(f"{error}, or full") from error


def _check_choices(config: "ObjectiveConfig") -> None:
    """Each choice is one of its literals, whoever built the config."""
    values = asdict(config)
    for field in fields(config):
        kinds = (field.type, *get_args(field.type))
        allowed = dict.fromkeys(choice for kind in kinds for choice in get_args(kind) if isinstance(choice, str))
        value = values[field.name]
        if allowed and value not in allowed and not (value is None and type(None) in kinds):
            raise ConfigError(f"{field.name} is {value!r}; it is one of {', '.join(allowed)}")


def _check_unread(config: "ObjectiveConfig") -> None:
    """A field that the objective does not read stays at its default."""
    surrogate, values = config.name in SURROGATES, asdict(config)
    read = _OF_ALL | {field.name for field in fields((DIVERGENCES | SURROGATES)[config.name])}
    read |= set() if surrogate else _OF_DIVERGENCES
    for field in fields(config):
        value = values[field.name]
        if field.name not in read and value != field.default:
            why = "it reads the sampled tokens only" if field.name in _OF_DIVERGENCES else "it has no such parameter"
            raise ConfigError(f"{field.name} is {value!r}, which {config.name} does not read ({why}): leave it out")


def _parameters(config: "ObjectiveConfig", kind: type) -> dict[str, object]:
    """The fields of the config that are parameters of ``kind`` and are set."""
    known = {field.name for field in fields(kind)}
    return {name: value for name, value in asdict(config).items() if name in known and value is not None}
