"""The teacher stage: leases finished answers, has them scored, hands the records to the queue."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from asyncopd.errors import ConfigError, LedgerError, StaleLeaseError
from asyncopd.learner.batching import plan_micro_batches
from asyncopd.objectives import valid_positions
from asyncopd.proposal import ProposalPass
from asyncopd.publish import WeightSource
from asyncopd.queue.ledger import Lease, LeasedSample
from asyncopd.queue.payloads import PayloadRef, read_rollout, write_records
from asyncopd.stage import Stage
from asyncopd.tracking.keys import CACHE
from teacher_cache.cached_scorer import CacheCounts
from teacher_cache.codec import PRECISIONS
from teacher_cache.errors import ScoringError
from teacher_cache.quantization import QUANTIZATIONS
from teacher_cache.record import Origin, TeacherRecord
from teacher_cache.scorer import Scorer, ScoreRequest
from teacher_cache.vllm_scorer import VllmScorerConfig

DEFAULT = "default"
"""Name of the teacher of every prompt that names none."""

SCORERS = ("transformers", "vllm", "openai", "scripted")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The teacher and its scoring process."""

    model: Path = Path("teacher")
    """Path of an HF checkpoint."""
    scorer: str = "transformers"
    """Scorer: ``transformers``, ``vllm``, ``openai`` (``urls`` are stock vLLM servers: teacher-drawn top_k and the
    sampled token's logprob, at temperature 1), or ``scripted`` (no model; for tests and simulations)."""
    dtype: str = "bf16"
    """Dtype of the forward pass, ``bf16`` or ``fp32``; logprobs are normalised in float32 either way."""
    device_map: str = ""
    """Spreads the teacher over its GPUs (``auto``); empty: it takes one."""
    compile: bool = False
    """Put the teacher's body through torch.compile."""
    quantization: str = ""
    """Quantise the teacher while loading: ``bitsandbytes-8bit``, ``bitsandbytes-4bit`` or ``torchao-int8``, each with
    the package that its name begins with; empty: not."""
    batch_tokens: int = 4096
    """Padded tokens that go through the teacher at once."""
    proposal: str = "rollout"
    """Who draws the student's candidates: the ``rollout`` engine as it samples, or a ``pass`` of the newest published
    student over the finished answer, in the scoring process. A pass works with every engine, draws from a fresher
    student, and costs one more forward pass of an answer."""
    samples: int = 16
    """Answers leased at a time."""
    threads: int = 0
    """CPU threads; 0 shares the cores with the other stages."""
    urls: tuple[str, ...] = ()
    """Teacher services to ask instead of loading ``model`` here, such as http://127.0.0.1:8471; several are replicas of
    one teacher. A token comes from TEACHER_CACHE_TOKEN. Held-out figures take the weights in ``model`` where they are
    there, and ask the services for whole distributions where not."""
    named: tuple[str, ...] = ()
    """Further teachers for the prompts that name one (data.teacher_column): ``math=models/math``, or
    ``math=http://127.0.0.1:8472`` (replicas separated by commas)."""
    deadline_s: float = 600.0
    """Seconds without any answer of a service after which the run fails; shorter outages are waited out."""
    cache: Path | None = None
    """Folder of the score cache, which several runs may share; empty: nothing is remembered."""
    cache_gb: float = 50.0
    """Size cap of the cache in GB; the least recently used scores go first. 0: no cap."""
    cache_precision: str = "fp32"
    """Stored scores: ``fp32`` (a hit is bit for bit what was scored), ``fp16`` or ``bf16`` (half the bytes)."""
    devices: str = ""
    """GPUs as physical ids, for example "7"; empty: the first one, or the CPU."""
    vllm: VllmScorerConfig = field(default_factory=VllmScorerConfig)
    """vLLM in the scoring process (``teacher.scorer vllm``)."""

    def __post_init__(self) -> None:
        if self.scorer not in SCORERS:
            raise ConfigError(f"teacher.scorer is {self.scorer!r}; expected one of {list(SCORERS)}")
        if self.proposal not in ("rollout", "pass"):
            raise ConfigError(f"teacher.proposal is {self.proposal!r}; expected rollout or pass")
        if self.dtype not in ("bf16", "fp32"):
            raise ConfigError(f"teacher.dtype is {self.dtype!r}; expected bf16 or fp32")
        if self.quantization not in ("", *QUANTIZATIONS):
            raise ConfigError(
                f"teacher.quantization is {self.quantization!r}; expected one of {list(QUANTIZATIONS)}, or empty"
            )
        if (self.urls or self.named) and self.scorer == "scripted":
            raise ConfigError("teacher.urls or teacher.named is set and teacher.scorer is scripted; take one of them")
        if self.scorer == "openai":
            self._check_foreign()
        if self.deadline_s <= 0:
            raise ConfigError(f"teacher.deadline_s is {self.deadline_s}; expected seconds above 0")
        names = [entry.partition("=")[0] for entry in self.named]
        if any(not all(entry.partition("=")) for entry in self.named) or len({"default", *names}) <= len(names):
            raise ConfigError(
                f"teacher.named is {list(self.named)}; expected name=folder or name=URL, each name once and none of "
                "them default"
            )
        if self.cache is not None and self.scorer == "scripted":
            raise ConfigError(
                "teacher.cache is set and teacher.scorer is scripted, whose scores depend on the sample's name and not "
                "on its tokens: leave the cache out"
            )
        if self.cache_gb < 0:
            raise ConfigError(f"teacher.cache_gb is {self.cache_gb}; expected a size in GB, or 0 for no cap")
        if self.cache_precision not in PRECISIONS:
            raise ConfigError(
                f"teacher.cache_precision is {self.cache_precision!r}; expected one of {list(PRECISIONS)}"
            )
        if self.batch_tokens < 1 or self.samples < 1:
            raise ConfigError(
                f"teacher.batch_tokens is {self.batch_tokens}, teacher.samples {self.samples}; expected at least 1"
            )
        gpus = len(self.devices.split(",")) if self.devices else 0
        if self.scorer == "vllm" and gpus not in (0, self.vllm.tensor_parallel):
            raise ConfigError(
                f"teacher.devices is {self.devices!r} and teacher.vllm.tensor_parallel {self.vllm.tensor_parallel}; "
                "expected as many GPUs"
            )
        if self.threads < 0:
            raise ConfigError(f"teacher.threads is {self.threads}; expected 0 (share) or a number of threads")

    def _check_foreign(self) -> None:
        """ConfigError where stock servers cannot be the teachers."""
        here = [name for name, source in self.sources.items() if isinstance(source, Path)]
        if here:
            raise ConfigError(
                f"teacher.scorer is openai and there is no URL for {here}; give teacher.urls, such as "
                "http://127.0.0.1:8000, and URLs in teacher.named"
            )
        if self.cache is not None:
            raise ConfigError(
                "teacher.cache is set and teacher.scorer is openai, whose servers do not say which weights they serve: "
                "leave the cache out"
            )

    @property
    def sources(self) -> dict[str, Path | tuple[str, ...]]:
        """Where each teacher is, by name: a checkpoint's folder, or the URLs of its replicas."""
        found: dict[str, Path | tuple[str, ...]] = {DEFAULT: self.urls or self.model}
        for entry in self.named:
            name, _, source = entry.partition("=")
            found[name] = tuple(source.split(",")) if "://" in source else Path(source)
        return found

    def weights_of(self, name: str) -> Path | None:
        """The folder of a teacher's weights; None where only services have them."""
        source = self.model if name == DEFAULT else self.sources[name]
        if self.scorer == "scripted" or isinstance(source, tuple):
            return None
        return source if name != DEFAULT or not self.urls or (source / "config.json").is_file() else None


