"""Everything about a run that can be checked before weights are loaded."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from asyncopd.config import RunConfig
from asyncopd.errors import ConfigError
from asyncopd.evaluation import EvaluationConfig
from asyncopd.interface import Inputs
from asyncopd.objectives import Objective, build_objective
from asyncopd.prompts import PromptSet, load_prompts
from asyncopd.proposal import check_proposal
from asyncopd.publishing import check_publishing
from asyncopd.rollout.mixed_engine import TeacherFraction, check_fraction
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.vllm_config import check_placement, check_servers
from asyncopd.run_folder import RunFolder, TokenIds
from asyncopd.scoring import DEFAULT
from asyncopd.supervisor import check_devices
from asyncopd.teachers import check_loadable, shake_hands
from asyncopd.tokenizers_match import check_tokenizers, require_head
from asyncopd.workers import learner_devices, rollout_design, worker_specs


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """What a run knows before it loads a model.

    tokenizer       the student's, which prompts and answers go through
    generation      the student's generation configuration
    """

    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    ids: TokenIds
    objective: Objective
    prompts: PromptSet


def preflight(config: RunConfig, inputs: Inputs) -> Preflight:
    """Check configuration, models' outlines, tokenizers, data and context lengths.

    ConfigError or DataError says what to mend. Where a teacher's weights are not here, the student's outline stands for
    it; services say by handshake what they are.
    """
    rollout = config.rollout
    _check_processes(config)
    check_loadable(config)
    student = outline(config.student, "student")
    teacher_path = config.teacher.weights_of(DEFAULT) or config.student
    teacher = outline(teacher_path, "teacher")
    tokenizer = AutoTokenizer.from_pretrained(config.student)
    generation = generation_config(config.student, student)
    shared = check_tokenizers(tokenizer, AutoTokenizer.from_pretrained(teacher_path), generation)
    require_head(student.get_text_config(decoder=True).vocab_size, shared, "student")
    require_head(teacher.get_text_config(decoder=True).vocab_size, shared, "teacher")
    sampling = rollout.sampling
    config.objective.validate_with_sampling(
        temperature=sampling.temperature,
        truncated=sampling.truncated,
        vocabulary=shared.size,
    )
    objective = build_objective(config.objective)
    check_proposal(config.teacher.proposal, objective)
    _check_teacher_fraction(config, objective)
    teacher_context = _context(teacher)
    if config.teacher.scorer == "vllm":
        teacher_context = config.teacher.vllm.context_of(teacher_context)
    contexts = [_context(student), teacher_context, *_other_teachers(config, tokenizer)]
    evaluation_context = min(contexts)
    if rollout.engine in ("vllm", "vllm_server") and rollout.vllm.max_context:
        contexts.append(rollout.vllm.max_context)
    context = min(contexts) - sampling.max_new_tokens
    if context < 1:
        raise ConfigError(
            f"rollout.sampling.max_new_tokens is {sampling.max_new_tokens}; expected less than the shortest context of "
            f"student and teachers ({contexts}), so that a prompt fits before the answer"
        )
    prompts = load_prompts(config.data, tokenizer, context, inputs.train, inputs.held_out)
    _require_teachers(config, prompts)
    _check_evaluation(config.evaluation, prompts, sampling, evaluation_context)
    pad = tokenizer.pad_token_id
    ids = TokenIds(
        vocabulary=shared.size,
        eos_ids=shared.eos_ids,
        # Any id will do: padding is masked by length.
        pad_id=pad if pad is not None else 0,
    )
    return Preflight(
        tokenizer=tokenizer,
        generation=generation,
        ids=ids,
        objective=objective,
        prompts=prompts,
    )


def _check_processes(config: RunConfig) -> None:
    """ConfigError where the engines cannot be where they are asked to be, or published weights not reach them."""
    rollout, gpus = config.rollout, torch.cuda.is_available()
    if rollout.engine == "vllm":
        check_placement(rollout.vllm, rollout.workers, rollout.devices, gpus, os.sched_getaffinity(0))
    if rollout.engine == "vllm_server":
        check_servers(rollout.vllm, rollout.workers, rollout_design(config) is not None)
    check_publishing(config, gpus)
    check_devices(worker_specs(config), learner_devices())


def _check_evaluation(evaluation: EvaluationConfig, prompts: PromptSet, sampling: SamplingConfig, context: int) -> None:
    """ConfigError where an answer to a held-out prompt may outgrow the context of student or a teacher."""
    longest = max((len(prompt.token_ids) for prompt in prompts.held_out[: evaluation.prompts]), default=0)
    if evaluation.max_new_tokens is not None and evaluation.max_new_tokens < sampling.min_new_tokens:
        raise ConfigError(
            f"evaluation.max_new_tokens is {evaluation.max_new_tokens}; expected at least the "
            f"{sampling.min_new_tokens} of rollout.sampling.min_new_tokens"
        )
    if longest + (evaluation.max_new_tokens or 0) > context:
        raise ConfigError(
            f"evaluation.max_new_tokens is {evaluation.max_new_tokens}; expected at most {context - longest}, what the "
            f"longest held-out prompt leaves of the shortest context of student and teachers ({context} tokens)"
        )


def _check_teacher_fraction(config: RunConfig, objective: Objective) -> None:
    check_fraction(
        TeacherFraction.parse(config.rollout.teacher_fraction),
        objective,
        teachers=len(config.teacher.sources),
        loadable=config.teacher.weights_of(DEFAULT) is not None,
    )


def _other_teachers(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Context lengths of the services and of the named teachers, each checked against the student's tokenizer."""
    contexts = []
    for name, source in config.teacher.sources.items():
        if isinstance(source, tuple):
            contexts.append(shake_hands(config, source, name))
        elif name != DEFAULT:
            model = outline(source, f"teacher {name!r}")
            shared = check_tokenizers(tokenizer, AutoTokenizer.from_pretrained(source))
            require_head(model.get_text_config(decoder=True).vocab_size, shared, f"teacher {name!r}")
            contexts.append(_context(model))
    return contexts


