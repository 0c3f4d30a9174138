"""What a caller of ``run`` passes in and gets back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from asyncopd.evaluation import HeldOut
from asyncopd.tracking.metrics import HeldOutLike
from asyncopd.tracking.summary import RunSummary


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """What a caller wants to be told, on rank 0.

    on_step         (policy version, metrics) after each optimizer step
    on_evaluation   (policy version, held-out figures) after each evaluation
    on_checkpoint   (policy version, folder) after each checkpoint
    evaluate        own evaluation, called with (student, policy version) beside the held-out one; its values are logged
    """

    on_step: Callable[[int, Mapping[str, float]], None] | None = None
    on_evaluation: Callable[[int, HeldOut], None] | None = None
    on_checkpoint: Callable[[int, Path], None] | None = None
    evaluate: Callable[[nn.Module, int], Mapping[str, float]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Objects in memory that replace what the configuration would read from disk.

    student, teacher   models, saved into the run folder so that the worker processes can load them
    tokenizer       of both; needed with a model in memory
    train, held_out   data sets with the columns that ``data`` names
    """

    student: PreTrainedModel | None = None
    teacher: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    train: Dataset | None = None
    held_out: Dataset | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a run gives back.

    path            the run folder
    policy_version  optimizer steps done
    stopped         whether it was stopped before its last step; ``resume=True`` goes on
    summary         the figures of ``summary.json``; None on ranks other than 0 and for a stopped run
    before, after   held-out evaluations; None where switched off, and on other ranks
    final           the student as an HF checkpoint; None for a stopped run
    """

    path: Path
    policy_version: int
    stopped: bool
    summary: RunSummary | None = None
    before: HeldOutLike | None = None
    after: HeldOutLike | None = None
    final: Path | None = None
