"""Scored rollouts -> shares of the ranks -> micro-batches under a token budget, padded or packed.

Shape suffixes: N rows, L length of a row, T valid response tokens (concatenated over sequences), C candidates.

Padded, a row is one sequence and padding on its right. Packed, all sequences of a micro-batch follow each other in one
row, and attention keeps them apart by their positions, which start again at 0.

A token is valid when it is a response token and its record is whole and finite; only valid tokens reach the head, so
padding, masking and the pad id cannot touch the loss.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asyncopd.objectives import valid_positions
from asyncopd.objectives.tokens import Candidates, Tokens
from asyncopd.types import NO_VERSION, ScoredRollout
from teacher_cache.record import Origin

_STARTS = 32
"""A micro-batch costs its tokens, and this part of the budget to start."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """The rows of several tensors as one, read from where they are: scores of a whole vocabulary are not copied."""

    parts: tuple[Tensor, ...]
    device: torch.device

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(sum(len(part) for part in self.parts))
        found, before = [], 0
        for part in self.parts:
            found.append(part[max(start - before, 0) : max(stop - before, 0)])
            before += len(part)
        return torch.cat(found).to(self.device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CandidateBlock:
    """One candidate set of all tokens of a micro-batch; ``ids_TC`` None is the whole vocabulary in order."""

    origin: Origin
    ids_TC: Tensor | None
    log_q_TC: Tensor | Rows
    log_w_TC: Tensor | Rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Sequences that go through the student together.

    input_ids_NL    int64
    attention_mask_NL   int64, 0 on padding; None when packed
    position_ids_NL int64, from 0 in every sequence; None when padded, where they follow from the mask
    sequences       number of sequences
    state_T         int64 index into the flattened [N * L] states: the state that predicts each token
    sampled_T       int64 id of the rollout's own token
    log_q_T, log_b_T   float32 teacher and behaviour logprobs (nats) of the sampled tokens
    sequence_T      int64 index of the sequence within the micro-batch
    staleness_T     int64 policy versions; NO_VERSION where no student sampled the token
    blocks          the candidate sets
    """

    input_ids_NL: Tensor
    attention_mask_NL: Tensor | None
    position_ids_NL: Tensor | None
    sequences: int
    state_T: Tensor
    sampled_T: Tensor
    log_q_T: Tensor
    log_b_T: Tensor
    sequence_T: Tensor
    staleness_T: Tensor
    blocks: tuple[CandidateBlock, ...]

    @property
    def dense(self) -> bool:
        """Whether any set is the whole vocabulary."""
        return any(block.ids_TC is None for block in self.blocks)

    @property
    def ids_TC(self) -> Tensor | None:
        """All ids the head must give: the sampled token, then each block's; None for the whole vocabulary."""
        if self.dense:
            return None
        return torch.cat(
            [self.sampled_T[:, None], *(block.ids_TC for block in self.blocks if block.ids_TC is not None)], 1
        )

    def tokens(self, rows: slice, log_p_tC: Tensor) -> Tokens:
        """What the objective reads for the tokens ``rows``, given the head's logprobs at ``ids_TC``."""
        sets: dict[Origin, Candidates] = {}
        column = 1
        for block in self.blocks:
            if block.ids_TC is None:
                log_p = log_p_tC
            elif self.dense:
                log_p = log_p_tC.gather(1, block.ids_TC[rows])
            else:
                log_p = log_p_tC[:, column : column + block.ids_TC.shape[1]]
                column += block.ids_TC.shape[1]
            sets[block.origin] = Candidates(
                log_p_TC=log_p, log_q_TC=block.log_q_TC[rows], log_w_TC=block.log_w_TC[rows]
            )
        sampled = log_p_tC.gather(1, self.sampled_T[rows, None])[:, 0] if self.dense else log_p_tC[:, 0]
        return Tokens(
            log_p_T=sampled,
            log_q_T=self.log_q_T[rows],
            log_b_T=self.log_b_T[rows],
            sequence_T=self.sequence_T[rows],
            staleness_T=self.staleness_T[rows],
            student=sets.get("student"),
            teacher=sets.get("teacher"),
        )


def balanced_shares(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the samples of each rank: longest first, each to the rank that has the fewest tokens yet.

    No rank goes without a sample while there are as many samples as ranks.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], len(shares[rank]), rank))
        shares[rank].append(index)
        loads[rank] += tokens[index]
    return [sorted(share) for share in shares]


def plan_micro_batches(lengths: Sequence[int], token_budget: int, *, packed: bool = False) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: longest first, at most ``token_budget`` tokens each.

    Padding counts, unless ``packed``: of all ways to cut the ordered sequences the one with the fewest padded tokens,
    where one more micro-batch counts as 1/32 of the budget. A sequence longer than the budget is trained alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if not packed:
        return _fewest_padded_tokens(order, lengths, token_budget)
    plan: list[list[int]] = []
    for index in order:
        for group in plan:
            if sum(lengths[i] for i in [*group, index]) <= token_budget:
                group.append(index)
                break
        else:
            plan.append([index])
    return plan


