"""The rollout seam: what the pool asks of anything that can generate.

An engine is stepped. Between two steps the pool may submit more requests, swap the weights or send a heartbeat, so
continuous batching, mid-generation weight swaps and liveness need nothing else.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from asyncopd.types import Rollout, RolloutRequest


class RolloutEngine(Protocol):
    """Generates answers with behaviour logprobs, candidate draws and a policy version on every token."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token will be sampled from; -1 before the first load."""

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned."""

    def load_weights(self, directory: Path, version: int) -> None:
        """Take the weights published as ``version``; tokens sampled from now on carry that version."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Take requests; they start together at the next step.

        RequestRefusedError, and none is taken, if one of them can never be served.
        """

    def step(self) -> list[Rollout]:
        """Sample one token for every answer in flight; the answers that ended with it."""

    def abandon(self, uids: Sequence[str]) -> None:
        """Forget requests whose lease was lost."""

    def restart(self, keep_tokens: bool) -> None:
        """Put every answer in flight through the weights held now, so that nothing of older ones is left in its state.

        With ``keep_tokens`` it goes on after the tokens that it has, which keep their versions; otherwise it begins
        anew.
        """

    def logprobs(self, ids: Sequence[int]) -> Tensor | None:
        """Logprobs (nats, float32 [len(ids) - 1]) of each token after the first, given those before it.

        At temperature 1 over the real vocabulary, under the weights held now; None for an engine without a model.
        """
