"""The distilled student as an ordinary HF checkpoint: weights, tokenizer, generation config, model card."""

import json
from pathlib import Path

from transformers import AutoConfig

from asyncopd.config import RunConfig
from asyncopd.learner.step import Learner
from asyncopd.preflight import Preflight
from asyncopd.publish import materialised, take_part
from asyncopd.publish.adapters import write_adapters
from asyncopd.tracking.summary import RunSummary

_CARD = """---
library_name: transformers
tags: [distillation, on-policy-distillation, asyncopd]
---

# {name}

A student distilled on its own answers with asyncopd.

| | |
| --- | --- |
| teacher | {teacher} |
| student before | {student} |
| prompts | {data} |
| objective | {objective}, candidates {design}, temperature {temperature} |
| mode | {mode}, at most {staleness} policy versions stale |
| optimizer steps | {steps} of {batch} answers |

## Figures

The whole record is `summary.json` of the run.

```json
{figures}
```
"""


def write_final_student(path: Path, learner: Learner, checks: Preflight, config: RunConfig) -> None:
    """Write the checkpoint in the dtype that the student came in, adapters merged; they themselves are beside it.

    Where the learner is sharded, the other ranks call ``help_write_final_student`` at the same time.
    """
    student = learner.student
    dtype = AutoConfig.from_pretrained(config.student).dtype or student.dtype
    state = {}
    for name, weight in learner.weights().items():
        values = materialised(weight)
        state[name] = values.to("cpu", dtype if values.is_floating_point() else values.dtype)
    student.config.dtype = dtype
    student.save_pretrained(path, state_dict=state)
    adapters = learner.adapters()
    if adapters:
        beside = path / "adapter"
        beside.mkdir(exist_ok=True)
        write_adapters(beside, adapters, learner.adapter_config())
    checks.tokenizer.save_pretrained(path)
    checks.generation.save_pretrained(path)


def write_model_card(path: Path, config: RunConfig, summary: RunSummary) -> None:
    """Beside the student: where it comes from, and its figures."""
    figures = summary.as_dict()
    card = _CARD.format(
        name=config.name,
        teacher=config.teacher.model.name,
        student=config.student.name,
        data=config.data.prompts or "a data set in memory",
        objective=config.objective.name,
        design=config.objective.design,
        temperature=config.objective.temperature,
        mode=config.mode,
        staleness=config.max_staleness,
        steps=summary.steps,
        batch=config.queue.batch_size,
        figures=json.dumps({key: figures[key] for key in ("held_out", "samples", "staleness")}, indent=1),
    )
    (path / "README.md").write_text(card)


def help_write_final_student(learner: Learner) -> None:
    """What the ranks other than 0 do while it writes."""
    take_part(learner.weights())
    take_part(learner.adapters())
