"""A step's loss and gradient are those of its tokens, however the tokens are batched, padded, ordered or masked."""

import copy
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from asyncopd.errors import ConfigError
from asyncopd.learner.batching import MicroBatch, Rows, balanced_shares, collate, plan_micro_batches, split_to
from asyncopd.learner.head import HeadShape
from asyncopd.learner.module import StudentModule
from asyncopd.learner.packing import packs
from asyncopd.learner.step import Learner, LearnerConfig
from asyncopd.objectives import ObjectiveConfig, build_objective
from asyncopd.types import NO_VERSION, Rollout, ScoredRollout
from teacher_cache.record import CandidateSet, TeacherRecord
from tests.conftest import EOS, VOCABULARY, make_tiny_llama

CANDIDATES = 6
OBJECTIVE = build_objective(ObjectiveConfig(name="reverse_kl", design=f"systematic({CANDIDATES})"))


def _sample(index: int, prompt: int, response: int) -> ScoredRollout:
    """An answer that ends with EOS, with made-up candidates and scores."""
    generator = torch.Generator().manual_seed(index)

    def logprobs(*shape: int) -> Tensor:
        return -5 * torch.rand(*shape, generator=generator)

    ids_T = torch.randint(VOCABULARY, (response,), generator=generator, dtype=torch.int32)
    ids_T[-1] = EOS
    candidates = CandidateSet(
        origin="student",
        design=f"systematic({CANDIDATES})",
        temperature=1.0,
        version=0,
        ids_TC=torch.randint(VOCABULARY, (response, CANDIDATES), generator=generator, dtype=torch.int32),
        log_w_TC=torch.rand(response, CANDIDATES, generator=generator),
        log_q_TC=logprobs(response, CANDIDATES),
    )
    rollout = Rollout(
        uid=f"0-{index}-0-0",
        prompt_ids=tuple(torch.randint(VOCABULARY, (prompt,), generator=generator).tolist()),
        response_ids_T=ids_T,
        versions_T=torch.zeros(response, dtype=torch.int32),
        log_b_T=logprobs(response),
        finish="eos",
        candidates=candidates,
    )
    record = TeacherRecord(
        temperature=1.0,
        teacher="default",
        log_q_T=logprobs(response),
        entropy_T=-logprobs(response),
        sets=(candidates,),
    )
    return ScoredRollout(rollout=rollout, record=record)


SAMPLES = [_sample(index, 3 + index % 4, 2 + 3 * (index % 3)) for index in range(7)]


