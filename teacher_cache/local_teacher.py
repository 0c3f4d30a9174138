"""A checkpoint on this machine as a scorer with an identity: what the service and the offline command are made of."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from teacher_cache.causal_scorer import CausalScorer
from teacher_cache.errors import ScoringError
from teacher_cache.identity import TeacherIdentity, identify_checkpoint
from teacher_cache.quantization import load_quantised, require_quantization
from teacher_cache.transformers_scorer import TransformersScorer
from teacher_cache.vllm_scorer import VllmScorer, VllmScorerConfig, require_vllm

BACKENDS = ("transformers", "vllm")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTeacherConfig:
    """Which teacher, and how it is run."""

    model: Path
    """Path of an HF checkpoint; one that was saved quantised is loaded quantised."""
    backend: str = "transformers"
    """What runs the forward pass: ``transformers``, or ``vllm``."""
    temperature: float = 1.0
    """Temperature of every score."""
    dtype: str = "bf16"
    """Dtype of the forward pass: ``bf16``, ``fp16`` or ``fp32``; logprobs are normalised in float32 in each."""
    device: str = ""
    """Device, ``cuda:1`` for example; empty: the first GPU, or the CPU. vLLM takes the GPUs that it sees."""
    device_map: str | None = None
    """Spreads a transformers model over devices (``auto``); instead of ``device``."""
    compile: bool = False
    """Put the body of a transformers model through torch.compile."""
    batch_tokens: int = 4096
    """Padded tokens that go through the teacher at once."""
    vllm: VllmScorerConfig = field(default_factory=VllmScorerConfig)
    """Read by the backend vllm."""
    quantization: str = ""
    """Quantise the weights while loading: ``bitsandbytes-8bit``, ``bitsandbytes-4bit`` or ``torchao-int8``, each with
    the package that its name begins with. Scores differ from the full teacher's, and so does its fingerprint."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ScoringError(f"backend is {self.backend!r}; expected one of {list(BACKENDS)}")
        if self.backend == "vllm":
            self._check_vllm()
        if self.dtype not in DTYPES:
            raise ScoringError(f"dtype is {self.dtype!r}; expected one of {list(DTYPES)}")
        require_quantization(self.quantization)
        if not (self.model / "config.json").is_file():
            raise ScoringError(f"{str(self.model)!r} holds no HF checkpoint (no config.json); give its folder")

    @property
    def where(self) -> str:
        """The device in words."""
        return self.device_map or self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def identity(self) -> TeacherIdentity:
        """Its identity, without loading it.

        The kind of device and the backend are part of it, because their kernels round differently: by 1e-5 nats in
        fp32, by tenths in bf16.
        """
        parts = [self.dtype, self.quantization, self.where.partition(":")[0], "compiled" if self.compile else ""]
        if self.backend == "vllm":
            parts.append(f"vllm-tp{self.vllm.tensor_parallel}")
            # On a CPU it is eager always.
            parts.append("eager" if self.vllm.eager and self.where != "cpu" else "")
        numerics = "+".join(part for part in parts if part)
        identity = identify_checkpoint(self.model, temperature=self.temperature, dtype=numerics)
        if self.backend == "vllm":
            return replace(identity, max_context=self.vllm.context_of(identity.max_context))
        return identity

    def load(self, vocabulary: int, name: str = "default") -> CausalScorer:
        """The teacher, in memory; ``name`` is written into its records."""
        if self.backend == "vllm":
            return VllmScorer(
                self.model,
                vocabulary=vocabulary,
                temperature=self.temperature,
                batch_tokens=self.batch_tokens,
                dtype=DTYPES[self.dtype],
                device=self.where,
                config=self.vllm,
                teacher=name,
            )
        model: Path | PreTrainedModel = self.model
        if self.quantization:
            model = load_quantised(
                self.model,
                self.quantization,
                dtype=DTYPES[self.dtype],
                device=self.where,
                device_map=self.device_map,
            )
        return TransformersScorer(
            model,
            vocabulary=vocabulary,
            temperature=self.temperature,
            batch_tokens=self.batch_tokens,
            dtype=DTYPES[self.dtype],
            device=self.where,
            device_map=self.device_map,
            compiled=self.compile,
            teacher=name,
        )

    def _check_vllm(self) -> None:
        require_vllm(self.vllm)
        if self.device_map or self.compile or self.quantization:
            raise ScoringError(
                "device_map, compile and quantization are options of the backend transformers; vLLM has "
                "vllm.tensor_parallel and vllm.eager, and loads a checkpoint that was saved quantised as such"
            )
        if ":" in self.device:
            raise ScoringError(
                f"device is {self.device!r}; vLLM takes the GPUs that the process sees: set CUDA_VISIBLE_DEVICES and "
                "leave it empty"
            )
        if self.where == "cpu" and self.vllm.tensor_parallel > 1:
            raise ScoringError(f"vllm.tensor_parallel is {self.vllm.tensor_parallel} and there is no GPU; expected 1")
