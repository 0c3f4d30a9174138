"""Scored rollouts -> padded micro-batches under a token budget.

Shape suffixes: N sequences, L padded length, T valid response tokens (concatenated over sequences), C candidates.

A token is valid when it is a response token and its record is whole and finite; only valid tokens reach the head, so
padding, masking and the pad id cannot touch the loss.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncopd.objectives import valid_positions
from asyncopd.objectives.tokens import Candidates, Tokens
from asyncopd.types import NO_VERSION, ScoredRollout
from teacher_cache.record import Origin


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CandidateBlock:
    """One candidate set of all tokens of a micro-batch; ``ids_TC`` None is the whole vocabulary in order."""

    origin: Origin
    ids_TC: Tensor | None
    log_q_TC: Tensor
    log_w_TC: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Sequences that go through the student together.

    input_ids_NL, attention_mask_NL   int64, padded on the right
    state_T         int64 index into the flattened [N * L] states: the state that predicts each token
    sampled_T       int64 id of the rollout's own token
    log_q_T, log_b_T   float32 teacher and behaviour logprobs (nats) of the sampled tokens
    sequence_T      int64 index of the sequence within the micro-batch
    staleness_T     int64 policy versions; NO_VERSION where no student sampled the token
    blocks          the candidate sets
    """

    input_ids_NL: Tensor
    attention_mask_NL: Tensor
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


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: longest first, at most ``token_budget`` padded tokens each.

    A sequence longer than the budget is trained alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    plan: list[list[int]] = []
    for index in order:
        # The first of a micro-batch is its longest, so it sets the padded length.
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= token_budget:
            plan[-1].append(index)
        else:
            plan.append([index])
    return plan


def collate(
    samples: Sequence[ScoredRollout],
    *,
    version: int,
    origins: Collection[Origin],
    pad_id: int,
    device: torch.device,
) -> MicroBatch:
    """One micro-batch from scored rollouts.

    ``version`` is the learner's policy version, ``origins`` the candidate sets that the objective reads.
    """
    lengths = [len(s.rollout.prompt_ids) + len(s.rollout.response_ids_T) for s in samples]
    input_ids_NL = torch.full((len(samples), max(lengths, default=1)), pad_id, dtype=torch.int64)
    attention_mask_NL = torch.zeros_like(input_ids_NL)
    valid = [valid_positions(s.record, origins) for s in samples]
    states = []
    for row, (sample, keep_T) in enumerate(zip(samples, valid, strict=True)):
        prompt = torch.tensor(sample.rollout.prompt_ids)
        sequence = torch.cat([prompt, sample.rollout.response_ids_T.long()])
        input_ids_NL[row, : len(sequence)] = sequence
        attention_mask_NL[row, : len(sequence)] = 1
        # The state at position i predicts the token at i + 1.
        states.append(row * input_ids_NL.shape[1] + len(prompt) - 1 + keep_T.nonzero()[:, 0])
    rollouts, records = [s.rollout for s in samples], [s.record for s in samples]
    versions = _joined([r.versions_T for r in rollouts], valid).long()
    sequence_T = torch.cat([torch.full((len(s),), row) for row, s in enumerate(states)])
    return MicroBatch(
        input_ids_NL=input_ids_NL.to(device),
        attention_mask_NL=attention_mask_NL.to(device),
        state_T=torch.cat(states).to(device),
        sampled_T=_joined([r.response_ids_T for r in rollouts], valid).long().to(device),
        log_q_T=_joined([r.log_q_T for r in records], valid).to(device),
        log_b_T=_joined([r.log_b_T for r in rollouts], valid).to(device),
        sequence_T=sequence_T.to(device),
        staleness_T=(version - versions).where(versions != NO_VERSION, NO_VERSION).to(device),
        blocks=tuple(_block(samples, origin, valid, device) for origin in sorted(origins)),
    )


def _block(
    samples: Sequence[ScoredRollout], origin: Origin, valid: list[Tensor], device: torch.device
) -> CandidateBlock:
    sets = [s.record.of_origin(origin) for s in samples]
    dense = sets[0].design == "full"
    scores = [s.log_q_TC for s in sets if s.log_q_TC is not None]
    return CandidateBlock(
        origin=origin,
        ids_TC=None if dense else _joined([s.ids_TC for s in sets], valid).long().to(device),
        log_q_TC=_joined(scores, valid).to(device),
        log_w_TC=_joined([s.log_w_TC for s in sets], valid).to(device),
    )


def _joined(tensors: Sequence[Tensor], valid: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor[keep_T] for tensor, keep_T in zip(tensors, valid, strict=True)])
