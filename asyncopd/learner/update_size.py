"""How far a step moves the weights, for the price of a few thousand of them."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SAMPLED = 1024
"""Weights looked at in each tensor: 200 tensors are 0.2 million numbers, read twice a step."""


class UpdateSize:
    """Update-to-weight ratio: ``|w_after - w_before| / |w_before|`` over the trained weights, L2 norms.

    Both norms are estimated from up to ``SAMPLED`` fixed random places of each tensor, each standing for its share of
    the tensor, so that no copy of the weights is kept and it works with every optimizer. Of sharded weights this rank's
    part is looked at.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._places = [_places(_local(parameter), seed) for seed, parameter in enumerate(self._trained)]
        self._before: list[Tensor] = []

    def before(self) -> None:
        """Look at the weights before the optimizer's step."""
        self._before = self._look()

    @torch.no_grad()
    def ratio(self) -> float:
        """The ratio, after it; 0 where all weights were 0."""
        moved, size = [], []
        for parameter, before, after in zip(self._trained, self._before, self._look(), strict=True):
            # Every sampled weight stands for as many as there are to one sampled.
            share = _local(parameter).numel() / max(1, len(before))
            moved.append((after - before).square().sum() * share)
            size.append(before.square().sum() * share)
        # Brought over from the device once.
        moved_sum, size_sum = torch.stack([torch.stack(moved).sum(), torch.stack(size).sum()]).tolist()
        return (moved_sum / size_sum) ** 0.5 if size_sum else 0.0

    @torch.no_grad()
    def _look(self) -> list[Tensor]:
        return [
            _local(parameter).flatten()[places].float()
            for parameter, places in zip(self._trained, self._places, strict=True)
        ]


def _local(parameter: nn.Parameter) -> Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _places(weight: Tensor, seed: int) -> Tensor:
    count = weight.numel()
    # Where a tensor is small, all of it.
    if count <= SAMPLED:
        return torch.arange(count, device=weight.device)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count, (SAMPLED,), generator=generator).to(weight.device)
