"""A checkpoint on this machine as a scorer with an identity: what the service and the offline command are made of."""

from dataclasses import dataclass
from pathlib import Path

import torch

from teacher_cache.errors import ScoringError
from teacher_cache.identity import TeacherIdentity, identify_checkpoint
from teacher_cache.transformers_scorer import TransformersScorer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTeacherConfig:
    """Which teacher, and how it is run."""

    model: Path
    """Path of an HF checkpoint; one that was saved quantised is loaded quantised."""
    temperature: float = 1.0
    """Temperature of every score."""
    dtype: str = "bf16"
    """Dtype of the forward pass: ``bf16``, ``fp16`` or ``fp32``; logprobs are normalised in float32 in each."""
    device: str = ""
    """Device, ``cuda:1`` for example; empty: the first GPU, or the CPU."""
    device_map: str | None = None
    """Spreads the model over devices (``auto``); instead of ``device``."""
    compile: bool = False
    """Put the model's body through torch.compile."""
    batch_tokens: int = 4096
    """Padded tokens that go through the teacher at once."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ScoringError(f"dtype is {self.dtype!r}; expected one of {list(DTYPES)}")
        if not (self.model / "config.json").is_file():
            raise ScoringError(f"{str(self.model)!r} holds no HF checkpoint (no config.json); give its folder")

    @property
    def where(self) -> str:
        """The device in words."""
        return self.device_map or self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def identity(self) -> TeacherIdentity:
        """Its identity, without loading it. The kind of device is part of it, because kernels round differently."""
        numerics = f"{self.dtype}+{self.where.partition(':')[0]}{'+compiled' if self.compile else ''}"
        return identify_checkpoint(self.model, temperature=self.temperature, dtype=numerics)

    def load(self, vocabulary: int, name: str = "default") -> TransformersScorer:
        """The teacher, in memory; ``name`` is written into its records."""
        return TransformersScorer(
            self.model,
            vocabulary=vocabulary,
            temperature=self.temperature,
            batch_tokens=self.batch_tokens,
            dtype=DTYPES[self.dtype],
            device=self.where,
            device_map=self.device_map,
            compiled=self.compile,
            teacher=name,
        )