def _require_teachers(config: RunConfig, prompts: PromptSet) -> None:
    """ConfigError where a prompt names a teacher that there is not."""
    known = config.teacher.sources
    held_out = prompts.held_out[: config.evaluation.prompts]
    for prompt in (*prompts.prompts, *held_out):
        if prompt.teacher not in known:
            kind = "held-out prompt" if prompt in held_out else "prompt"
            raise ConfigError(
                f"{kind} {prompt.index} names the teacher {prompt.teacher!r}; there are {sorted(known)}: add it to "
                f"teacher.named, as {prompt.teacher}=models/{prompt.teacher}"
            )


def save_inputs(folder: RunFolder, config: RunConfig, inputs: Inputs) -> RunConfig:
    """Write models given in memory into the run folder; the configuration that names them there."""
    if inputs.student is None and inputs.teacher is None:
        return config
    if inputs.tokenizer is None:
        raise ConfigError("a model is given in memory without its tokenizer; pass Inputs(tokenizer=...) beside it")
    for name, model in (("student", inputs.student), ("teacher", inputs.teacher)):
        if model is None:
            continue
        path = folder.path / "inputs" / name
        model.save_pretrained(path)
        inputs.tokenizer.save_pretrained(path)
        if name == "student":
            config = replace(config, student=path)
        else:
            config = replace(config, teacher=replace(config.teacher, model=path))
    folder.write_config(config)
    return config


def outline(path: Path, whose: str) -> PretrainedConfig:
    """The model's configuration; ConfigError if there is no checkpoint."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"the {whose}'s path {str(path)!r} holds no HF checkpoint (no config.json); "
            f"give a folder that save_pretrained wrote"
        )
    return AutoConfig.from_pretrained(path)


def _context(model: PretrainedConfig) -> int:
    return model.get_text_config(decoder=True).max_position_embeddings


def generation_config(path: Path, model: PretrainedConfig) -> GenerationConfig:
    """The generation configuration of a checkpoint, or what its model's configuration says."""
    if (path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_model_config(model)
