"""What is audited: a loss, what it claims to estimate, and how its candidates are drawn.

Shape suffixes: T positions, C candidates, V columns of a language-model head (real ids first, then padding).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncopd.audit.targets import TARGETS, Target
from asyncopd.errors import ConfigError
from teacher_cache.record import Origin


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """Candidates: ids, log weights (-inf: empty slot), teacher logprobs (NaN: no score), each [T, C]."""

    ids_TC: Tensor
    log_w_TC: Tensor
    log_q_TC: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AuditBatch:
    """The tokens of one micro-batch, as a loss under audit gets them.

    logits_TV       student logits, the only tensor with gradient; columns from ``vocabulary`` on are padding
    teacher_TV      teacher logits; its padded width may differ
    behaviour_TV    logits of the policy that the tokens (and student-drawn candidates) were drawn from
    vocabulary      number of real token ids
    token_T         the rollout's own tokens
    mask_T          False where a token must not count
    sequence_T      which sequence each token belongs to; positions of a sequence are adjacent and in order
    sets            candidates by origin; a loss from elsewhere gets one set, and reads ``ids_TC`` and the like
    step_tokens     valid tokens of the whole optimizer step, of which this is one micro-batch
    """

    logits_TV: Tensor
    teacher_TV: Tensor
    behaviour_TV: Tensor
    vocabulary: int
    token_T: Tensor
    mask_T: Tensor
    sequence_T: Tensor
    sets: Mapping[Origin, Drawn]
    step_tokens: int

    @property
    def ids_TC(self) -> Tensor:
        """Candidate ids of the only set."""
        return self._only.ids_TC

    @property
    def log_w_TC(self) -> Tensor:
        """Log weights of the only set; -inf is an empty slot, whose other entries mean nothing."""
        return self._only.log_w_TC

    @property
    def log_q_TC(self) -> Tensor:
        """Teacher logprobs of the only set, nats; NaN where there is no score."""
        return self._only.log_q_TC

    @property
    def _only(self) -> Drawn:
        (found,) = self.sets.values()
        return found

    def log_p_TV(self) -> Tensor:
        """Student logprobs over the real ids, with gradient; float32 at least."""
        return logprobs(self.logits_TV, self.vocabulary)

    def log_q_TV(self) -> Tensor:
        """Teacher logprobs over the real ids."""
        return logprobs(self.teacher_TV, self.vocabulary)

    def log_p_TC(self) -> Tensor:
        """Student logprobs at the candidates, with gradient."""
        return self.log_p_TV().gather(1, self.ids_TC)

    def log_p_T(self) -> Tensor:
        """Student logprobs of the sampled tokens, with gradient."""
        return self.log_p_TV().gather(1, self.token_T[:, None])[:, 0]

    def log_q_T(self) -> Tensor:
        """Teacher logprobs of the sampled tokens."""
        return self.log_q_TV().gather(1, self.token_T[:, None])[:, 0]

    def log_b_T(self) -> Tensor:
        """Behaviour logprobs of the sampled tokens."""
        return logprobs(self.behaviour_TV, self.vocabulary).gather(1, self.token_T[:, None])[:, 0]


Loss = Callable[[AuditBatch], Tensor]
"""Either [T], nats a token, unreduced, 0 where masked; or a scalar, the sum over valid tokens / ``step_tokens``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A loss under audit.

    name            how the table calls it
    loss            the loss
    target          what it estimates, nats a position
    design          spec of the design that draws its candidates; ``sampled`` for losses on the sampled token
    origins         whose distribution proposes them; several where the loss reads a set of each
    form            shown in the table
    unbiased_fresh, unbiased_stale  whether its expected gradient is claimed to be the target's, when the proposal is
                    the current student, and when it is an older one
    estimates_value whether its expected value is claimed to be the target's, too
    token_local     whether tokens of a batch do not influence each other; if they do, enumeration goes one by one
    """

    name: str
    loss: Loss
    target: Target
    design: str = "sampled"
    origins: tuple[Origin, ...] = ("student",)
    form: str = "-"
    unbiased_fresh: bool = True
    unbiased_stale: bool = True
    estimates_value: bool = True
    token_local: bool = True


def audited(
    *,
    target: str | Target = "reverse_kl",
    design: str = "sampled",
    origin: Origin = "student",
    unbiased_fresh: bool = True,
    unbiased_stale: bool = True,
    estimates_value: bool = True,
) -> Callable[[Loss], Subject]:
    """Decorator that makes a loss a ``Subject`` and states its claims; see ``Subject`` for the arguments."""
    if isinstance(target, str) and target not in TARGETS:
        raise ConfigError(f"no target {target!r}; there are {', '.join(TARGETS)}, or give a function")

    def wrap(loss: Loss) -> Subject:
        return Subject(
            name=loss.__name__,
            loss=loss,
            target=TARGETS[target] if isinstance(target, str) else target,
            design=design,
            origins=(origin,),
            unbiased_fresh=unbiased_fresh,
            unbiased_stale=unbiased_stale,
            estimates_value=estimates_value,
        )

    return wrap


def logprobs(logits_TV: Tensor, vocabulary: int) -> Tensor:
    """Log-softmax over the real ids, in float32 at least."""
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    return logits_TV[:, :vocabulary].to(dtype).log_softmax(-1)
