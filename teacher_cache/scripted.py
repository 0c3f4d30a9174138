"""Scripted distributions: what the fakes of models say, without a model.

Shape suffixes: T positions, V vocabulary.
"""

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

SPREAD = 2.0
"""Standard deviation of scripted logits: far from uniform, with several tokens that are likely."""


def scripted_logits(vocabulary: int, *names: object) -> Tensor:
    """Float32 logits [V] that depend on ``names`` and on nothing else."""
    digest = blake2b("|".join(map(str, names)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.standard_normal(vocabulary, dtype=np.float32) * np.float32(SPREAD))


def teacher_logits(vocabulary: int, uid: str, positions: range) -> Tensor:
    """Float32 logits [T, V] of the scripted teacher at some positions of one answer."""
    rows = [scripted_logits(vocabulary, "teacher", uid, position) for position in positions]
    return torch.stack(rows) if rows else torch.empty((0, vocabulary))
