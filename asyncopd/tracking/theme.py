"""One colour for each stage and queue state, the same in the terminal and in the report.

The stage colours stay apart for the common kinds of colour blindness and read on light and on dark ground.
"""

from collections.abc import Mapping

STAGE_COLOURS: Mapping[str, str] = {"rollout": "#3987c9", "teacher": "#d5891c", "learner": "#2a9d77"}

STATE_COLOURS: Mapping[str, str] = {
    "PENDING": "#8d99a6",
    "ROLLING": "#3987c9",
    "ROLLED": "#8fbfe6",
    "SCORING": "#d5891c",
    "SCORED": "#ecc281",
    "LEASED": "#2a9d77",
}
"""A state in which a stage works has the stage's colour; one that waits for the next stage a lighter one."""

IDLE_COLOUR = "#8d99a6"
ALARM_COLOUR = "#cf4a46"

MINUS = "\N{MINUS SIGN}"
"""As wide as the plus sign, so that changes line up."""
