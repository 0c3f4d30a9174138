"""Training from answers that are already scored: a learner's run folder without rollout and without a teacher.

batches, one a step ──> learner ──> metrics, report, final student
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer

from asyncopd.config import RunConfig, plain
from asyncopd.errors import ConfigError
from asyncopd.final_student import write_final_student, write_model_card
from asyncopd.interface import RunResult
from asyncopd.learner.load import load_learner, open_accelerator
from asyncopd.objectives import build_objective
from asyncopd.preflight import Preflight, generation_config, outline
from asyncopd.prompts import PromptSet
from asyncopd.run_folder import RunFolder, TokenIds
from asyncopd.tokenizers_match import SharedVocabulary, eos_ids, require_head
from asyncopd.tracking.chrome_trace import write_chrome_trace
from asyncopd.tracking.report import write_report
from asyncopd.tracking.run_facts import RunFacts
from asyncopd.tracking.summary import write_summary
from asyncopd.tracking.trace import RUN, RUN_END, Tracer
from asyncopd.tracking.trackers import open_tracking
from asyncopd.types import NO_VERSION, Rollout, ScoredRollout
from teacher_cache.identity import vocabulary_of

LOG = logging.getLogger(__name__)
Batch = tuple[Sequence[ScoredRollout], Mapping[str, float]]
"""The samples of a step, and metrics that are known of them beforehand."""


def train_offline(
    config: RunConfig,
    checks: Preflight,
    batch: Callable[[int], Batch],
    *,
    steps: int,
    source: Mapping[str, str],
) -> RunResult:
    """Train in a new run folder.

    batch    gives the batch that is trained at a policy version
    steps    optimizer steps; the schedule of the learning rate goes by ``config.steps``
    source   what the report says first: where the answers and their scores come from

    ConfigError, before anything is written, in one of several processes of a launcher.
    """
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise ConfigError(
            f"WORLD_SIZE is {processes}; training from answers that are there (sft, offline, replay) has one process, "
            "expected 1: start it without a launcher"
        )
    folder, config = RunFolder.create(config)
    with folder.lock(), Tracer(folder.path, "learner") as tracer:
        folder.write_token_ids(checks.ids)
        RunFacts(
            name=config.name,
            mode=config.mode,
            steps=steps,
            batch_size=config.queue.batch_size,
            max_staleness=config.max_staleness,
            description={
                **source,
                "student": str(config.student),
                "objective": config.objective.name,
                "design": config.objective.design,
            },
        ).write(folder.path)
        tracking = open_tracking(folder.path, config.name, config.tracking, plain(config))
        learner = load_learner(config, checks, open_accelerator(config))
        LOG.info("training %d steps offline into %s", steps, folder.path)
        tracer.instant(RUN)
        for version in range(steps):
            with tracer.span("step", version=version + 1) as span:
                samples, known = batch(version)
                metrics = learner.step(samples, version)
                span.add(samples=len(samples), tokens=sum(len(sample.rollout.response_ids_T) for sample in samples))
            tracking.log(version + 1, {**metrics, **known})
        tracer.instant(RUN_END)
        write_final_student(folder.final_path, learner, checks, config)
        summary = write_summary(folder.path)
        write_model_card(folder.final_path, config, summary)
        tracking.finish(summary.as_dict())
    write_chrome_trace(folder.path)
    write_report(folder.path)
    return RunResult(path=folder.path, policy_version=steps, stopped=False, summary=summary, final=folder.final_path)


def student_checks(config: RunConfig) -> Preflight:
    """What a run's preflight finds out about the student, without teacher and prompts."""
    # First, because a path that is not there would be looked for on the network.
    student = outline(config.student, "student")
    tokenizer = AutoTokenizer.from_pretrained(config.student)
    generation = generation_config(config.student, student)
    vocabulary = SharedVocabulary(size=vocabulary_of(tokenizer), eos_ids=eos_ids(tokenizer, generation))
    require_head(student.get_text_config(decoder=True).vocab_size, vocabulary, "student")
    pad = tokenizer.pad_token_id
    return Preflight(
        tokenizer=tokenizer,
        generation=generation,
        # Any pad id will do: padding is masked by length.
        ids=TokenIds(vocabulary=vocabulary.size, eos_ids=vocabulary.eos_ids, pad_id=pad if pad is not None else 0),
        objective=build_objective(config.objective),
        prompts=PromptSet(prompts=(), held_out=(), skipped=()),
    )


def unsampled(uid: str, prompt_ids: tuple[int, ...], response_ids_T: Tensor, ids: TokenIds) -> Rollout:
    """An answer that no student sampled; ``response_ids_T`` is int32 [T]."""
    length = len(response_ids_T)
    ended = length > 0 and int(response_ids_T[-1]) in ids.eos_ids
    return Rollout(
        uid=uid,
        prompt_ids=prompt_ids,
        response_ids_T=response_ids_T,
        versions_T=torch.full((length,), NO_VERSION, dtype=torch.int32),
        log_b_T=torch.full((length,), torch.nan),
        finish="eos" if ended else "length",
        candidates=None,
    )