def _fewest_padded_tokens(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """The cheapest cuts of a descending order, by dynamic programming over where the last micro-batch begins."""
    # Of the first n sequences: what their micro-batches cost at least, and where the last of these begins.
    costs, begins = [0], [0]
    for end in range(1, len(order) + 1):
        found: list[tuple[int, int]] = []
        for begin in range(end - 1, -1, -1):
            # The first of a micro-batch is its longest and sets the length of its rows.
            tokens = (end - begin) * lengths[order[begin]]
            if found and tokens > token_budget:
                break
            found.append((costs[begin] + tokens + token_budget // _STARTS, begin))
        cost, begin = min(found)
        costs.append(cost)
        begins.append(begin)
    plan: list[list[int]] = []
    end = len(order)
    while end > 0:
        plan.append(list(order[begins[end] : end]))
        end = begins[end]
    return plan[::-1]


def split_to(plan: Sequence[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """The plan cut into ``count`` micro-batches, always the one with the most tokens; fewer where samples run out.

    Every rank runs as many micro-batches as the one that needs the most.
    """
    plan = list(plan)
    while len(plan) < min(count, len(lengths)):
        group = max((group for group in plan if len(group) > 1), key=lambda group: sum(lengths[i] for i in group))
        halves = balanced_shares([lengths[i] for i in group], 2)
        place = plan.index(group)
        plan[place : place + 1] = [[group[i] for i in half] for half in halves]
    return plan


def collate(
    samples: Sequence[ScoredRollout],
    *,
    version: int,
    origins: Collection[Origin],
    pad_id: int,
    device: torch.device,
    packed: bool = False,
) -> MicroBatch:
    """One micro-batch from scored rollouts.

    ``version`` is the learner's policy version, ``origins`` the candidate sets that the objective reads.
    """
    valid = [valid_positions(s.record, origins) for s in samples]
    sequences = [torch.tensor([*s.rollout.prompt_ids, *s.rollout.response_ids_T.tolist()]) for s in samples]
    lengths = [len(sequence) for sequence in sequences]
    row_length = max(lengths)
    states, start = [], 0
    for sample, length, keep_T in zip(samples, lengths, valid, strict=True):
        # The state at position i predicts the token at i + 1.
        states.append(start + len(sample.rollout.prompt_ids) - 1 + keep_T.nonzero()[:, 0])
        start += length if packed else row_length
    mask_NL = position_ids_NL = None
    if packed:
        input_ids_NL = torch.cat(sequences)[None]
        position_ids_NL = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    else:
        input_ids_NL = pad_sequence(sequences, batch_first=True, padding_value=pad_id)
        mask_NL = (torch.arange(row_length) < torch.tensor(lengths)[:, None]).long().to(device)
    rollouts, records = [s.rollout for s in samples], [s.record for s in samples]
    versions = _joined([r.versions_T for r in rollouts], valid).long()
    sequence_T = torch.cat([torch.full((len(s),), row) for row, s in enumerate(states)])
    return MicroBatch(
        input_ids_NL=input_ids_NL.to(device),
        attention_mask_NL=mask_NL,
        position_ids_NL=position_ids_NL,
        sequences=len(samples),
        state_T=torch.cat(states).to(device),
        sampled_T=_joined([r.response_ids_T for r in rollouts], valid).long().to(device),
        log_q_T=_joined([r.log_q_T for r in records], valid).to(device),
        log_b_T=_joined([r.log_b_T for r in rollouts], valid).to(device),
        sequence_T=sequence_T.to(device),
        staleness_T=(version - versions).where(versions != NO_VERSION, NO_VERSION).to(device),
        blocks=tuple(_block(samples, origin, valid, device) for origin in sorted(origins)),
    )


def unscored(sample: ScoredRollout) -> ScoredRollout:
    """The sample without a score: it goes through the student, and no token of it is trained."""
    sets = tuple(
        each if each.log_q_TC is None else each.scored(torch.full_like(each.log_q_TC, math.nan))
        for each in sample.record.sets
    )
    log_q_T = torch.full_like(sample.record.log_q_T, math.nan)
    return replace(sample, record=replace(sample.record, log_q_T=log_q_T, sets=sets))


def _block(
    samples: Sequence[ScoredRollout], origin: Origin, valid: list[Tensor], device: torch.device
) -> CandidateBlock:
    sets = [s.record.of_origin(origin) for s in samples]
    scores = [s.log_q_TC for s in sets if s.log_q_TC is not None]
    weights = [s.log_w_TC for s in sets]
    if sets[0].design == "full":
        return CandidateBlock(
            origin=origin, ids_TC=None, log_q_TC=_rows(scores, valid, device), log_w_TC=_rows(weights, valid, device)
        )
    return CandidateBlock(
        origin=origin,
        ids_TC=_joined([s.ids_TC for s in sets], valid).long().to(device),
        log_q_TC=_joined(scores, valid).to(device),
        log_w_TC=_joined(weights, valid).to(device),
    )


def _rows(tensors: Sequence[Tensor], valid: Sequence[Tensor], device: torch.device) -> Rows:
    kept = (tensor if bool(keep_T.all()) else tensor[keep_T] for tensor, keep_T in zip(tensors, valid, strict=True))
    return Rows(parts=tuple(kept), device=device)


def _joined(tensors: Sequence[Tensor], valid: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor[keep_T] for tensor, keep_T in zip(tensors, valid, strict=True)])
