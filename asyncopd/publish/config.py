"""How policy versions travel from the learner to the rollout workers."""

from dataclasses import dataclass

from asyncopd.errors import ConfigError

BACKENDS = ("file", "gloo", "nccl")


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishConfig:
    """Publishing of weights."""

    backend: str = "file"
    """How weights reach the rollout workers: ``file`` (the run folder; any engine), or straight from the learner's
    memory into rollout.engine vllm by ``gloo`` (through host memory, whatever the devices; saves the disk, and on a CPU
    no time) or ``nccl`` (GPU to GPU; the engines need GPUs of their own)."""
    adapters: bool = True
    """With ``learner.lora`` and ``file``: publish the adapters alone, which engines merge as they read them, or apply
    (rollout.vllm.adapters). False publishes whole weights, adapters merged, as ``gloo`` and ``nccl`` do in any case."""
    file_every: int = 1
    """With ``gloo`` and ``nccl``: write every so many versions to the run folder, besides those that are evaluated and
    the last. 0 writes only these."""
    deadline_s: float = 120.0
    """With ``gloo`` and ``nccl``: seconds that one transfer may take. A worker that has its weights by halves then is
    started again."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"publish.backend is {self.backend!r}; expected one of {list(BACKENDS)}. An engine on the learner's "
                "own GPU takes gloo or file"
            )
        if self.file_every < 0:
            raise ConfigError(f"publish.file_every is {self.file_every}; expected 1 (every version), more, or 0")
        if self.file_every != 1 and self.backend == "file":
            raise ConfigError(
                f"publish.file_every is {self.file_every} and publish.backend is file, by which the workers take every "
                "version; expected 1, or backend gloo or nccl"
            )
        if not self.deadline_s > 0:
            raise ConfigError(f"publish.deadline_s is {self.deadline_s}; expected seconds above 0, for example 120")