class BetweenLeases(Protocol):
    """Work that the stage does besides scoring, in slices too short to keep scoring waiting."""

    def work(self) -> bool:
        """Do a slice; False where there is nothing to do."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A leased sample, what the teacher is asked about it, and its behaviour logprobs."""

    sample: LeasedSample
    request: ScoreRequest
    log_b_T: Tensor


@dataclass(kw_only=True, slots=True)
class ScoringWorker:
    """One scoring process.

    samples         answers leased at a time
    batch_tokens    padded tokens that the scorer takes at once; after each such batch the lease is extended
    teacher_draw    spec of the design that the teacher itself draws, or None
    origins         the candidate sets that the objective reads
    held_out        what is done between leases
    cache           what the score cache has done, if there is one
    weights         brings published student versions to ``proposal``
    proposal        draws the student's candidates here; None where the rollout did
    teachers        the teacher's name by prompt, where it is not "default"
    compiles        whether a forward may first compile, which takes as long as loading weights may
    """

    stage: Stage
    scorer: Scorer
    weights: WeightSource | None
    proposal: ProposalPass | None
    samples: int
    batch_tokens: int
    teacher_draw: str | None
    origins: frozenset[Origin]
    held_out: BetweenLeases
    cache: CacheCounts | None = None
    teachers: Mapping[int, str] = field(default_factory=dict)
    compiles: bool = False

    def run(self) -> None:
        """Score and, between leases, evaluate, until the run is over and evaluated, or told to stop."""
        stage = self.stage
        while not stage.told_to_stop:
            # Asked before the look for weights, which are there before the last step is committed.
            finished = stage.ledger.finished
            lease = stage.ledger.lease_scoring(stage.name, self.samples, stage.lease_s)
            if lease is not None:
                self._score(lease)
                stage.hand_on()
            evaluated = self.held_out.work()
            if lease is None and not evaluated:
                if finished:
                    return
                stage.rest()

    def _score(self, lease: Lease) -> None:
        """Score a lease in batches; a sample that cannot be read or scored is quarantined, the others go on."""
        asked = []
        for sample in lease.samples:
            try:
                asked.append(self._asked(sample))
            except LedgerError as error:
                self._drop(lease, sample, "unreadable", str(error))
        if self.proposal is not None and self.weights is not None:
            self._take_weights(self.proposal, self.weights, lease)
        lengths = [len(each.request.prompt_ids) + len(each.request.response_ids_T) for each in asked]
        with self.stage.tracer.span("score", samples=len(asked)) as span:
            # The plan depends on the lease alone, so that in the pinned modes a group is scored the same way again.
            for batch in plan_micro_batches(lengths, self.batch_tokens):
                if not self._extend(lease):
                    return
                requests = [asked[index].request for index in batch]
                if self.proposal is not None:
                    requests = self.proposal.draw(requests)
                before = asdict(self.cache) if self.cache is not None else {}
                with self.stage.loading() if self.compiles else nullcontext():
                    results = self.scorer.score(requests)
                self._put(lease, [asked[index] for index in batch], results)
                span.add(tokens=sum(len(request.response_ids_T) for request in requests))
                if self.cache is not None:
                    # Counted in spans, which the learner's process reads: a worker has no other way to its metrics.
                    span.add(**{f"{CACHE}/{name}": n - before[name] for name, n in asdict(self.cache).items()})

    def _take_weights(self, proposal: ProposalPass, weights: WeightSource, lease: Lease) -> None:
        """The newest published student proposes; in the pinned modes the one that generated the group."""
        exact = lease.samples[0].exact_version
        version = self.stage.ledger.published_version if exact is None else exact
        if version != proposal.version:
            with self.stage.tracer.span("load_weights", version=version), self.stage.loading():
                weights.move_to(version)

    def _extend(self, lease: Lease) -> bool:
        """Between two batches: say that there was progress. False once another worker has the lease."""
        self.stage.beat()
        if self.stage.ledger.heartbeat(lease.token, self.stage.lease_s):
            return True
        self.stage.log.warning("lease %d ended while it was scored; what is left of it goes to another", lease.token)
        return False

    def _asked(self, sample: LeasedSample) -> _Asked:
        if sample.rollout is None:
            raise LedgerError(f"sample {sample.uid} was leased for scoring without a rollout")
        rollout = read_rollout(self.stage.run_dir, sample.rollout, sample.uid)
        request = ScoreRequest(
            uid=rollout.uid,
            prompt_ids=rollout.prompt_ids,
            response_ids_T=rollout.response_ids_T,
            candidates=rollout.candidates,
            draw=self.teacher_draw,
            run_seed=self.stage.seed,
            teacher=self.teachers.get(sample.prompt_index, DEFAULT),
        )
        return _Asked(sample, request, rollout.log_b_T)

    def _put(self, lease: Lease, asked: Sequence[_Asked], results: Sequence[TeacherRecord | ScoringError]) -> None:
        scored, valid, disagreement = {}, {}, {}
        for each, result in zip(asked, results, strict=True):
            uid = each.sample.uid
            if isinstance(result, ScoringError):
                self._drop(lease, each.sample, "unscorable", str(result))
                continue
            scored[uid] = result
            valid[uid] = int(valid_positions(result, self.origins).sum())
            # An estimate of the reverse KL, behaviour policy to teacher, a token.
            disagreement[uid] = float((each.log_b_T - result.log_q_T).mean())
        for pack in write_records(self.stage.run_dir, scored):
            with self.stage.ledger.together():
                for uid, payload in pack.items():
                    self._put_one(lease, uid, payload, valid[uid], disagreement[uid])

    def _put_one(self, lease: Lease, uid: str, payload: PayloadRef, valid: int, disagreement: float) -> None:
        try:
            self.stage.ledger.put_record(lease.token, uid, payload, valid, disagreement)
        except StaleLeaseError:
            self.stage.log.warning("the lease on %s ended while it was scored; another worker has it", uid)

    def _drop(self, lease: Lease, sample: LeasedSample, reason: str, detail: str) -> None:
        self.stage.log.warning("sample %s is quarantined (%s): %s", sample.uid, reason, detail)
        try:
            self.stage.ledger.drop(lease.token, sample.uid, reason, detail)
        except StaleLeaseError:
            self.stage.log.warning("the lease on %s ended before it could be quarantined", sample.uid)
