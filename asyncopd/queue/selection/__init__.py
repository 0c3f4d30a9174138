"""Selection policies by name. A new one is a file here, a line below and a test."""

from asyncopd.queue.selection.disagreement_first import DisagreementFirst
from asyncopd.queue.selection.freshest import Freshest
from asyncopd.queue.selection.oldest_ready import OldestReady
from asyncopd.queue.selection.policy import QueueRow, SelectionPolicy
from asyncopd.queue.selection.prompt_coverage import PromptCoverage
from asyncopd.queue.selection.strict import Strict
from asyncopd.queue.selection.windowed import Windowed

POLICIES: dict[str, SelectionPolicy] = {
    "strict": Strict(),
    "oldest_ready": OldestReady(),
    "freshest": Freshest(),
    "windowed": Windowed(),
    "prompt_coverage": PromptCoverage(),
    "disagreement_first": DisagreementFirst(),
}

__all__ = ["POLICIES", "QueueRow", "SelectionPolicy"]
