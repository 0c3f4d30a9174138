"""The publishing seam: how a policy version reaches the rollout pool."""

from asyncopd.publish.stream import LazyWeight, Weights, materialised, snapshot, take_part, whole
from asyncopd.publish.weights import FileSource, WeightPublisher, WeightSource, WeightStore

__all__ = [
    "FileSource",
    "LazyWeight",
    "WeightPublisher",
    "WeightSource",
    "WeightStore",
    "Weights",
    "materialised",
    "snapshot",
    "take_part",
    "whole",
]
