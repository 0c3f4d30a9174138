"""How far a student is from its teacher on its own fresh answers to held-out prompts.

Shape suffixes: R response positions of a batch, V vocabulary, N answers.
"""

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from asyncopd.errors import ConfigError
from asyncopd.rollout.sampling import SamplingConfig
from asyncopd.rollout.transformers_engine import TransformersEngine
from asyncopd.types import Prompt, Rollout, RolloutRequest
from teacher_cache.causal_head import CPU_ROWS, HEAD_ROWS, CausalHead
from teacher_cache.causal_scorer import CausalModel
from teacher_cache.dense import FULL, dense_logprobs
from teacher_cache.identity import vocabulary_of
from teacher_cache.scorer import Scorer, ScoreRequest

EVALUATION_SEED = 20_011
"""Seeds the answers of every evaluation, so that before and after differ by the weights and not by luck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out evaluation of the published student, by the scoring stage between its work; nothing waits for it.

    It runs the student in ``rollout.dtype`` and the teacher in ``teacher.dtype``.
    """

    prompts: int = 40
    """Held-out prompts that are answered; 0 switches evaluation off."""
    every: int = 0
    """Optimizer steps between evaluations; 0 evaluates before the first and after the last step only."""
    max_new_tokens: int | None = None
    """Longest answer; None takes the run's ``sampling.max_new_tokens``."""
    batch: int = 20
    """Answers that are generated and compared at once."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("prompts", self.prompts, 0),
            ("every", self.every, 0),
            ("max_new_tokens", 1 if self.max_new_tokens is None else self.max_new_tokens, 1),
            ("batch", self.batch, 1),
        ):
            if value < least:
                raise ConfigError(f"evaluation.{name} is {value}; expected {least} or more: raise it")

    def due(self, version: int, steps: int) -> bool:
        """Whether ``version`` of a run of so many steps is evaluated."""
        return version in (0, steps) or bool(self.every and version % self.every == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean and the half-width of its 95% interval; NaN half-width where one answer gives no interval."""

    mean: float
    ci95: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """What one evaluation found.

    reverse_kl, forward_kl   nats per response token, mean over all tokens
    mean_length     response tokens an answer
    eos_share       share of answers that ended by themselves, 0 to 1
    samples         (prompt text, answer text) of every answer
    """

    reverse_kl: Estimate
    forward_kl: Estimate
    mean_length: Estimate
    eos_share: float
    samples: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedTeacher:
    """A teacher that is not run in this process: ``scorer`` is asked for its distributions, at its own temperature."""

    scorer: Scorer


def held_out_kl(
    student: PreTrainedModel | Path | str,
    teacher: PreTrainedModel | Path | str,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    temperature: float = 1.0,
    batch: int = 20,
    seed: int = EVALUATION_SEED,
    dtype: torch.dtype | None = None,
) -> HeldOut:
    """Exact KL between student and teacher on fresh answers of the student, all at once; see ``held_out_steps``.

    dtype        in which both models run; None leaves loaded models as they are. A model that must change is copied
    """
    teacher = _model(teacher, dtype)
    training = teacher.training
    head = CausalHead(teacher.eval(), vocabulary_of(tokenizer))
    steps = held_out_steps(
        _model(student, dtype),
        dict.fromkeys((prompt.teacher for prompt in prompts), head),
        prompts,
        sampling,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        temperature=temperature,
        batch=batch,
        seed=seed,
    )
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value
    finally:
        teacher.train(training)


