"""Distributions over the vocabulary, normalised in float32.

Shape suffixes: R rows (positions), C ids a row, V real vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogitRows:
    """Distributions over the vocabulary at some rows.

    first       index of the first row
    shifted_RV  float32 logits at the temperature, less their maximum
    log_z_R     float32 log of the sum of ``exp(shifted_RV)``: logprobs (nats) are ``shifted_RV - log_z_R``
    probs_RV    float32 probabilities
    """

    first: int
    shifted_RV: Tensor
    log_z_R: Tensor
    probs_RV: Tensor

    def part(self, start: int, stop: int) -> "LogitRows":
        """Rows ``start`` to ``stop`` of these."""
        return LogitRows(
            first=self.first + start,
            shifted_RV=self.shifted_RV[start:stop],
            log_z_R=self.log_z_R[start:stop],
            probs_RV=self.probs_RV[start:stop],
        )

    def at(self, ids_RC: Tensor) -> Tensor:
        """Logprobs (nats, float32) at given ids (int64)."""
        return self.shifted_RV.gather(1, ids_RC) - self.log_z_R[:, None]

    def all(self) -> Tensor:
        """Logprobs (nats, float32) of the whole vocabulary."""
        return self.shifted_RV - self.log_z_R[:, None]

    def entropy(self) -> Tensor:
        """Entropy (nats, float32)."""
        return self.log_z_R - torch.linalg.vecdot(self.probs_RV, self.shifted_RV)


def normalised(logits_RV: Tensor, temperature: float, *, first: int = 0) -> LogitRows:
    """Distributions of logits at ``temperature``, normalised over the vocabulary in float32.

    The maximum is taken off before the division, so that the rounding of large logits is not scaled up.
    """
    shifted_RV = logits_RV.float()
    shifted_RV = shifted_RV - shifted_RV.amax(dim=-1, keepdim=True)
    if temperature != 1:
        shifted_RV /= temperature
    probs_RV = torch.softmax(shifted_RV, dim=-1)
    # exp(0) / z is the largest probability, so its logarithm gives z without another pass of exponentials.
    # The float32 sum inside softmax is off by up to 1e-5 over a large vocabulary, which their sum in float64 tells.
    log_z_R = (probs_RV.sum(dim=-1, dtype=torch.float64).log() - probs_RV.amax(dim=-1).double().log()).float()
    return LogitRows(first=first, shifted_RV=shifted_RV, log_z_R=log_z_R, probs_RV=probs_RV)
