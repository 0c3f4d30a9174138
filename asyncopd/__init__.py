"""Asynchronous on-policy distillation; the data flow is drawn in `asyncopd/pipeline.py`.

The names below load on first use, so that `asyncopd launch` and `asyncopd --help` start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncopd.config import RunConfig
    from asyncopd.interface import Callbacks, Inputs, RunResult
    from asyncopd.pipeline import run
    from asyncopd.recipe import main as recipe_main

_HOMES = {
    "Callbacks": ("asyncopd.interface", "Callbacks"),
    "Inputs": ("asyncopd.interface", "Inputs"),
    "RunConfig": ("asyncopd.config", "RunConfig"),
    "RunResult": ("asyncopd.interface", "RunResult"),
    "recipe_main": ("asyncopd.recipe", "main"),
    "run": ("asyncopd.pipeline", "run"),
}

__all__ = ["Callbacks", "Inputs", "RunConfig", "RunResult", "recipe_main", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'asyncopd' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
