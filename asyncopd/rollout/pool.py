"""The rollout stage: leases prompts, steps an engine, hands finished answers to the queue.

One loop serves every mode. Between two decode steps the worker takes new weights (``keep``, ``abort``) or waits until
nothing is in flight (``drain``); in the pinned modes it takes one whole group and exactly the version the group asks
for.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncopd.errors import ConfigError, RequestRefusedError, StaleLeaseError
from asyncopd.publish import WeightSource
from asyncopd.queue.ledger import Lease
from asyncopd.queue.payloads import PayloadRef, write_rollouts
from asyncopd.rollout.engine import RolloutEngine
from asyncopd.rollout.mixed_engine import TeacherFraction
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.vllm_config import VllmEngineConfig
from asyncopd.stage import Stage
from asyncopd.types import NO_VERSION, Prompt, Rollout, RolloutRequest

ENGINES = ("transformers", "vllm", "vllm_server", "scripted")
_SPAN_S = 1.0
"""Decode steps are traced as spans of about this many seconds."""
_LOOK_S = 0.05
"""Seconds between two looks at the ledger while decoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """The rollout pool."""

    engine: str = "transformers"
    """Engine: ``transformers``, ``vllm`` in the workers, ``vllm_server`` (rollout.vllm.urls), or ``scripted`` (no
    model; for tests and simulations)."""
    workers: int = 1
    """Rollout processes."""
    slots: int = 16
    """Answers that one worker generates at the same time."""
    refill: int = 4
    """In async mode a worker takes new prompts once this many slots are free."""
    samples_per_prompt: int = 1
    """Answers to each prompt."""
    teacher_fraction: str = "0"
    """Share of the answers that the teacher writes, which each rollout worker then loads too: ``0.5``, or a schedule
    over optimizer steps such as ``0.5->0 over 100``. Needs an objective of teacher-drawn candidates."""
    weights: str = "keep"
    """New weights arrive between decode steps (``keep``: later tokens carry the new version, over the state that older
    weights left), when nothing is in flight (``drain``), or between decode steps with the state computed anew
    (``abort``)."""
    on_abort: str = "continue"
    """With ``weights: abort``: answers in flight go on after the tokens they have (``continue``), or begin anew
    (``regenerate``)."""
    dtype: str = "bf16"
    """Dtype of the engine and of published whole weights, ``bf16`` or ``fp32``."""
    threads: int = 0
    """CPU threads a worker; 0 shares the cores with the other stages."""
    devices: str = ""
    """GPUs as physical ids, one group a worker, for example "4;5"; empty: the first one, or the CPU."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """The sampling distribution."""
    vllm: VllmEngineConfig = field(default_factory=VllmEngineConfig)
    """Options of the engines ``vllm`` and ``vllm_server``."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"rollout.engine is {self.engine!r}; expected one of {list(ENGINES)}")
        if self.weights not in ("keep", "drain", "abort"):
            raise ConfigError(f"rollout.weights is {self.weights!r}; expected keep, drain or abort")
        if self.on_abort not in ("continue", "regenerate"):
            raise ConfigError(f"rollout.on_abort is {self.on_abort!r}; expected continue or regenerate")
        if self.dtype not in ("bf16", "fp32"):
            raise ConfigError(f"rollout.dtype is {self.dtype!r}; expected bf16 or fp32")
        for name, value in (("workers", self.workers), ("slots", self.slots), ("refill", self.refill)):
            if value < 1:
                raise ConfigError(f"rollout.{name} is {value}; expected at least 1")
        TeacherFraction.parse(self.teacher_fraction)
        if self.refill > self.slots:
            raise ConfigError(f"rollout.refill is {self.refill}, more than rollout.slots ({self.slots}); lower refill")
        if self.samples_per_prompt < 1:
            raise ConfigError(f"rollout.samples_per_prompt is {self.samples_per_prompt}; expected at least 1")
        groups = self.devices.split(";") if self.devices else []
        if groups and len(groups) != self.workers:
            raise ConfigError(
                f"rollout.devices is {self.devices!r}, {len(groups)} groups; expected one for each of rollout.workers "
                f"({self.workers}), separated by semicolons"
            )
        if self.threads < 0:
            raise ConfigError(f"rollout.threads is {self.threads}; expected 0 (share) or a number of threads")


