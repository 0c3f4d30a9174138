"""Uniform draws that depend on (run seed, sample uid, position, stream) and on nothing else.

A retry, another batch, another worker or a re-score therefore draws the same numbers.
"""

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

Noise = Callable[[int], Tensor]
"""``noise(n)`` gives float64 uniforms in (0, 1) of shape [T, n]: one row for each position being drawn."""


def position_uniforms(run_seed: int, uid: str, position: int, stream: str, count: int) -> np.ndarray:
    """``count`` float64 uniforms in (0, 1) for one position of one sample.

    ``stream`` separates uses ("token" for the rollout's own token, "candidates" for the support design).
    """
    digest = blake2b(f"{run_seed}|{uid}|{position}|{stream}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return np.maximum(generator.random(count), np.finfo(np.float64).tiny)


def noise_for(run_seed: int, rows: list[tuple[str, int]], stream: str) -> Noise:
    """Noise for several positions at once; ``rows`` gives (sample uid, position) of each row."""

    def draw(count: int) -> Tensor:
        return torch.from_numpy(np.stack([position_uniforms(run_seed, uid, t, stream, count) for uid, t in rows]))

    return draw