def held_out_steps(
    student: PreTrainedModel,
    teachers: Mapping[str, CausalModel | AskedTeacher],
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    temperature: float = 1.0,
    batch: int = 20,
    seed: int = EVALUATION_SEED,
) -> Generator[None, None, HeldOut]:
    """Exact KL between student and teacher on fresh answers of the student, in short steps with other work between.

    At every response position both KLs are summed over the whole real vocabulary (``vocabulary_of``), normalised in
    float32; nothing is sampled but the answers, and no KL is clamped. The mean is over all response tokens; its
    interval treats answers as clusters, by the delta method for a ratio of sums: with ``s_i`` the KL summed over
    answer i, ``n_i`` its tokens and ``m = sum s / sum n``,

        var(m) = N / (N - 1) * sum_i (s_i - m * n_i)^2 / (sum_i n_i)^2,    half-width 1.96 * sqrt(var(m)).

    teachers     by the names that the prompts give
    temperature  of the divergence; answers are drawn as ``sampling`` says
    batch        answers that are generated, and compared, at once

    ConfigError if there are no prompts.
    """
    if not prompts:
        raise ConfigError("no held-out prompts to evaluate on; give some, or set evaluation.prompts to 0")
    vocabulary = vocabulary_of(tokenizer)
    training = student.training
    try:
        engine = TransformersEngine(
            student.eval(),
            vocabulary=vocabulary,
            eos_token_ids=eos_token_ids,
            sampling=sampling,
            run_seed=seed,
            version=0,
        )
        rollouts = yield from _answers(engine, prompts, batch)
        head = CausalHead(student, vocabulary)
        sums_N2 = yield from _all_sums(head, teachers, prompts, rollouts, batch, temperature)
    finally:
        student.train(training)
    lengths_N = torch.tensor([len(rollout.response_ids_T) for rollout in rollouts], dtype=torch.float64)
    texts = [tokenizer.decode(rollout.response_ids_T.tolist(), skip_special_tokens=True) for rollout in rollouts]
    return HeldOut(
        reverse_kl=ratio_estimate(sums_N2[:, 0], lengths_N),
        forward_kl=ratio_estimate(sums_N2[:, 1], lengths_N),
        mean_length=ratio_estimate(lengths_N, torch.ones_like(lengths_N)),
        eos_share=sum(rollout.finish == "eos" for rollout in rollouts) / len(rollouts),
        samples=tuple((prompt.text, text) for prompt, text in zip(prompts, texts, strict=True)),
    )


def ratio_estimate(sums_N: Tensor, counts_N: Tensor) -> Estimate:
    """``sum(sums) / sum(counts)`` over clusters, with its 95% half-width (formula: ``held_out_kl``)."""
    clusters, total = len(counts_N), counts_N.sum()
    mean = sums_N.sum() / total
    if clusters < 2:
        return Estimate(mean=float(mean), ci95=math.nan)
    variance = clusters / (clusters - 1) * ((sums_N - mean * counts_N) ** 2).sum() / total**2
    return Estimate(mean=float(mean), ci95=1.96 * float(variance.sqrt()))


def _model(model: PreTrainedModel | Path | str, dtype: torch.dtype | None) -> PreTrainedModel:
    if isinstance(model, (str, Path)):
        return AutoModelForCausalLM.from_pretrained(model, dtype="auto" if dtype is None else dtype)
    return model if dtype in (None, model.dtype) else copy.deepcopy(model).to(dtype)


def _answers(engine: TransformersEngine, prompts: Sequence[Prompt], batch: int) -> Generator[None, None, list[Rollout]]:
    """One answer a prompt, in order; as answers end, the next prompts take their places."""
    waiting = [
        RolloutRequest(
            uid=f"held-out-{place}",
            prompt_ids=prompt.token_ids,
            min_version=0,
            max_new_tokens=prompt.max_new_tokens,
        )
        for place, prompt in enumerate(prompts)
    ]
    order = [request.uid for request in waiting]
    done: dict[str, Rollout] = {}
    while waiting or engine.in_flight:
        free = batch - engine.in_flight
        engine.submit(waiting[:free])
        waiting = waiting[free:]
        done |= {rollout.uid: rollout for rollout in engine.step()}
        yield
    return [done[uid] for uid in order]


def _all_sums(
    student: CausalModel,
    teachers: Mapping[str, CausalModel | AskedTeacher],
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    batch: int,
    temperature: float,
) -> Generator[None, None, Tensor]:
    """Both KLs of every answer: float64 [N, 2]. Each is with the teacher that its prompt names."""
    sums_N2 = torch.zeros((len(rollouts), 2), dtype=torch.float64)
    for name in dict.fromkeys(prompt.teacher for prompt in prompts):
        own = [index for index, prompt in enumerate(prompts) if prompt.teacher == name]
        own.sort(key=lambda index: len(_tokens(rollouts[index])))
        for first in range(0, len(own), batch):
            indices = own[first : first + batch]
            answers = [rollouts[index] for index in indices]
            sums_N2[indices] = yield from _summed_kl(student, teachers[name], answers, temperature)
    return sums_N2


