"""How token losses become the loss of an optimizer step.

Shape suffixes: T tokens of one micro-batch, N sequences.

The step's loss is ``sum_T loss_T * scale_T`` over all micro-batches and ranks, so it does not depend on how the step is
split. Numbers of the step are therefore global: counted before the first forward pass, over every rank.
"""

import torch
from torch import Tensor

from asyncopd.errors import ConfigError


def token_scales(
    reduction: str,
    *,
    sequence_T: Tensor,
    lengths_N: Tensor,
    step_tokens: int,
    step_sequences: int,
    fixed_length: int | None = None,
) -> Tensor:
    """Scale of each token [T], float64.

    sequence_T      index into ``lengths_N`` of the sequence each token belongs to
    lengths_N       valid tokens of each of these sequences, also those outside this micro-batch
    step_tokens     valid tokens of the optimizer step, over all ranks
    step_sequences  sequences of the optimizer step that have a valid token, over all ranks

    ``token_mean`` divides by the step's tokens; ``sequence_mean`` averages within a sequence, then over sequences;
    ``fixed_length`` divides by sequences times a constant, the only one whose weights do not depend on later tokens.
    """
    if reduction == "token_mean":
        return torch.full_like(sequence_T, 1.0 / max(step_tokens, 1), dtype=torch.float64)
    if reduction == "sequence_mean":
        return 1.0 / (lengths_N.double()[sequence_T] * max(step_sequences, 1))
    if reduction == "fixed_length":
        if fixed_length is None:
            raise ConfigError("reduction fixed_length needs fixed_length, the longest answer in tokens")
        return torch.full_like(sequence_T, 1.0 / (max(step_sequences, 1) * fixed_length), dtype=torch.float64)
    raise ConfigError(f"no reduction {reduction!r}; there are token_mean, sequence_mean and fixed_length")
