"""Losses of other libraries as subjects; each imports its library when it is first called.

    asyncopd audit asyncopd.audit.adapters:trl_jsd

An adapter is a function of one ``AuditBatch``: it gives the library the tensors that it expects and returns what the
library returns, as a number a token or as the scalar that the batch's ``step_tokens`` calls for. Shape suffixes: T
positions, V vocabulary.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from asyncopd.audit.subject import AuditBatch, Loss, Subject
from asyncopd.audit.targets import jsd
from asyncopd.errors import ConfigError

_TRL_HOMES = ("trl.experimental.gkd", "trl.trainer.gkd_trainer")
"""Modules in which TRL has kept its generalised knowledge distillation trainer, newest first."""


def _trl_generalized_jsd() -> Callable[..., Tensor]:
    """TRL's static loss; ConfigError where TRL is not installed or has moved it."""
    for home in _TRL_HOMES:
        try:
            return importlib.import_module(home).GKDTrainer.generalized_jsd_loss
        except ModuleNotFoundError:
            continue
    raise ConfigError(f"TRL's loss is in none of {', '.join(_TRL_HOMES)}; install trl to audit it")


def _trl_loss(reduction: str) -> Loss:
    """TRL's JSD (beta 0.5) over the real ids, with TRL's own mask; reduced by TRL, or summed and divided here."""

    def loss(batch: AuditBatch) -> Tensor:
        found = _trl_generalized_jsd()(
            batch.logits_TV[None, :, : batch.vocabulary],
            batch.teacher_TV[None, :, : batch.vocabulary],
            labels=torch.where(batch.mask_T, 0, -100)[None],
            beta=0.5,
            temperature=1.0,
            reduction=reduction,
        )
        return found / max(batch.step_tokens, 1) if reduction == "sum" else found

    return loss


trl_jsd = Subject(name="trl_jsd", loss=_trl_loss("sum"), target=jsd(0.5), design="full", origins=("teacher",))
"""TRL's JSD with the step's token count supplied from outside."""

trl_jsd_batchmean = Subject(
    name="trl_jsd_batchmean", loss=_trl_loss("batchmean"), target=jsd(0.5), design="full", origins=("teacher",)
)
"""The same with TRL's default reduction, a mean over the micro-batch."""
