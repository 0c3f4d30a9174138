"""Weights & Biases through its own library: an optional extra, one step axis, the same run after a resume.

Every value is logged against `policy_version` as an ordinary metric and never with wandb's own step, since wandb throws
away a value whose step is lower than the last.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncopd.errors import ConfigError
from asyncopd.tracking.metrics import Values, flatten

POLICY_VERSION = "policy_version"
_ID_FILE = "wandb_id"


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases. Logs online when logged in, else offline into the run folder; WANDB_MODE decides when set."""

    enabled: Literal["auto", "on", "off"] = "auto"
    """auto: when wandb is installed. on: a missing wandb is an error. off: never."""
    project: str = "asyncopd"
    """Project of the run."""
    entity: str | None = None
    """User or team; none: the default of the account."""
    group: str | None = None
    """Group of runs that belong together."""
    name: str | None = None
    """What the run is called in wandb; none: its name."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""

    def __post_init__(self) -> None:
        if not self.project:
            raise ConfigError('the wandb project is empty; name one, or turn wandb off with enabled="off"')
        if self.enabled == "on" and not _installed():
            raise ConfigError(
                'wandb is asked for but not installed; pip install "asyncopd[wandb]", or set enabled to "auto" or "off"'
            )

    @property
    def in_use(self) -> bool:
        """Whether a run with this configuration logs to wandb."""
        return self.enabled != "off" and _installed()


class WandbTracker:
    """One wandb run. `run_id` belongs into the checkpoint; given back, the same run goes on."""

    def __init__(
        self, run_dir: Path, name: str, config: WandbConfig, run_config: Mapping[str, Any], run_id: str | None = None
    ) -> None:
        import wandb  # an optional extra, and slow to import

        run_dir = Path(run_dir)
        id_file = run_dir / _ID_FILE
        known = run_id if run_id is not None else _read(id_file)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=list(config.tags),
            name=config.name or name,
            id=known,
            resume="allow" if known is not None else None,
            dir=str(run_dir),
            config=dict(run_config),
            mode=wandb_mode(),
            # Else wandb hands out the run that an earlier failure in this process left open, and rows go there.
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self.run_id = str(self._run.id)
        id_file.write_text(self.run_id)
        self._run.define_metric(POLICY_VERSION)
        self._run.define_metric("*", step_metric=POLICY_VERSION)

    def log(self, policy_version: int, values: Values) -> None:
        """Send one row, with the policy version as a value of its own."""
        self._run.log({**flatten(values), POLICY_VERSION: policy_version})

    def evaluation(self, policy_version: int, samples: Sequence[tuple[str, str]]) -> None:
        """Send the sample answers of an evaluation as a table."""
        import wandb

        table = wandb.Table(columns=["prompt", "answer"], data=[list(sample) for sample in samples])
        self._run.log({"held_out/samples": table, POLICY_VERSION: policy_version})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Store the summary and end the run; returns when wandb has written what it has."""
        self._run.summary.update(dict(summary))
        self._run.finish()


def wandb_mode() -> Literal["online", "offline", "disabled", "shared"]:
    """WANDB_MODE where it is set; else online when wandb finds an account, and offline when not. Never asks."""
    import wandb

    match os.environ.get("WANDB_MODE"):
        case "online" | "offline" | "disabled" | "shared" as mode:
            return mode
        case "dryrun":  # wandb's older name
            return "offline"
        case None | "":
            return "online" if wandb.login(prompt=False, verify=False) else "offline"
        case other:
            raise ConfigError(f"WANDB_MODE is {other!r}; wandb knows online, offline, disabled and shared")


def _installed() -> bool:
    return importlib.util.find_spec("wandb") is not None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
