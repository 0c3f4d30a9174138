"""The optimizers by name."""

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn

from asyncopd.errors import ConfigError

OPTIMIZERS = ("adamw", "adamw_8bit")


def require_optimizer(name: str) -> None:
    """ConfigError for an unknown optimizer, or one whose package is missing."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"learner.optimizer is {name!r}; expected one of {', '.join(OPTIMIZERS)}")
    if name == "adamw_8bit" and find_spec("torchao") is None:
        raise ConfigError(
            "learner.optimizer adamw_8bit needs the package torchao, which is not installed: "
            "pip install 'asyncopd[8bit]', or set learner.optimizer to adamw"
        )


def build_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer over the parameters that are trained; ``adamw_8bit`` keeps both moments in 8 bits, in blocks."""
    require_optimizer(name)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ConfigError(
            "no parameter of the student is trained; train the embeddings or the head (learner.freeze_*), or adapters"
        )
    if name == "adamw_8bit":
        # Imported by name, since the package is an extra.
        return import_module("torchao.optim").AdamW8bit(trained, lr=lr, betas=betas, weight_decay=weight_decay)
    return torch.optim.AdamW(trained, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