def _tokens(rollout: Rollout) -> list[int]:
    return [*rollout.prompt_ids, *rollout.response_ids_T[:-1].tolist()]


def _summed_kl(
    student: CausalModel, teacher: CausalModel | AskedTeacher, rollouts: Sequence[Rollout], temperature: float
) -> Generator[None, None, Tensor]:
    """Reverse and forward KL (nats) of each answer, summed over its tokens: float64 [N, 2]."""
    if isinstance(teacher, AskedTeacher):
        return (yield from _asked_kl(student, teacher.scorer, rollouts, temperature))
    models, hidden = (student, teacher), []
    for model in models:
        hidden.append(_states(model, rollouts))
        yield
    per_token = []
    # The teacher may be on another device, which would go through other numbers of rows at once.
    size = CPU_ROWS if "cpu" in {states_RH.device.type for states_RH in hidden} else HEAD_ROWS
    rows = [model.distributions(states_RH, temperature, size) for model, states_RH in zip(models, hidden, strict=True)]
    for ours, theirs in zip(*rows, strict=True):
        log_q_RV, q_RV = (each.to(ours.probs_RV.device) for each in (theirs.all(), theirs.probs_RV))
        per_token.append(_both_kl(ours.all(), ours.probs_RV, log_q_RV, q_RV))
        yield
    lengths = [len(rollout.response_ids_T) for rollout in rollouts]
    return torch.stack([answer_T2.sum(0) for answer_T2 in torch.cat(per_token).split(lengths)])


def _asked_kl(
    student: CausalModel, scorer: Scorer, rollouts: Sequence[Rollout], temperature: float
) -> Generator[None, None, Tensor]:
    """As ``_summed_kl``, of a teacher whose distributions are asked for piece by piece."""
    states_RH = _states(student, rollouts)
    sums = []
    for rollout, states_TH in zip(
        rollouts, states_RH.split([len(each.response_ids_T) for each in rollouts]), strict=True
    ):
        request = ScoreRequest(
            uid=rollout.uid,
            prompt_ids=rollout.prompt_ids,
            response_ids_T=rollout.response_ids_T,
            candidates=None,
            draw=FULL,
            run_seed=0,
        )
        total_2 = torch.zeros(2, dtype=torch.float64)
        for first, log_q_tV in dense_logprobs(scorer, request, vocabulary=student.vocabulary):
            done = 0
            for rows in student.distributions(states_TH[first : first + len(log_q_tV)], temperature):
                log_q_RV = log_q_tV[done : done + len(rows.probs_RV)].to(rows.probs_RV.device)
                total_2 += _both_kl(rows.all(), rows.probs_RV, log_q_RV, log_q_RV.exp()).sum(0)
                done += len(log_q_RV)
            yield
        sums.append(total_2)
    return torch.stack(sums)


def _states(model: CausalModel, rollouts: Sequence[Rollout]) -> Tensor:
    """The states that give the distributions of the response tokens, one answer after the other: [R, H]."""
    states_NLH = model.hidden([_tokens(rollout) for rollout in rollouts])
    # The state after token i gives the distribution of token i + 1.
    return torch.cat(
        [
            states_LH[len(rollout.prompt_ids) - 1 : len(_tokens(rollout))]
            for states_LH, rollout in zip(states_NLH, rollouts, strict=True)
        ]
    )


def _both_kl(log_p_RV: Tensor, p_RV: Tensor, log_q_RV: Tensor, q_RV: Tensor) -> Tensor:
    """Reverse and forward KL (nats) at some positions: float64 [R, 2]."""
    apart_RV = log_p_RV - log_q_RV
    reverse_R = torch.linalg.vecdot(p_RV, apart_RV)
    forward_R = -torch.linalg.vecdot(q_RV, apart_RV)
    return torch.stack([reverse_R, forward_R], dim=1).double().cpu()
