"""How fast the steps are, against the clock and against the hardware, and how much memory they take."""

import resource
import sys
from collections.abc import Sequence

import torch

from asyncopd.learner.model_flops import ModelFlops, peak_flops
from asyncopd.learner.step import Learner
from asyncopd.tracking import keys
from asyncopd.types import ScoredRollout


class Pace:
    """Figures of each step under the names of ``tracking.keys``.

    peak_tflops     peak of one learner device, 1e12 operations a second; 0 looks it up
    """

    def __init__(self, learner: Learner, peak_tflops: float) -> None:
        self._accelerator = learner.accelerator
        self._flops = ModelFlops.of(learner.student)
        self._peak = peak_flops(peak_tflops, self._accelerator.device, learner.config.dtype)

    def values(self, samples: Sequence[ScoredRollout], tokens: float, step_s: float) -> dict[str, float]:
        """Of a step that took ``step_s`` seconds; every rank calls this with its own share of the batch.

        tokens      valid response tokens of the step, over all ranks
        """
        values = {keys.TOKENS_PER_SECOND: tokens / step_s, keys.MEMORY_GB: self._memory_gb()}
        if self._flops is not None and self._peak is not None:
            lengths = [len(sample.rollout.prompt_ids) + len(sample.rollout.response_ids_T) for sample in samples]
            mine = torch.tensor(self._flops.step(lengths, 0), dtype=torch.float64, device=self._accelerator.device)
            flops = float(self._accelerator.reduce(mine, reduction="sum")) + self._flops.step([], round(tokens))
            values[keys.MFU] = flops / step_s / (self._peak * self._accelerator.num_processes)
        return values

    def _memory_gb(self) -> float:
        if self._accelerator.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._accelerator.device) / 1e9
        # Kibibytes, except on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
