"""Rollout: the engine seam, its engines, and the pool that steps them."""
