"""The publishing seam: how a policy version reaches the rollout pool."""

from asyncopd.publish.weights import WeightPublisher, WeightStore

__all__ = ["WeightPublisher", "WeightStore"]