def _gradients(
    samples: list[ScoredRollout], token_budget: int, pad_id: int = EOS, packed: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Loss and float64 gradient of a token mean over ``samples`` in micro-batches of ``token_budget``."""
    model = make_tiny_llama(1, layers=2).double()
    module = StudentModule(model, OBJECTIVE, HeadShape(vocabulary=VOCABULARY, compute_dtype=torch.float64))
    lengths = [len(s.rollout.prompt_ids) + len(s.rollout.response_ids_T) for s in samples]
    micros = [
        collate(
            [samples[i] for i in group],
            version=0,
            origins=["student"],
            pad_id=pad_id,
            device=torch.device("cpu"),
            packed=packed,
        )
        for group in plan_micro_batches(lengths, token_budget, packed=packed)
    ]
    tokens = sum(len(micro.state_T) for micro in micros)
    loss = 0.0
    for micro in micros:
        result = module(micro, torch.full((len(micro.state_T),), 1 / tokens, dtype=torch.float64))
        result.loss.backward()
        loss += result.loss.item()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1, 20, 45, 10_000])
@pytest.mark.parametrize("seed", [0, 1])
def test_split_order_and_packing_of_a_step_do_not_change_loss_or_gradient(packed: bool, budget: int, seed: int) -> None:
    order = torch.randperm(len(SAMPLES), generator=torch.Generator().manual_seed(seed)).tolist()
    whole_loss, whole = _gradients(SAMPLES, 10_000)
    split_loss, split = _gradients([SAMPLES[i] for i in order], budget, packed=packed)
    assert split_loss == pytest.approx(whole_loss, abs=1e-12)
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], atol=1e-10, rtol=1e-10)


def test_the_pad_id_touches_nothing_and_eos_is_trained() -> None:
    """pad == eos in SmolLM2: a mask by pad id would leave every EOS untrained."""
    loss, gradients = _gradients(SAMPLES, 10_000, pad_id=EOS)
    other_loss, others = _gradients(SAMPLES, 10_000, pad_id=7)
    assert loss == pytest.approx(other_loss, abs=1e-12)
    for name in gradients:
        torch.testing.assert_close(gradients[name], others[name], atol=1e-12, rtol=1e-12)
    micro = collate(SAMPLES, version=0, origins=["student"], pad_id=EOS, device=torch.device("cpu"))
    assert len(micro.state_T) == sum(len(s.rollout.response_ids_T) for s in SAMPLES)
    assert (micro.sampled_T == EOS).sum() >= len(SAMPLES)


def test_a_token_is_read_from_the_state_before_it() -> None:
    model = make_tiny_llama(1, layers=2).double()
    module = StudentModule(model, OBJECTIVE, HeadShape(vocabulary=VOCABULARY, compute_dtype=torch.float64))
    micro = collate(SAMPLES, version=0, origins=["student"], pad_id=0, device=torch.device("cpu"))
    own_T = module.logprobs(micro)[:, 0]
    naive = []
    for sample in SAMPLES:
        sequence = [*sample.rollout.prompt_ids, *sample.rollout.response_ids_T.tolist()]
        for place in range(len(sample.rollout.prompt_ids), len(sequence)):
            with torch.no_grad():
                logits_V = model(torch.tensor([sequence[:place]])).logits[0, -1, :VOCABULARY]
            naive.append(logits_V.log_softmax(-1)[sequence[place]])
    torch.testing.assert_close(own_T, torch.stack(naive), atol=1e-10, rtol=1e-10)


def _with_whole_vocabulary(sample: ScoredRollout) -> ScoredRollout:
    """The sample scored by the ``full`` design."""
    length = len(sample.rollout.response_ids_T)
    scores_TV = torch.randn(length, VOCABULARY, generator=torch.Generator().manual_seed(length)).log_softmax(-1)
    everything = CandidateSet(
        origin="teacher",
        design="full",
        temperature=1.0,
        version=None,
        ids_TC=torch.arange(VOCABULARY, dtype=torch.int32).expand(length, -1),
        log_w_TC=torch.zeros(length, VOCABULARY),
        log_q_TC=scores_TV,
    )
    return ScoredRollout(rollout=sample.rollout, record=replace(sample.record, sets=(everything,)))


@pytest.mark.parametrize("packed", [False, True])
def test_the_whole_vocabulary_is_trained_from_the_records_scores_without_a_copy(packed: bool) -> None:
    samples = [_with_whole_vocabulary(sample) for sample in SAMPLES]
    model = make_tiny_llama(1, layers=2).double()
    # Three tokens a chunk, so that chunks cross from one record into the next.
    shape = HeadShape(vocabulary=VOCABULARY, compute_dtype=torch.float64, chunk_bytes=VOCABULARY * 8 * 13 * 3)
    module = StudentModule(model, build_objective(ObjectiveConfig(name="reverse_kl", design="full")), shape)
    micro = collate(samples, version=0, origins=["teacher"], pad_id=0, device=torch.device("cpu"), packed=packed)
    (block,) = micro.blocks
    assert isinstance(block.log_q_TC, Rows)
    for part, sample in zip(block.log_q_TC.parts, samples, strict=True):
        assert part is sample.record.sets[0].log_q_TC
    divergence_T = module(micro, torch.ones(len(micro.state_T), dtype=torch.float64)).metrics["divergence"]
    exact = []
    for sample in samples:
        sequence = torch.tensor([*sample.rollout.prompt_ids, *sample.rollout.response_ids_T.tolist()])
        logits_LV = model(sequence[None]).logits[0, len(sample.rollout.prompt_ids) - 1 : -1, :VOCABULARY]
        log_p_TV, log_q_TV = logits_LV.log_softmax(-1), sample.record.sets[0].log_q_TC.double()
        exact.append((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1).detach())
    # The scores are float32, whose sum over the vocabulary is one to 1e-6 only.
    torch.testing.assert_close(divergence_T, torch.cat(exact), atol=1e-5, rtol=1e-5)


def _masked(sample: ScoredRollout, positions: list[int]) -> ScoredRollout:
    """The sample without a score at one candidate of each of ``positions``."""
    (candidates,) = sample.record.sets
    assert candidates.log_q_TC is not None
    scores_TC = candidates.log_q_TC.clone()
    scores_TC[positions, 2] = math.nan
    return ScoredRollout(rollout=sample.rollout, record=replace(sample.record, sets=(candidates.scored(scores_TC),)))


def test_one_missing_score_masks_its_whole_position_and_no_other() -> None:
    micro = collate([_masked(SAMPLES[2], [1, 4])], version=0, origins=["student"], pad_id=0, device=torch.device("cpu"))
    kept = [t for t in range(len(SAMPLES[2].rollout.response_ids_T)) if t not in (1, 4)]
    assert micro.sampled_T.tolist() == SAMPLES[2].rollout.response_ids_T[kept].tolist()


def test_a_step_without_a_valid_token_leaves_the_student_as_it_is() -> None:
    model = make_tiny_llama(1, layers=2)
    before = copy.deepcopy(model.state_dict())
    learner = Learner(
        model,
        OBJECTIVE,
        LearnerConfig(dtype="fp32", warmup_steps=0),
        accelerator=Accelerator(cpu=True),
        steps=2,
        shape=HeadShape(vocabulary=VOCABULARY),
        pad_id=0,
    )
    empty = [_masked(s, list(range(len(s.rollout.response_ids_T)))) for s in SAMPLES[:2]]
    metrics = learner.step(empty, 0)
    assert (metrics["tokens"], metrics["grad_norm"]) == (0, 0)
    assert all(torch.equal(before[name], weight) for name, weight in learner.student.state_dict().items())


@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_hold_every_sequence_once_within_the_budget(packed: bool) -> None:
    lengths = [5, 90, 17, 17, 3, 40, 200]
    plan = plan_micro_batches(lengths, 100, packed=packed)
    assert sorted(index for group in plan for index in group) == list(range(7))
    sizes = [
        sum(lengths[index] for index in group) if packed else len(group) * max(lengths[index] for index in group)
        for group in plan
    ]
    assert all(size <= 100 for size, group in zip(sizes, plan, strict=True) if len(group) > 1)
    assert [6] in plan  # longer than the budget: alone
    assert len(plan) == (3 if packed else 5)


def test_padded_micro_batches_cost_no_more_than_any_other_cut() -> None:
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.choice([3, 10, 30, 90, 250]) for _ in range(rng.randint(1, 7))]
        budget = rng.choice([64, 320, 640])
        longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        costs = []
        for cuts in product([False, True], repeat=len(lengths) - 1):
            edges = [0, *(place for place, cut in enumerate(cuts, start=1) if cut), len(lengths)]
            groups = [longest_first[begin:end] for begin, end in pairwise(edges)]
            sizes = [len(group) * lengths[group[0]] for group in groups]
            if all(size <= budget or len(group) == 1 for size, group in zip(sizes, groups, strict=True)):
                costs.append(sum(sizes) + len(groups) * (budget // 32))
        plan = plan_micro_batches(lengths, budget)
        cost = sum(len(group) * max(lengths[index] for index in group) for group in plan) + len(plan) * (budget // 32)
        assert cost == min(costs)
        assert sorted(index for group in plan for index in group) == list(range(len(lengths)))


def test_a_plan_is_cut_where_it_holds_most_until_there_are_enough_micro_batches() -> None:
    lengths = [5, 90, 17, 17, 3, 40, 200]
    plan = plan_micro_batches(lengths, 100, packed=True)
    cut = split_to(plan, lengths, 5)
    assert sorted(index for group in cut for index in group) == list(range(7))
    assert len(cut) == 5
    assert max(sum(lengths[i] for i in group) for group in cut if len(group) > 1) <= 60
    assert len(split_to(plan, lengths, 9)) == 7  # never an empty one


def test_ranks_get_equal_shares_of_the_tokens() -> None:
    tokens = [400, 10, 10, 10, 390, 200, 210, 10]
    shares = balanced_shares(tokens, 3)
    assert sorted(index for share in shares for index in share) == list(range(8))
    loads = [sum(tokens[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= 30
    assert all(balanced_shares([5, 0, 0], 3))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_is_taken_up_only_where_the_student_keeps_sequences_apart(attention: str) -> None:
    model = make_tiny_llama(1, layers=2)
    model.set_attn_implementation(attention)
    module = StudentModule(model, OBJECTIVE, HeadShape(vocabulary=VOCABULARY))

    def packed(packing: str, name: str, logprobs: Callable[[MicroBatch], Tensor] = module.logprobs) -> bool:
        return packs(packing, name, VOCABULARY, torch.device("cpu"), logprobs)

    def blind(micro: MicroBatch) -> Tensor:
        """An attention that does not read the positions."""
        return module.logprobs(replace(micro, position_ids_NL=None))

    assert packed("on", attention)
    assert packed("auto", "flash_attention_2")
    assert not packed("auto", attention)
    assert not packed("off", "flash_attention_2")
    assert not packed("auto", "flash_attention_2", blind)
    with pytest.raises(ConfigError, match="see each other"):
        packed("on", attention, blind)


def test_tokens_that_no_student_sampled_train_alike_and_have_no_staleness_and_no_logprob_gap() -> None:
    def foreign(sample: ScoredRollout) -> ScoredRollout:
        rollout = sample.rollout
        versions_T = torch.full_like(rollout.versions_T, NO_VERSION)
        unknown_T = torch.full_like(rollout.log_b_T, math.nan)
        return replace(sample, rollout=replace(rollout, versions_T=versions_T, log_b_T=unknown_T))

    def trained(samples: list[ScoredRollout]) -> tuple[dict[str, float], dict[str, Tensor]]:
        learner = Learner(
            make_tiny_llama(1, layers=2),
            OBJECTIVE,
            LearnerConfig(dtype="fp32", warmup_steps=0),
            accelerator=Accelerator(cpu=True),
            steps=2,
            shape=HeadShape(vocabulary=VOCABULARY),
            pad_id=0,
        )
        return learner.step(samples, 3), learner.weights()

    own, own_weights = trained(SAMPLES)
    none, none_weights = trained([foreign(sample) for sample in SAMPLES])
    mixed, _ = trained([*SAMPLES[:3], *(foreign(sample) for sample in SAMPLES[3:])])
    assert all(torch.equal(own_weights[name], weight) for name, weight in none_weights.items())
    assert own["loss"] == none["loss"]
    assert own["logprob_gap"] > 0
    assert "logprob_gap" not in none
    assert not any("staleness" in name for name in none)
    assert all(math.isfinite(value) for value in mixed.values())
    assert mixed["tokens/staleness_3-4"] == sum(len(s.rollout.response_ids_T) for s in SAMPLES[:3])
