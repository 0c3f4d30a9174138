"""What the readers of a run folder must know about the run, without importing its configuration: `run.json`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from asyncopd.errors import AsyncOPDError

RUN_FILE = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Written by the learner when a run starts, and again when it resumes.

    name            name of the run
    mode            "sync", "lagged:k" or "async"
    steps           optimizer steps planned in all
    batch_size      samples per optimizer step over all ranks
    max_staleness   bound of a sample's age when trained, optimizer steps
    description     what a reader of the report wants to see first, such as teacher, student, objective, design
    """

    name: str
    mode: str
    steps: int
    batch_size: int
    max_staleness: int
    description: Mapping[str, str] = field(default_factory=dict)

    def write(self, run_dir: Path) -> None:
        """Write `run.json` in one piece, since views may read it at any time."""
        path = Path(run_dir) / RUN_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        """What `write` wrote; raises AsyncOPDError when the folder is not that of a run."""
        path = Path(run_dir) / RUN_FILE
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise AsyncOPDError(
                f"{run_dir} has no {RUN_FILE}, so it is not a run folder; give one like runs/<name>"
            ) from None
        except (ValueError, TypeError) as error:
            raise AsyncOPDError(f"{path} cannot be read ({error}); was it written by another version?") from error
