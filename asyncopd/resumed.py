"""What a resumed run may be told anew."""

import logging
from dataclasses import replace

from asyncopd.config import RunConfig, flat
from asyncopd.errors import ConfigError
from asyncopd.interface import Inputs

LOG = logging.getLogger(__name__)
WHERE_IT_RUNS = (
    "supervision.",
    "tracking.",
    "checkpoint.",
    "queue.lease_s",
    "publish.deadline_s",
    "publish.adapters",
    "rollout.vllm.adapters",
    "learner.threads",
    *(f"rollout.{name}" for name in ("workers", "threads", "devices")),
    *(f"teacher.{name}" for name in ("threads", "devices", "device_map", "urls", "deadline_s", "cache_gb")),
    *(
        f"{stage}.vllm.{name}"
        for stage in ("rollout", "teacher")
        for name in ("memory_fraction", "kv_cache_gb", "cores", "tensor_parallel", "urls", "deadline_s")
    ),
)
"""Options, or how their names begin, that a resume may change: none of them says what is computed."""


def resumed_config(stored: RunConfig, asked: RunConfig, inputs: Inputs) -> RunConfig:
    """The options of a resumed run: those it was started with, but for where it runs.

    ConfigError naming other options that differ. Models in memory were saved into the run folder, so their paths differ
    and do not count.
    """
    saved = {"student": inputs.student, "teacher.model": inputs.teacher}
    same = {"name", *(name for name, model in saved.items() if model is not None)}
    before, now = flat(stored), flat(asked)
    changed = [name for name in before if name not in same and before[name] != now.get(name)]
    refused = [name for name in changed if not name.startswith(WHERE_IT_RUNS)]
    if refused:
        listed = ", ".join(f"{name}: {before[name]!r} -> {now.get(name)!r}" for name in refused)
        raise ConfigError(
            f"run {stored.name!r} was started with other options ({listed}); "
            "resume it without them, or start another run"
        )
    for name in changed:
        LOG.warning("%s was %r and is %r from now on", name, before[name], now[name])
    teacher = replace(asked.teacher, model=stored.teacher.model)
    return replace(asked, name=stored.name, student=stored.student, teacher=teacher)
