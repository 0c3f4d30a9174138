"""Uniform draws that depend on (run seed, sample uid, position, stream) and on nothing else.

A retry, another batch, another worker or a re-score therefore draws the same numbers.
"""

import threading
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

_TINY = np.finfo(np.float64).tiny
Noise = Callable[[int], Tensor]
"""``noise(n)`` gives float64 uniforms in (0, 1) of shape [T, n]: one row for each position being drawn."""


class _Generator(threading.local):
    """This thread's generator: to key it anew costs a quarter of what it costs to make one."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)
        self.uniforms = np.random.Generator(self.philox)
        self.fresh = self.philox.state


_GENERATOR = _Generator()


def position_uniforms(run_seed: int, uid: str, position: int, stream: str, count: int) -> np.ndarray:
    """``count`` float64 uniforms in (0, 1) for one position of one sample.

    ``stream`` separates uses ("token" for the rollout's own token, "candidates" for the support design).
    """
    digest = blake2b(f"{run_seed}|{uid}|{position}|{stream}".encode(), digest_size=16).digest()
    _GENERATOR.fresh["state"]["key"] = np.frombuffer(digest, "<u8")
    _GENERATOR.philox.state = _GENERATOR.fresh
    return np.maximum(_GENERATOR.uniforms.random(count), _TINY)


def noise_for(run_seed: int, rows: list[tuple[str, int]], stream: str) -> Noise:
    """Noise for several positions at once; ``rows`` gives (sample uid, position) of each row."""

    def draw(count: int) -> Tensor:
        return torch.from_numpy(np.stack([position_uniforms(run_seed, uid, t, stream, count) for uid, t in rows]))

    return draw
