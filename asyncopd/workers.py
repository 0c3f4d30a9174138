"""Which worker processes a run has, and what each of them does."""

import os
from collections.abc import Callable
from typing import cast

import torch
from transformers import AutoConfig

from asyncopd.config import RunConfig
from asyncopd.held_out import HeldOutFiles, HeldOutWorker
from asyncopd.learner.step import DTYPES
from asyncopd.objectives import build_objective
from asyncopd.prompts import read_prompts
from asyncopd.proposal import ProposalPass
from asyncopd.publish import FileSource, WeightSource, WeightStore
from asyncopd.publish.transfer_source import ReceivesWeights, TransferSource
from asyncopd.publishing import Published
from asyncopd.rollout.engine import RolloutEngine
from asyncopd.rollout.mixed_engine import MixedEngine, TeacherFraction
from asyncopd.rollout.pool import RolloutWorker
from asyncopd.rollout.scripted_engine import ScriptedEngine
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.rollout.vllm_server_engine import VllmServerEngine
from asyncopd.run_folder import RunFolder, TokenIds
from asyncopd.scoring import ScoringWorker
from asyncopd.stage import Stage
from asyncopd.supervisor import WorkerSpec
from asyncopd.teachers import build_scorer, compared_teacher, device
from teacher_cache.cached_scorer import CacheCounts


def worker_specs(config: RunConfig) -> list[WorkerSpec]:
    """The worker processes: ``rollout-0`` and on, and ``scorer-0``."""
    _, rollout_threads, teacher_threads = config.threads(cores())
    devices = config.rollout.devices.split(";") if config.rollout.devices else [""] * config.rollout.workers
    groups = _core_groups(config) or [[]] * config.rollout.workers
    rollouts = [
        WorkerSpec(kind="rollout", index=index, threads=len(groups[index]) or rollout_threads, devices=devices[index])
        for index in range(config.rollout.workers)
    ]
    bound = len(config.teacher.vllm.core_set) if config.teacher.scorer == "vllm" else 0
    scorer = WorkerSpec(kind="scorer", index=0, threads=bound or teacher_threads, devices=config.teacher.devices)
    return [*rollouts, scorer]


