"""The same sweep for the agents of Weights & Biases."""

from typing import Any

import yaml

from asyncopd.sweep.spec import Sweep


def wandb_yaml(sweep: Sweep, project: str) -> str:
    """A W&B sweep a grid, as YAML documents: ``wandb sweep FILE`` creates it, ``wandb agent ID`` runs it.

    An agent calls ``asyncopd sweep SPEC axis=value ...``, which runs that one run of the sweep as it would itself.
    """
    return yaml.safe_dump_all([_document(sweep, project, axes) for axes in sweep.axes], sort_keys=False)


def _document(sweep: Sweep, project: str, axes: Any) -> dict[str, Any]:
    return {
        "name": sweep.name,
        "project": project,
        "method": "grid",
        "program": str(sweep.path),
        "command": ["asyncopd", "sweep", "${program}", "${args_no_hyphens}"],
        "metric": {"name": "held_out/reverse_kl/mean", "goal": "minimize"},
        "parameters": {axis: {"values": values} for axis, values in axes.items()},
    }
