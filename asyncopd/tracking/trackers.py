"""Where the numbers of a run go: one protocol, and the tracking of a run that feeds every tracker in use."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncopd.errors import ConfigError
from asyncopd.tracking.metrics import HeldOutLike, MetricsLog, Values, held_out_values
from asyncopd.tracking.wandb_run import WandbConfig, WandbTracker


class Tracker(Protocol):
    """Takes the numbers of a run. A value is kept whatever its version, also when versions go backwards."""

    def log(self, policy_version: int, values: Values) -> None:
        """Take values, by the names in `asyncopd.tracking.keys` and any others."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended with this summary; nothing follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """What a run shows and where it logs. `metrics.jsonl` and the trace are always written."""

    live_view: bool = True
    """Show progress while the run is going: a live view on a terminal, a line now and then elsewhere."""
    peak_tflops: float = 0.0
    """Peak of one learner device in its dtype, 1e12 operations a second, against which ``mfu`` is measured; 0 takes the
    data sheet's figure of a known GPU in bf16, and elsewhere there is no ``mfu``."""
    report: bool = True
    """Write report.html and trace.json when the run is over; ``asyncopd report`` makes them later on."""
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.peak_tflops < math.inf:
            raise ConfigError(
                f"tracking.peak_tflops is {self.peak_tflops}; expected 0 (look it up) or 1e12 operations a second, "
                "such as 312 for an A100"
            )


class RunTracking:
    """Feeds `metrics.jsonl`, wandb where it is in use, and further trackers given by the caller."""

    def __init__(self, metrics: MetricsLog, wandb: WandbTracker | None, further: Sequence[Tracker] = ()) -> None:
        self._metrics = metrics
        self._wandb = wandb
        self._trackers: list[Tracker] = [metrics, *([wandb] if wandb is not None else []), *further]

    @property
    def ids(self) -> dict[str, str]:
        """Names under which the trackers know the run, for the checkpoint: give them back to `open_tracking`."""
        return {} if self._wandb is None else {"wandb": self._wandb.run_id}

    def log(self, policy_version: int, values: Values) -> None:
        """Give one row to every tracker."""
        for tracker in self._trackers:
            tracker.log(policy_version, values)

    def evaluation(self, policy_version: int, held_out: HeldOutLike) -> None:
        """Log an evaluation: its numbers to every tracker, its sample answers where they can be kept."""
        self.log(policy_version, held_out_values(held_out))
        self._metrics.evaluation(policy_version, held_out)
        if self._wandb is not None:
            self._wandb.evaluation(policy_version, held_out.samples)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End every tracker, the file first, so that it is whole even if another one fails."""
        for tracker in self._trackers:
            tracker.finish(summary)


def open_tracking(
    run_dir: Path,
    name: str,
    config: TrackingConfig,
    run_config: Mapping[str, Any],
    *,
    resumed_at: int | None = None,
    ids: Mapping[str, str] | None = None,
    further: Sequence[Tracker] = (),
) -> RunTracking:
    """Open the tracking of a run, in one process of it.

    run_config   the resolved configuration as plain data, shown by wandb
    resumed_at   policy version of the checkpoint that is resumed: later rows, so far, did not happen
    ids          `RunTracking.ids` from that checkpoint, so that the same wandb run goes on
    further      trackers of the caller
    """
    metrics = MetricsLog(run_dir)
    if resumed_at is not None:
        metrics.rewind(resumed_at)
    wandb = None
    if config.wandb.in_use:
        wandb = WandbTracker(run_dir, name, config.wandb, run_config, (ids or {}).get("wandb"))
    return RunTracking(metrics, wandb, further)