def learner_devices() -> list[str]:
    """Physical ids of the GPUs that the learner's ranks on this machine use; none on a CPU."""
    if not torch.cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return visible.split(",")[: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def build_worker(kind: str, stage: Stage, folder: RunFolder) -> RolloutWorker | ScoringWorker:
    """What a worker process runs: everything it needs is in the run folder."""
    config = folder.config()
    return _rollout_worker(stage, folder, config) if kind == "rollout" else _scoring_worker(stage, folder, config)


def _core_groups(config: RunConfig) -> list[list[int]]:
    """The CPU cores of each rollout worker, where they are bound to any."""
    return config.rollout.vllm.core_groups if config.rollout.engine == "vllm" else []


def _rollout_worker(stage: Stage, folder: RunFolder, config: RunConfig) -> RolloutWorker:
    index = int(stage.name.rpartition("-")[2])
    groups = _core_groups(config)
    if groups:
        os.sched_setaffinity(0, groups[index])
    engine = _engine(config, folder.token_ids(), index)
    return RolloutWorker(
        stage=stage,
        engine=engine,
        weights=_weight_source(config, stage, engine),
        prompts={prompt.index: prompt for prompt in read_prompts(folder.prompts_path)},
        config=config.rollout,
        pinned=config.lag is not None,
    )


def _weight_source(config: RunConfig, stage: Stage, engine: RolloutEngine) -> WeightSource:
    store = WeightStore(stage.run_dir)
    newest = _newest(config, stage)
    if config.publish.backend == "file":
        return FileSource(store, engine, newest)
    return TransferSource(
        stage.run_dir,
        store,
        # The preflight lets only engines come here that can.
        cast(ReceivesWeights, engine),
        newest=newest,
        deadline_s=config.publish.deadline_s,
        beat=stage.beat,
    )


def _newest(config: RunConfig, stage: Stage) -> Callable[[], int] | None:
    """The newest published version; None in the pinned modes, which take the very one that is asked for."""
    return None if config.lag is not None else lambda: stage.ledger.published_version


def _engine(config: RunConfig, ids: TokenIds, index: int) -> RolloutEngine:
    """What generates: the student's engine, and where the teacher writes some answers one for it too."""
    student = ENGINES[config.rollout.engine](config, ids, index)
    fraction = TeacherFraction.parse(config.rollout.teacher_fraction)
    if fraction.never:
        return student
    teacher = TransformersEngine(
        config.teacher.model,
        vocabulary=ids.vocabulary,
        eos_token_ids=ids.eos_ids,
        sampling=config.rollout.sampling,
        run_seed=config.seed,
        dtype=DTYPES[config.teacher.dtype],
        device=device(),
        version=0,
    )
    return MixedEngine(student, teacher, fraction, run_seed=config.seed)


def _scoring_worker(stage: Stage, folder: RunFolder, config: RunConfig) -> ScoringWorker:
    objective = build_objective(config.objective)
    draw = objective.draws.get("teacher")
    cache = CacheCounts()
    ids = folder.token_ids()
    scorer = build_scorer(config, ids, stage, cache)
    proposal = _proposal_pass(config, ids) if config.teacher.proposal == "pass" else None
    return ScoringWorker(
        stage=stage,
        scorer=scorer,
        weights=None if proposal is None else FileSource(WeightStore(folder.path), proposal, _newest(config, stage)),
        proposal=proposal,
        samples=config.teacher.samples,
        batch_tokens=config.teacher.batch_tokens,
        teacher_draw=None if draw is None else draw.spec,
        origins=objective.origins,
        held_out=HeldOutWorker(
            stage=stage,
            folder=folder,
            files=HeldOutFiles(folder),
            weights=WeightStore(folder.path),
            teacher=lambda name: compared_teacher(config, ids, scorer, name),
        ),
        cache=cache if config.teacher.cache is not None else None,
        teachers={prompt.index: prompt.teacher for prompt in read_prompts(folder.prompts_path)}
        if config.teacher.named
        else {},
        compiles=config.teacher.compile,
    )


def _proposal_pass(config: RunConfig, ids: TokenIds) -> ProposalPass:
    return ProposalPass(
        config.student,
        design=build_objective(config.objective).draws["student"].spec,
        vocabulary=ids.vocabulary,
        temperature=config.objective.temperature,
        batch_tokens=config.teacher.batch_tokens,
        dtype=DTYPES[config.rollout.dtype],
        device=device(),
    )


def rollout_design(config: RunConfig) -> str | None:
    """Spec of the candidates that the engine draws; None where nobody needs any, or a later pass draws them."""
    design = build_objective(config.objective).draws.get("student")
    return None if design is None or config.teacher.proposal == "pass" else design.spec


def _transformers_engine(config: RunConfig, ids: TokenIds, index: int) -> RolloutEngine:
    return TransformersEngine(
        config.student,
        vocabulary=ids.vocabulary,
        eos_token_ids=ids.eos_ids,
        sampling=config.rollout.sampling,
        run_seed=config.seed,
        design=rollout_design(config),
        temperature=config.objective.temperature,
        dtype=DTYPES[config.rollout.dtype],
        device=device(),
    )


def _scripted_engine(config: RunConfig, ids: TokenIds, index: int) -> RolloutEngine:
    return ScriptedEngine(
        vocabulary=ids.vocabulary,
        eos_token_ids=ids.eos_ids,
        sampling=config.rollout.sampling,
        run_seed=config.seed,
        design=rollout_design(config),
        temperature=config.objective.temperature,
    )


def _vllm_engine(config: RunConfig, ids: TokenIds, index: int) -> RolloutEngine:
    # Here, because vLLM is optional and takes seconds to import.
    from asyncopd.rollout.vllm_engine import VllmEngine

    return VllmEngine(
        config.student,
        vocabulary=ids.vocabulary,
        eos_token_ids=ids.eos_ids,
        sampling=config.rollout.sampling,
        run_seed=config.seed,
        design=rollout_design(config),
        temperature=config.objective.temperature,
        dtype=DTYPES[config.rollout.dtype],
        slots=config.rollout.slots,
        config=config.rollout.vllm,
        transfers=config.publish.backend != "file",
        lora_rank=config.learner.lora.rank if Published.of(config, torch.cuda.is_available()).applied else 0,
    )


def _vllm_server_engine(config: RunConfig, ids: TokenIds, index: int) -> RolloutEngine:
    options = config.rollout.vllm
    model = AutoConfig.from_pretrained(config.student).get_text_config(decoder=True)
    return VllmServerEngine(
        config.student,
        options.urls[index],
        vocabulary=ids.vocabulary,
        head_rows=model.vocab_size,
        eos_token_ids=ids.eos_ids,
        sampling=config.rollout.sampling,
        run_seed=config.seed,
        temperature=config.objective.temperature,
        slots=config.rollout.slots,
        max_context=options.max_context or model.max_position_embeddings,
        deadline_s=options.deadline_s,
    )


ENGINES: dict[str, Callable[[RunConfig, TokenIds, int], RolloutEngine]] = {
    "scripted": _scripted_engine,
    "transformers": _transformers_engine,
    "vllm": _vllm_engine,
    "vllm_server": _vllm_server_engine,
}
