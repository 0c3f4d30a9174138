"""The publishing seam: how a policy version reaches the rollout pool."""

from asyncopd.publish.stream import LazyWeight, Weights, materialised, snapshot, take_part, whole
from asyncopd.publish.weights import WeightPublisher, WeightStore

__all__ = ["LazyWeight", "WeightPublisher", "WeightStore", "Weights", "materialised", "snapshot", "take_part", "whole"]
