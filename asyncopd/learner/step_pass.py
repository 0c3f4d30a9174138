"""The pass before a step, for the few objectives that must know of all its tokens first.

Shape suffixes: T tokens.

Each rank runs its own micro-batches without gradient; one number a token and the index of its sequence go round, so the
result does not depend on how the step is spread over micro-batches and ranks.
"""

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from asyncopd.learner.batching import MicroBatch
from asyncopd.objectives import Objective, StepContext


def step_contexts(
    objective: Objective,
    micros: Sequence[MicroBatch],
    logprobs: Callable[[MicroBatch], Tensor],
    accelerator: Accelerator,
) -> list[StepContext]:
    """The context of each of this rank's micro-batches; ``logprobs`` gives the student's at a micro-batch's ids."""
    values, sequences, seen = [], [], 0
    for micro in micros:
        values.append(objective.step_value(micro.tokens(slice(None), logprobs(micro))))
        sequences.append(micro.sequence_T + seen)
        seen += micro.sequences
    value_T, sequence_T, start = _over_ranks(torch.cat(values), torch.cat(sequences), seen, accelerator)
    context = objective.over_step(value_T, sequence_T)
    stops = torch.tensor([0, *(len(value) for value in values)]).cumsum(0) + start
    return [context.slice(slice(a, b)) for a, b in zip(stops[:-1].tolist(), stops[1:].tolist(), strict=True)]


def _over_ranks(
    value_T: Tensor, sequence_T: Tensor, sequences: int, accelerator: Accelerator
) -> tuple[Tensor, Tensor, int]:
    """Values and sequence indices of all ranks, in their order, and where this rank's begin."""
    ranks, rank = accelerator.num_processes, accelerator.process_index
    if ranks == 1:
        return value_T, sequence_T, 0
    mine = torch.tensor([[len(value_T), sequences]], device=value_T.device)
    counts, widths = accelerator.gather(mine).T.tolist()

    def joined(tensor_T: Tensor) -> Tensor:
        # What is gathered must be equally long everywhere, and not empty.
        padded_T = tensor_T.new_zeros(max(*counts, 1))
        padded_T[: len(tensor_T)] = tensor_T
        rows = accelerator.gather(padded_T).view(ranks, -1)
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])

    return joined(value_T), joined(sequence_T + sum(widths[:rank])), sum(counts[:rank])
