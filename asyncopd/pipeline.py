"""One run, top to bottom.

    prompts ──> rollout pool ──> teacher scoring ──> sample queue ──> learner ──> publish
       ^        (student b)       (teacher q)        (ledger)         (student p)    │
       └── frontier, admission ───────┴──────────────────┴──── policy version ───────┘

Every arrow is concurrent with every other. Rank 0 of the learner owns the run: it starts the worker processes, hands
batches to the other ranks, publishes weights and commits steps. The stages meet only in the run folder.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from types import TracebackType
from typing import Self

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from asyncopd.config import RunConfig, plain
from asyncopd.errors import AsyncOPDError, CheckpointError, ConfigError
from asyncopd.final_student import help_write_final_student, write_final_student, write_model_card
from asyncopd.held_out import HeldOutCollector, HeldOutFiles
from asyncopd.interface import Callbacks, Inputs, RunResult
from asyncopd.learner.checkpoint import CheckpointStore
from asyncopd.learner.commits import Commits
from asyncopd.learner.load import leave_group_at_exit, load_learner, open_accelerator
from asyncopd.learner.loop import LearnerLoop, Owner
from asyncopd.learner.pace import Pace
from asyncopd.learner.step import DTYPES, Learner
from asyncopd.preflight import Preflight, preflight, save_inputs
from asyncopd.prompts import save_prompts
from asyncopd.publish import WeightStore, take_part
from asyncopd.publish.probe import ProbeText
from asyncopd.publishing import Published, check_base, open_publisher
from asyncopd.queue.doorbell import Doorbell, ring
from asyncopd.queue.ledger import Ledger
from asyncopd.queue.plan import LedgerPlan
from asyncopd.resumed import resumed_config
from asyncopd.run_folder import RunFolder
from asyncopd.stop import StopRequest
from asyncopd.storage import blaming_storage
from asyncopd.supervisor import Supervisor
from asyncopd.tracking.chrome_trace import write_chrome_trace
from asyncopd.tracking.live import LiveView
from asyncopd.tracking.metrics import read_evaluations
from asyncopd.tracking.report import write_report
from asyncopd.tracking.run_facts import RunFacts
from asyncopd.tracking.summary import write_summary
from asyncopd.tracking.trace import RUN, RUN_END, Tracer
from asyncopd.tracking.trackers import RunTracking, open_tracking
from asyncopd.worker_start import WorkerStarter
from asyncopd.workers import worker_specs

LOG = logging.getLogger(__name__)


def run(
    config: RunConfig,
    *,
    inputs: Inputs | None = None,
    callbacks: Callbacks | None = None,
    resume: bool = False,
    resume_version: int | None = None,
    starter: WorkerStarter | None = None,
) -> RunResult:
    """Distil ``config.student`` from ``config.teacher``; the same call in a script, a notebook and on every rank.

    With ``resume`` the run in the folder goes on from its newest checkpoint, or from ``resume_version``. ``starter``
    makes the worker processes; None starts a new interpreter for each.
    Raises ConfigError and DataError before any model is loaded where that is possible, WorkerDiedError when a stage
    is lost for good, StorageError when the run folder cannot be written.
    """
    asked = (config, inputs or Inputs(), callbacks or Callbacks())
    with (
        blaming_storage(config.runs_dir / config.name),
        _Run(open_accelerator(config), *asked, resume=resume, starter=starter) as opened,
    ):
        result = opened.go(resume_version)
    leave_group_at_exit()
    return result


class _Run:
    """The state of one call of ``run`` on one rank; ``go`` reads top to bottom."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: RunConfig,
        inputs: Inputs,
        callbacks: Callbacks,
        *,
        resume: bool,
        starter: WorkerStarter | None,
    ) -> None:
        self.accelerator = accelerator
        self.starter = starter
        self.inputs = inputs
        self.callbacks = callbacks
        self.resume = resume
        self.main = accelerator.is_main_process
        self.cleanup = ExitStack()
        if self.main:
            self.folder, self.config = self._open_folder(config)
        if accelerator.num_processes > 1:
            shared = broadcast_object_list([self.folder.path if self.main else None])
            self.folder = RunFolder(shared[0])
            self.config = self.folder.config()
        self.published = Published.of(self.config, torch.cuda.is_available())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # With the error, so that the trace tells a run that failed from one that stopped.
        self.cleanup.__exit__(kind, error, trace)

    def go(self, resume_version: int | None) -> RunResult:
        """Check, load, resume, train, evaluate, write."""
        config, folder = self.config, self.folder
        checks = self._check()
        start = self._start_version(resume_version)
        learner = load_learner(config, checks, self.accelerator)
        if self.published.adapters:
            check_base(config, learner)
        if learner.sharded and self.callbacks.evaluate is not None:
            raise ConfigError(
                "callbacks.evaluate reads the whole student, which learner.sharding fsdp2 spreads over the processes; "
                "take the held-out figures (evaluation.every), or set learner.sharding to none"
            )
        trackers = CheckpointStore(folder.path).load(start, learner) if start else {}
        name = "learner" if self.main else f"learner-{self.accelerator.process_index}"
        tracer = self.cleanup.enter_context(Tracer(folder.path, name))
        if not self.main:
            # Rank 0 decides when to stop and tells the others with the next batch; a second Ctrl-C ends every rank.
            with StopRequest():
                if config.publish.backend != "file" or start not in WeightStore(folder.path).versions():
                    take_part(self.published.weights(learner), self.published.dtype)
                version = self._loop(checks, learner, tracer, None).run(start)
                self.accelerator.wait_for_everyone()
                if version == config.steps:
                    help_write_final_student(learner)
            return RunResult(path=folder.path, policy_version=version, stopped=version < config.steps)
        return self._own(checks, learner, tracer, start, trackers)

    def _own(
        self, checks: Preflight, learner: Learner, tracer: Tracer, start: int, tracker_ids: Mapping[str, str]
    ) -> RunResult:
        """What rank 0 does around the training loop."""
        config, folder = self.config, self.folder
        tracking = self._open_tracking(start, tracker_ids)
        ledger = self._open_ledger(checks, start)
        owner = self._owner(learner, ledger, tracking, tracer)
        loop = self._loop(checks, learner, tracer, owner)
        with owner.stop:
            owner.publisher.publish(start, self.published.weights(learner))
            if ledger.published_version < start or start == 0:
                ledger.publish(start)
            if start == 0:
                self._evaluate(learner, owner, tracer, start)
            tracer.instant(RUN)
            view = LiveView(folder.path) if config.tracking.live_view else nullcontext()
            with view, self._workers(owner):
                version = loop.run(start)
                tracer.instant(RUN_END)
                self.accelerator.wait_for_everyone()
                if version == config.steps:
                    owner.await_evaluations()
        figures = {evaluation.policy_version: evaluation for evaluation in read_evaluations(folder.path)}
        if version < config.steps:
            LOG.warning("stopped at policy version %d; go on with --resume --name %s", version, config.name)
            tracking.finish({})
            return RunResult(path=folder.path, policy_version=version, stopped=True, before=figures.get(0))
        # First, so that nothing that goes wrong with the figures can cost it.
        write_final_student(folder.final_path, learner, checks, config)
        summary = write_summary(folder.path)
        write_model_card(folder.final_path, config, summary)
        tracking.finish(summary.as_dict())
        if config.tracking.report:
            write_chrome_trace(folder.path)
            write_report(folder.path)
        return RunResult(
            path=folder.path,
            policy_version=version,
            stopped=False,
            summary=summary,
            before=figures.get(0),
            after=figures.get(version),
            final=folder.final_path,
        )

    def _open_folder(self, config: RunConfig) -> tuple[RunFolder, RunConfig]:
        """The run folder, locked for this process, and the configuration that holds for the run."""
        if self.resume:
            folder = RunFolder.existing(config)
            stored = folder.config()
            config = resumed_config(stored, config, self.inputs)
        else:
            folder, config = RunFolder.create(config)
        self.cleanup.enter_context(folder.lock())
        if self.resume:
            folder.write_config(config)
        else:
            config = save_inputs(folder, config, self.inputs)
        return folder, config

    def _check(self) -> Preflight:
        """The preflight; a new run that does not pass leaves no folder, so its name stays free."""
        try:
            return preflight(self.config, self.inputs)
        except AsyncOPDError:
            if self.main and not self.resume:
                shutil.rmtree(self.folder.path)
            raise

    def _start_version(self, wanted: int | None) -> int:
        """The policy version to go on from: the newest whole checkpoint, or the one asked for; 0 for a new run."""
        if not self.resume:
            return 0
        whole = CheckpointStore(self.folder.path).versions()
        if wanted is None:
            return max(whole, default=0)
        if wanted not in whole and wanted != 0:
            raise CheckpointError(f"no checkpoint of policy version {wanted} in {self.folder.path}; there are {whole}")
        return wanted

    def _open_tracking(self, start: int, ids: Mapping[str, str]) -> RunTracking:
        config = self.config
        RunFacts(
            name=config.name,
            mode=config.mode,
            steps=config.steps,
            batch_size=config.queue.batch_size,
            max_staleness=config.max_staleness,
            description={
                "teacher": str(config.teacher.model),
                "student": str(config.student),
                "objective": config.objective.name,
                "design": config.objective.design,
            },
        ).write(self.folder.path)
        return open_tracking(
            self.folder.path,
            config.name,
            config.tracking,
            plain(config),
            resumed_at=start if self.resume else None,
            ids=ids,
        )

    def _evaluate(self, learner: Learner, owner: Owner, tracer: Tracer, version: int) -> None:
        """The caller's own evaluation, where there is one and the version is due."""
        config, own = self.config, self.callbacks.evaluate
        if own is not None and config.evaluation.due(version, config.steps):
            with tracer.span("evaluate"):
                owner.tracking.log(version, own(learner.student, version))

    def _open_ledger(self, checks: Preflight, start: int) -> Ledger:
        """The sample queue: new, or rolled back to the checkpoint's version with the lost timeline cleared away."""
        config, folder = self.config, self.folder
        weights, checkpoints = WeightStore(folder.path), CheckpointStore(folder.path)
        if not folder.ledger_path.exists():
            save_prompts(folder.prompts_path, checks.prompts.prompts)
            save_prompts(folder.held_out_path, checks.prompts.held_out[: config.evaluation.prompts])
            folder.write_token_ids(checks.ids)
            return self._new_ledger(ledger_plan(config, len(checks.prompts.prompts)))
        ledger = Ledger.open(folder.ledger_path)
        weights.forget_after(start)
        checkpoints.forget_after(start)
        HeldOutFiles(folder).forget_after(start)
        resumed = ledger.resume(start, min(weights.versions(), default=None))
        LOG.warning("resumed at policy version %d: %s", start, resumed)
        return ledger

    def _new_ledger(self, plan: LedgerPlan) -> Ledger:
        """An empty ledger, made beside and renamed, so that a run killed meanwhile has a whole one or none."""
        building = self.folder.path / ".ledger.new"
        for left_over in building.parent.glob(f"{building.name}*"):
            left_over.unlink()
        Ledger.create(building, plan).close()
        return Ledger.open(building.replace(self.folder.ledger_path))

    def _owner(self, learner: Learner, ledger: Ledger, tracking: RunTracking, tracer: Tracer) -> Owner:
        config, path = self.config, self.folder.path
        doorbell = self.cleanup.enter_context(closing(Doorbell(path, "learner")))
        specs = worker_specs(config)
        publisher = self.cleanup.enter_context(open_publisher(config, self.published, path, learner))
        files = HeldOutFiles(self.folder)
        if files.none_because is not None:
            LOG.warning("no held-out figures: %s", files.none_because)

        def drop_weights(version: int) -> None:
            """They come with every step. A worker may be about to open what was the newest two commits ago."""
            publisher.keep_from(version - 2, files.waiting(publisher.versions()))

        commits = Commits(
            self.folder.ledger_path,
            publisher,
            ["learner", *(spec.name for spec in specs if spec.kind == "rollout")],
            tracer,
            # In the pinned modes the stages wait for each other, so there is nothing to gain.
            behind=config.lag is None,
            # A resume of a lagged mode needs those since its checkpoint.
            tidy=None if config.lag else drop_weights,
        )
        # Before the folder is unlocked: nothing of a run that failed may be written into the one that resumes it.
        self.cleanup.callback(commits.close)
        held_out = HeldOutCollector(
            files=files,
            tracking=tracking,
            told=self.callbacks.on_evaluation,
            logged={evaluation.policy_version for evaluation in read_evaluations(path)},
        )

        def wake() -> None:
            ring(path, "learner")

        supervisor = Supervisor(
            path,
            specs,
            config.supervision,
            lease_s=config.queue.lease_s,
            tracer=tracer,
            on_death=wake,
            starter=self.starter,
        )
        return Owner(
            run_dir=path,
            ledger=ledger,
            supervisor=supervisor,
            publisher=publisher,
            commits=commits,
            tracking=tracking,
            checkpoints=CheckpointStore(path),
            stop=StopRequest(wake=wake, at_once=supervisor.kill),
            doorbell=doorbell,
            held_out=held_out,
            lag=config.lag or 0,
            stall_s=config.stall_s,
        )

    @contextmanager
    def _workers(self, owner: Owner) -> Iterator[None]:
        """The worker processes, for as long as the block lasts."""
        try:
            owner.supervisor.start()
            yield
        finally:
            owner.supervisor.stop()

    def _loop(self, checks: Preflight, learner: Learner, tracer: Tracer, owner: Owner | None) -> LearnerLoop:
        def evaluate(version: int) -> None:
            if owner is not None:
                self._evaluate(learner, owner, tracer, version)

        return LearnerLoop(
            learner,
            self.accelerator,
            run_dir=self.folder.path,
            steps=self.config.steps,
            checkpoint=self.config.checkpoint,
            tracer=tracer,
            pace=Pace(learner, self.config.tracking.peak_tflops),
            owner=owner,
            published=self.published,
            probe_text=ProbeText.of(
                (prompt.token_ids for prompt in checks.prompts.prompts), DTYPES[self.config.rollout.dtype]
            ),
            on_step=self.callbacks.on_step,
            on_checkpoint=self.callbacks.on_checkpoint,
            evaluate=evaluate,
        )


def ledger_plan(config: RunConfig, prompts: int) -> LedgerPlan:
    """What the ledger of this run promises."""
    queue = config.queue
    return LedgerPlan(
        seed=config.seed,
        prompts=prompts,
        samples_per_prompt=config.rollout.samples_per_prompt,
        batch_size=queue.batch_size,
        steps=config.steps,
        max_staleness=config.max_staleness,
        lag=config.lag,
        group_size=config.group_size,
        shuffle=config.data.shuffle,
        selection=queue.selection,
        window_batches=queue.window_batches,
        requeue_too_old=queue.requeue_too_old,
        record=queue.record,
    )
