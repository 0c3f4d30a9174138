"""The seam of policy-gradient surrogates: losses on the rollout's own tokens.

Shape suffixes: T tokens.

They need the tokens to be drawn from the student's softmax at the objective's temperature, untruncated.
"""

from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from asyncopd.errors import ConfigError
from asyncopd.objectives.tokens import Tokens

Signal = Literal["cached", "recompute"]
"""``cached``: ``log q - log b``, fixed when the token was drawn. ``recompute``: ``log q - log p``, of now."""


class Surrogate(Protocol):
    """A policy-gradient loss."""

    @property
    def name(self) -> str:
        """Its key in the registry."""

    @property
    def needs_step_pass(self) -> bool:
        """Whether it is a ``StepSurrogate``."""

    def losses(self, tokens: Tokens, value_T: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [T] and detached metrics [T]; ``value_T`` is what ``over_step`` says of these tokens, or None."""


@runtime_checkable
class StepSurrogate(Surrogate, Protocol):
    """One that must know of the whole optimizer step before it can give a token's loss."""

    def step_value(self, tokens: Tokens) -> Tensor:
        """One detached number a token [T], which depends on that token alone."""

    def over_step(self, value_T: Tensor, sequence_T: Tensor) -> Tensor:
        """From the numbers of all tokens of the step and their sequences, the one that ``losses`` takes [T]."""


def advantage(signal: Signal, tokens: Tokens) -> Tensor:
    """The detached signal A [T], nats: how much more the teacher likes the token than the student does (or did)."""
    return (tokens.log_q_T - (tokens.log_b_T if signal == "cached" else tokens.log_p_T)).detach()


def ratio(tokens: Tokens) -> Tensor:
    """``r = p/b`` [T], with gradient."""
    return (tokens.log_p_T - tokens.log_b_T).exp()


def clipped_surrogate(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``-min(r*A, clip(r, 1-low, 1+high)*A)`` [T], and where the clip bit (no gradient there)."""
    free_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(1.0 - low, 1.0 + high) * advantage_T
    return -torch.minimum(free_T, clipped_T), (clipped_T < free_T).detach()


def require_step_value(name: str, value_T: Tensor | None) -> Tensor:
    """The step value; ConfigError where the step pass was left out."""
    if value_T is None:
        raise ConfigError(f"{name} needs the context of the whole optimizer step; call step_context first")
    return value_T


def require_clip(name: str, low: float, high: float) -> None:
    """ConfigError unless ``0 <= low <= 1`` and ``high >= 0``."""
    if not (0.0 <= low <= 1.0 and high >= 0.0):
        raise ConfigError(
            f"{name} has clip_low {low} and clip_high {high}; the ratio is clipped to [1 - clip_low, 1 + clip_high], "
            "so 0 <= clip_low <= 1 and clip_high >= 0, for example 0.2 and 0.2"
        )


def require_signal(name: str, signal: str) -> None:
    """ConfigError unless the signal is one of the two."""
    if signal not in ("cached", "recompute"):
        raise ConfigError(
            f"{name} has signal {signal!r}; it is 'cached' (log q - log b) or 'recompute' (log q - log p)"
        )