@dataclass(kw_only=True, slots=True)
class RolloutWorker:
    """One rollout process.

    pinned      sync and lagged modes: whole groups, exact versions
    """

    stage: Stage
    engine: RolloutEngine
    weights: WeightSource
    prompts: Mapping[int, Prompt]
    config: RolloutConfig
    pinned: bool
    _tokens: dict[str, int] = field(default_factory=dict)
    _beat: float = field(default_factory=time.monotonic)
    _looked: float = 0.0

    def run(self) -> None:
        """Work until the run is over or told to stop."""
        while not self.stage.stopping:
            if self.pinned:
                self._take_group()
            else:
                self._look()
            if self.engine.in_flight == 0:
                self.stage.rest()
            else:
                self._decode()

    def _look(self) -> None:
        """Between two steps: newer weights, and prompts for free slots."""
        self._looked = time.monotonic()
        self._take_newest_weights()
        self._refill()

    def _take_newest_weights(self) -> None:
        """Move to the newest published version, where the arrival policy allows it now."""
        newest = self.stage.ledger.published_version
        if newest > self.engine.policy_version and (self.config.weights != "drain" or self.engine.in_flight == 0):
            self._load(newest)

    def _refill(self) -> None:
        """Lease prompts for the free slots."""
        ledger, engine = self.stage.ledger, self.engine
        free = self.config.slots - engine.in_flight
        draining = self.config.weights == "drain" and ledger.published_version > engine.policy_version
        if free < self.config.refill or (draining and engine.in_flight > 0):
            return
        lease = ledger.lease_rollouts(self.stage.name, free, self.stage.lease_s)
        if lease is None:
            return
        needed = max(sample.min_version for sample in lease.samples)
        if needed > engine.policy_version:
            if self.config.weights == "drain" and engine.in_flight > 0:
                # Published between the look and the lease: what is in flight finishes first.
                ledger.release(lease.token)
                return
            self._load(ledger.published_version)
        self._submit(lease)

    def _take_group(self) -> None:
        """Once the last group is out, lease the next one and load the very version it asks for."""
        if self.engine.in_flight > 0:
            return
        lease = self.stage.ledger.lease_rollouts(self.stage.name, self.config.slots, self.stage.lease_s)
        if lease is None:
            return
        version = lease.samples[0].exact_version
        if version is not None and version != self.engine.policy_version:
            self._load(version)
        self._submit(lease)

    def _load(self, version: int) -> None:
        self.stage.beat()
        with self.stage.tracer.span("load_weights", version=version):
            with self.stage.loading():
                probe = self.weights.move_to(version)
                if self.config.weights == "abort" and self.engine.in_flight > 0:
                    self.engine.restart(keep_tokens=self.config.on_abort == "continue")
                found = None if probe is None else self.engine.logprobs(probe.ids)
            if probe is not None and found is not None:
                probe.check(found, version=self.engine.policy_version, dtype=self.config.dtype)
        # A load may outlast a lease, and what is then somebody else's must be let go before more is leased.
        self._extend_leases()

    def _submit(self, lease: Lease) -> None:
        """Hand a lease to the engine; a sample that it refuses is quarantined, the others go on."""
        if not self.stage.ledger.heartbeat(lease.token, self.stage.lease_s):
            self.stage.log.warning("lease %d ended while weights were loaded; another worker has it", lease.token)
            return
        requests = [
            RolloutRequest(
                uid=sample.uid,
                prompt_ids=self.prompts[sample.prompt_index].token_ids,
                min_version=sample.min_version,
                exact_version=sample.exact_version,
                max_new_tokens=self.prompts[sample.prompt_index].max_new_tokens,
            )
            for sample in lease.samples
        ]
        try:
            self.engine.submit(requests)
            refused = set()
        except RequestRefusedError:
            refused = {request.uid for request in requests if not self._submit_one(lease, request)}
        self._tokens.update({request.uid: lease.token for request in requests if request.uid not in refused})

    def _submit_one(self, lease: Lease, request: RolloutRequest) -> bool:
        """Whether the engine takes it; if not, it is quarantined."""
        try:
            self.engine.submit([request])
        except RequestRefusedError as error:
            self.stage.log.warning("sample %s is quarantined (refused): %s", request.uid, error)
            try:
                self.stage.ledger.drop(lease.token, request.uid, "refused", str(error))
            except StaleLeaseError:
                self.stage.log.warning("the lease on %s ended before it could be quarantined", request.uid)
            return False
        return True

    def _decode(self) -> None:
        """Decode for about a second; answers leave, and in async mode others join, as the steps go on."""
        until = time.monotonic() + _SPAN_S
        with self.stage.tracer.span("decode") as span:
            while self.engine.in_flight > 0 and time.monotonic() < until:
                self.stage.beat()
                ended = self.engine.step()
                if ended:
                    self._put(ended)
                    tokens = sum(len(rollout.response_ids_T) for rollout in ended)
                    span.add(samples=len(ended), tokens=tokens)
                    self.stage.hand_on()
                if not self.pinned and time.monotonic() - self._looked > _LOOK_S:
                    self._look()
        self._heartbeat()

    def _put(self, ended: list[Rollout]) -> None:
        rollouts = {rollout.uid: rollout for rollout in ended}
        for pack in write_rollouts(self.stage.run_dir, ended):
            with self.stage.ledger.together():
                for uid, payload in pack.items():
                    self._put_one(rollouts[uid], payload)

    def _put_one(self, rollout: Rollout, payload: PayloadRef) -> None:
        token = self._tokens.pop(rollout.uid)
        versions = rollout.versions_T
        by_student = bool((versions != NO_VERSION).any())
        try:
            self.stage.ledger.put_rollout(
                token,
                rollout.uid,
                payload,
                tokens=len(versions),
                oldest_version=int(versions.min()) if by_student else None,
                newest_version=int(versions.max()) if by_student else None,
                finish=rollout.finish,
            )
        except StaleLeaseError:
            self.stage.log.warning("the lease on %s ended while it was generated; another worker has it", rollout.uid)

    def _heartbeat(self) -> None:
        """Extend the leases in flight from time to time, because tokens were decoded."""
        if time.monotonic() - self._beat >= self.stage.lease_s / 4:
            self._extend_leases()

    def _extend_leases(self) -> None:
        """Extend the leases in flight; forget answers whose lease is gone."""
        self._beat = time.monotonic()
        for token in sorted(set(self._tokens.values())):
            if not self.stage.ledger.heartbeat(token, self.stage.lease_s):
                lost = [uid for uid, held in self._tokens.items() if held == token]
                self.engine.abandon(lost)
                for uid in lost:
                    del self._tokens[uid]
