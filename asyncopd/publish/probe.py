"""A short text beside published weights, with the learner's logprobs of it: what an engine must give once it has them.

An update that did not arrive whole (a tied head that kept its old values, half a model) gives answers that look right
and logprobs that are wrong. Under float32 the first update shows it. Under bf16 a small first step is hidden by
rounding, so later versions are probed too, ever more rarely: what was left behind falls further behind.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from asyncopd.errors import WeightsMismatchError

FILE_NAME = "probe.json"
TOKENS = 32
"""Longest probe, in tokens."""
BOUNDS = {"fp32": 1e-3, "bf16": 0.5}
"""Mean difference in nats that rounding may make, by the engine's dtype."""
_ALWAYS = 8


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids of a text and the learner's logprobs (nats) of each of them after the first."""

    ids: tuple[int, ...]
    log_p: tuple[float, ...]

    def write(self, directory: Path) -> None:
        """Beside the weights that it belongs to."""
        (directory / FILE_NAME).write_text(json.dumps({"ids": self.ids, "log_p": self.log_p}))

    @classmethod
    def read(cls, directory: Path) -> "Probe | None":
        """The probe of a version; None where there is none."""
        try:
            stored = json.loads((directory / FILE_NAME).read_text())
        except FileNotFoundError:
            return None
        return cls(tuple(stored["ids"]), tuple(stored["log_p"]))

    def check(self, found_T: Tensor, *, version: int, dtype: str) -> None:
        """WeightsMismatchError where an engine's logprobs of the text differ by more than its dtype accounts for."""
        gap_T = (found_T - torch.tensor(self.log_p)).abs()
        mean, worst = gap_T.mean().item(), int(gap_T.nan_to_num(torch.inf).argmax())
        if not mean <= BOUNDS[dtype]:
            raise WeightsMismatchError(
                f"after loading policy version {version} the engine's logprobs of the probe text differ from the "
                f"learner's by {mean:.3g} nats on average (expected at most {BOUNDS[dtype]} in {dtype}), most at token "
                f"{worst + 1}: {found_T[worst]:.4f} instead of {self.log_p[worst]:.4f}. The update did not arrive "
                "whole: an output head tied to the embedding may have kept its old values, or the engine may read "
                "other tensor names than the learner publishes. Start again with rollout.engine transformers, and "
                "report the model type"
            )


@dataclass(frozen=True, slots=True)
class ProbeText:
    """What a run is probed with: token ids of a text, and the dtype that engines hold the weights in."""

    ids: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, prompts: Iterable[Sequence[int]], dtype: torch.dtype) -> "ProbeText":
        """The beginning of the first prompt that is long enough, or the longest: text that the model knows, on which
        rounding matters least."""
        return cls(max((tuple(prompt_ids[:TOKENS]) for prompt_ids in prompts), key=len), dtype)

    def due(self, updates: int) -> bool:
        """Whether the version after so many updates carries a probe: the first few, then the powers of two.

        None does where the text is one token, which has no logprob.
        """
        return len(self.ids) > 1 and (updates <= _ALWAYS or updates & (updates - 1) == 0)
