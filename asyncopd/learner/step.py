"""One optimizer step: scored rollouts in, new weights and statistics out."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, get_scheduler

from asyncopd.errors import ConfigError
from asyncopd.learner.adapters import LoraConfig, adapter_config, adapter_weights, merged_weights
from asyncopd.learner.batching import MicroBatch, collate, plan_micro_batches, split_to, unscored
from asyncopd.learner.clock import PhaseClock
from asyncopd.learner.head import HeadShape
from asyncopd.learner.module import StudentModule
from asyncopd.learner.optimizers import build_optimizer, require_optimizer
from asyncopd.learner.packing import PACKINGS, packs
from asyncopd.learner.sharding import SHARDINGS, distributed, is_sharded
from asyncopd.learner.step_pass import step_contexts
from asyncopd.learner.update_size import UpdateSize
from asyncopd.objectives import Objective, StepContext, by_staleness
from asyncopd.objectives.reduction import token_scales
from asyncopd.publish import Weights, whole
from asyncopd.publish.stream import local
from asyncopd.types import NO_VERSION, ScoredRollout

STALENESS = "staleness"
"""Name under which the tokens' ages travel with their metrics."""
OF_BEHAVIOUR = ("logprob_gap", "log_ratio")
"""Metrics that only a token that a student sampled has."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """The optimizer, what of the student it trains, and the memory that it may take.

    A mixture of experts is trained on the objective alone: no auxiliary loss of its router is added.
    """

    optimizer: str = "adamw"
    """``adamw``, or ``adamw_8bit``, whose moments take a quarter of the memory (needs torchao)."""
    lr: float = 1e-4
    """Peak learning rate of AdamW."""
    schedule: str = "constant_with_warmup"
    """Name of a transformers schedule: constant_with_warmup, linear, cosine, ..."""
    warmup_steps: int = 5
    """Optimizer steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    clip: float = 1.0
    """Largest gradient norm; 0 never clips."""
    dtype: str = "bf16"
    """Dtype of forward and backward: ``bf16`` (autocast over float32 weights) or ``fp32``."""
    micro_batch_tokens: int = 4096
    """Tokens that go through the student at once, padding included."""
    packing: str = "auto"
    """``on``: sequences follow each other in one row, kept apart by attention. ``off``: padded rows. ``auto`` packs
    where the attention's cost follows the sequences (flash and flex attention on GPUs)."""
    head_chunk_mb: int = 256
    """Memory for what the head holds for one chunk of tokens times the vocabulary, MiB."""
    threads: int = 0
    """CPU threads; 0 shares the cores with the other stages."""
    sharding: str = "none"
    """Over several learner processes: ``none`` keeps the whole student in each, ``fsdp2`` spreads weights, gradients
    and optimizer over them. An accelerate config with FSDP2 is read as ``fsdp2``."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the layers and compute the rest again in the backward: less memory, a third more work."""
    compile: bool = False
    """Compile the layers with torch.compile; needs a C++ compiler on a CPU, and minutes at the first steps."""
    freeze_embeddings: bool = False
    """Leave the input embeddings as they are. Of tied embeddings and head, freeze both or none."""
    freeze_head: bool = False
    """Leave the output head as it is."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"learner.dtype is {self.dtype!r}; expected one of {sorted(DTYPES)}")
        require_optimizer(self.optimizer)
        if self.packing not in PACKINGS:
            raise ConfigError(f"learner.packing is {self.packing!r}; expected one of {', '.join(PACKINGS)}")
        if self.sharding not in SHARDINGS:
            raise ConfigError(f"learner.sharding is {self.sharding!r}; expected one of {', '.join(SHARDINGS)}")
        if not self.lr > 0:
            raise ConfigError(f"learner.lr is {self.lr}; expected a positive rate such as 1e-4")
        for name in ("micro_batch_tokens", "head_chunk_mb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"learner.{name} is {getattr(self, name)}; expected at least 1")
        for name in ("warmup_steps", "weight_decay", "clip", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"learner.{name} is {getattr(self, name)}; expected 0 or more")


class Learner:
    """Student, optimizer and schedule behind accelerate; the same code on one process and on many."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        config: LearnerConfig,
        *,
        accelerator: Accelerator,
        steps: int,
        shape: HeadShape,
        pad_id: int,
    ) -> None:
        self.objective = objective
        self.config = config
        self.accelerator = accelerator
        self.pad_id = pad_id
        self.vocabulary = shape.vocabulary
        module = StudentModule(model, objective, replace(shape, compute_dtype=DTYPES[config.dtype]))
        self.module = distributed(module, config.sharding, accelerator)
        self.sharded = is_sharded(self.module)
        self.optimizer = build_optimizer(
            config.optimizer,
            self.module.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )
        attention = self.student.config._attn_implementation or ""
        self.packed = packs(config.packing, attention, shape.vocabulary, accelerator.device, self._logprobs)
        self._update_size = UpdateSize(self.module.parameters())
        self.schedule = get_scheduler(config.schedule, self.optimizer, config.warmup_steps, steps)

    @property
    def student(self) -> PreTrainedModel:
        """The bare language model."""
        return self.accelerator.unwrap_model(self.module).model

    def weights(self) -> Weights:
        """Weights by name, tied copies left out and adapters merged: what a publisher writes.

        Under FSDP2 every rank must read them, in their order: rank 0 as it writes, the others by ``take_part``.
        """
        return merged_weights(self.student)

    @torch.no_grad()
    def published_logprobs(self, ids: Sequence[int], dtype: torch.dtype, *, merged: bool = True) -> Tensor | None:
        """Logprobs (nats, float32 [len(ids) - 1]) of each token after the first, under the weights as ``dtype`` holds
        them: bf16 swallows most of a small update, so they are another model than the one that is trained.

        In float32, at temperature 1, over the real vocabulary. Under FSDP2 every rank must ask. None where adapters
        are merged (``merged``) before they are rounded.
        """
        if merged and dtype != torch.float32 and self.config.lora.rank:
            return None
        weights = [local(parameter) for parameter in self.module.parameters()]
        kept = [weight.to("cpu", copy=True) for weight in weights] if dtype != torch.float32 else []
        for weight in weights if kept else ():
            weight.copy_(weight.to(dtype))
        try:
            return self._logprobs_of(ids)
        finally:
            for weight, values in zip(weights, kept, strict=False):
                weight.copy_(values)

    def _logprobs_of(self, ids: Sequence[int]) -> Tensor:
        self.module.eval()
        root = self.module if isinstance(self.module, FSDPModule) else None
        if root is not None:
            # The student's own forward does not gather what the root unit holds.
            root.unshard()
        ids_1L = torch.tensor([list(ids)], device=self.accelerator.device)
        logits = self.student(input_ids=ids_1L, use_cache=False).logits[0, :-1, : self.vocabulary]
        if root is not None:
            root.reshard()
        return torch.log_softmax(logits.float(), dim=-1).gather(1, ids_1L[0, 1:, None])[:, 0].cpu()

    def adapters(self) -> Weights:
        """The adapters by peft's names, read like ``weights``; empty without adapters."""
        return adapter_weights(self.student)

    def adapter_config(self) -> str:
        """The text of the file that peft writes beside adapters; there must be some."""
        return adapter_config(self.student)

    def step(self, samples: Sequence[ScoredRollout], version: int) -> dict[str, float]:
        """Train on this rank's share of the batch; ``version`` is the student's policy version before the step.

        Returns metrics that are equal on every rank: means over all valid tokens of the step, in nats where the name
        says loss, KL or entropy; ``<name>/staleness_<bucket>`` are the same over tokens of that staleness. Only the
        seconds of the phases and ``update_ratio`` are this rank's own.
        """
        clock = PhaseClock(self.accelerator.device)
        micros = self._micro_batches(samples, version)
        scales, tokens = self._scales(micros)
        contexts = self._contexts(micros)
        parts: list[dict[str, Tensor]] = []
        self.module.train()
        for index, (micro, scale_T, context) in enumerate(zip(micros, scales, contexts, strict=True)):
            last = index == len(micros) - 1
            # Sharded gradients are reduced each time, since a whole unreduced one would fill the memory that was saved.
            with nullcontext() if last or self.sharded else self.accelerator.no_sync(self.module):
                with clock.phase("forward_s"), self.accelerator.autocast():
                    result = self.module(micro, scale_T, context)
                with clock.phase("backward_s"):
                    self.accelerator.backward(result.loss)
            parts.append({**result.metrics, STALENESS: micro.staleness_T})
        with clock.phase("optimizer_s"):
            changed = self._update()
        return {**self._means(parts), **changed, **clock.seconds(), "tokens": float(tokens)}

    def _update(self) -> dict[str, float]:
        """Clip, move the weights, and say by how much."""
        limit = self.config.clip if self.config.clip > 0 else float("inf")
        norm = float(whole(self.accelerator.clip_grad_norm_(self.module.parameters(), limit)))
        # The rate that this step uses, before the schedule moves on.
        rate = float(self.schedule.get_last_lr()[0])
        self._update_size.before()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": rate, "update_ratio": self._update_size.ratio()}

    def _micro_batches(self, samples: Sequence[ScoredRollout], version: int) -> list[MicroBatch]:
        lengths = [len(s.rollout.prompt_ids) + len(s.rollout.response_ids_T) for s in samples]
        plan = plan_micro_batches(lengths, self.config.micro_batch_tokens, packed=self.packed)
        # Forwards of several ranks wait for each other, so every rank runs as many as the one that needs the most.
        most = int(self.accelerator.gather(torch.tensor([len(plan)], device=self.accelerator.device)).max())
        groups = [[samples[i] for i in group] for group in split_to(plan, lengths, most)]
        shortest = samples[min(range(len(samples)), key=lengths.__getitem__)]
        groups += [[unscored(shortest)] for _ in range(most - len(groups))]
        return [
            collate(
                group,
                version=version,
                origins=self.objective.origins,
                pad_id=self.pad_id,
                device=self.accelerator.device,
                packed=self.packed,
            )
            for group in groups
        ]

    def _scales(self, micros: Sequence[MicroBatch]) -> tuple[list[Tensor], int]:
        """The reduction's weight of every token, and the number of valid tokens of the step over all ranks.

        Data parallel averages gradients over ranks, so the weights carry the number of ranks.
        """
        lengths = [torch.bincount(micro.sequence_T, minlength=1) for micro in micros]
        mine = [sum(int(n.sum()) for n in lengths), sum(int((n > 0).sum()) for n in lengths)]
        totals = self.accelerator.reduce(torch.tensor(mine, device=self.accelerator.device), reduction="sum").tolist()
        config = self.objective.config
        scales = [
            token_scales(
                config.reduction,
                sequence_T=micro.sequence_T,
                lengths_N=lengths_N,
                step_tokens=totals[0],
                step_sequences=totals[1],
                fixed_length=config.fixed_length,
            )
            * self.accelerator.num_processes
            for micro, lengths_N in zip(micros, lengths, strict=True)
        ]
        return scales, totals[0]

    def _contexts(self, micros: Sequence[MicroBatch]) -> list[StepContext | None]:
        """What a few objectives need to know of the whole step before its first token is trained."""
        if not self.objective.needs_step_pass:
            return [None] * len(micros)
        self.module.eval()
        return [*step_contexts(self.objective, micros, self._logprobs, self.accelerator)]

    def _logprobs(self, micro: MicroBatch) -> Tensor:
        with self.accelerator.autocast():
            found_TC: Tensor = self.accelerator.unwrap_model(self.module).logprobs(micro)
        if isinstance(self.module, FSDPModule):
            # Without a backward the root unit would stay gathered, its shards out of everyone's sight.
            self.module.reshard()
        return found_TC

    def _means(self, parts: list[dict[str, Tensor]]) -> dict[str, float]:
        """Mean of every metric over the step's tokens, of all ranks, in all and by staleness."""
        if self.accelerator.num_processes > 1:
            gathered: list[list[dict[str, Tensor]]] = [[]] * self.accelerator.num_processes
            torch.distributed.all_gather_object(gathered, [{k: v.cpu() for k, v in part.items()} for part in parts])
            parts = [part for rank in gathered for part in rank]
        parts = [part for part in parts if len(part[STALENESS])]
        if not parts:
            return {}
        values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        staleness_T = values.pop(STALENESS)
        sampled_T = staleness_T != NO_VERSION
        of_sampled = {name: values[name][sampled_T] for name in OF_BEHAVIOUR if name in values}
        means = {
            name: float(value_T.double().mean()) for name, value_T in (values | of_sampled).items() if len(value_T)
        }
        return means | by_staleness(values, staleness_T)
