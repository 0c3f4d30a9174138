"""The run folder: where everything of one run is, and who may write there.

config.yaml   resolved configuration          ledger.sqlite   the sample queue
prompts       tokenised prompts, and held_out payloads/       rollouts and teacher records
tokens.json   vocabulary and special ids      weights/        published policy versions
logs/ trace/  one file a process              checkpoints/    what --resume continues from
metrics.jsonl, summary.json, report.html      final/          the student, as an HF checkpoint
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from asyncopd.config import RunConfig, from_yaml, to_yaml
from asyncopd.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenIds:
    """What every stage must know of the tokenizer.

    vocabulary      real token ids; a wider head is padding
    eos_ids         tokens that end an answer
    pad_id          fills padded places; may equal an EOS, because lengths do the masking
    """

    vocabulary: int
    eos_ids: tuple[int, ...]
    pad_id: int


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path

    @classmethod
    def create(cls, config: RunConfig) -> tuple[Self, RunConfig]:
        """A new folder, and the configuration with the name it got; ConfigError if a chosen name is taken."""
        if config.name:
            folder = config.runs_dir / config.name
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                # Without a configuration it was killed before it began.
                if not (folder / "config.yaml").exists() and not any(folder.glob("[!.]*")):
                    return cls._begun(folder, config)
                raise ConfigError(
                    f"run {config.name!r} exists in {config.runs_dir}; continue it with --resume, or take another name"
                ) from None
        else:
            config = replace(config, name=_make_unnamed(config))
            folder = config.runs_dir / config.name
        return cls._begun(folder, config)

    @classmethod
    def _begun(cls, folder: Path, config: RunConfig) -> tuple[Self, RunConfig]:
        made = cls(folder.resolve())
        made.write_config(config)
        return made, config

    @classmethod
    def existing(cls, config: RunConfig) -> Self:
        """The folder that ``--resume`` continues: the named run, or the newest of this recipe."""
        if config.name:
            candidates = [config.runs_dir / config.name]
        else:
            candidates = sorted(config.runs_dir.glob(f"{config.recipe}-*"), key=lambda path: path.stat().st_mtime)
        found = [path for path in candidates if (path / "config.yaml").exists()]
        if not found:
            known = sorted(path.parent.name for path in config.runs_dir.glob("*/config.yaml"))
            raise ConfigError(
                f"no run {config.name or config.recipe + '-*'!r} to resume in {config.runs_dir}; there are {known}"
            )
        return cls(found[-1].resolve())

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def prompts_path(self) -> Path:
        return self.path / "prompts.jsonl"

    @property
    def held_out_path(self) -> Path:
        return self.path / "held_out.jsonl"

    @property
    def final_path(self) -> Path:
        return self.path / "final"

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved configuration, whole or not at all."""
        partial = self.path / ".config.yaml.partial"
        partial.write_text(to_yaml(config))
        partial.replace(self.path / "config.yaml")

    def config(self) -> RunConfig:
        """The resolved configuration that the run was started with, or last resumed."""
        path = self.path / "config.yaml"
        return from_yaml(path.read_text(), str(path))

    def write_token_ids(self, ids: TokenIds) -> None:
        """Tell the workers about the tokenizer."""
        (self.path / "tokens.json").write_text(json.dumps(asdict(ids)))

    def token_ids(self) -> TokenIds:
        """What ``write_token_ids`` wrote."""
        fields = json.loads((self.path / "tokens.json").read_text())
        return TokenIds(vocabulary=fields["vocabulary"], eos_ids=tuple(fields["eos_ids"]), pad_id=fields["pad_id"])

    def lock(self) -> FileLock:
        """Take the run lock, released with the process; ConfigError if another learner holds it."""
        lock = FileLock(self.path / "learner.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(
                f"another process is training in {self.path}; wait for it, stop it, or take another --name"
            ) from None
        return lock


def _make_unnamed(config: RunConfig) -> str:
    """Create a folder named after recipe and time, with a number where that is taken; its name."""
    stamp = f"{config.recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(1, 1000):
        name = stamp if attempt == 1 else f"{stamp}-{attempt}"
        try:
            os.makedirs(config.runs_dir / name)
        except FileExistsError:
            continue
        return name
    raise ConfigError(f"no free name like {stamp} in {config.runs_dir}; give one with --name")
