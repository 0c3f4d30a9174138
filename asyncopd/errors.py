"""Everything that asyncopd raises on purpose.

Each message gives the value, the expectation and the remedy.
"""


class AsyncOPDError(Exception):
    """Root of the tree: catch this to catch whatever asyncopd raises on purpose."""


class ConfigError(AsyncOPDError, ValueError):
    """A configuration that cannot work; raised before any model is loaded where that is possible."""


class DataError(AsyncOPDError, ValueError):
    """A data set, prompt or tokenizer that cannot be used as configured."""


class LedgerError(AsyncOPDError):
    """The sample queue refused a transition, or its invariant does not hold."""


class StaleLeaseError(LedgerError):
    """A result arrived under a lease that has expired or was released; the result is refused."""


class CheckpointError(AsyncOPDError):
    """A checkpoint is missing, incomplete, or belongs to another run."""


class WorkerDiedError(AsyncOPDError):
    """A stage's process ended or hung; carries the stage's name and its last traceback."""

    def __init__(self, stage: str, detail: str) -> None:
        super().__init__(f"stage {stage!r} died: {detail}")
        self.stage = stage
        self.detail = detail


class StorageError(AsyncOPDError):
    """The run folder cannot be written: the disk is full, or read-only."""


class DeadlineError(AsyncOPDError):
    """A wait passed its deadline."""


class RolloutError(AsyncOPDError):
    """The rollout engine refused a request, or its weights give no distribution to sample from."""


class RequestRefusedError(RolloutError):
    """No engine of this run can serve the request, whatever the weights: its sample is quarantined."""


class WeightsMismatchError(AsyncOPDError):
    """The engine's logprobs under published weights are not the learner's: an update did not arrive whole."""


class TransferError(AsyncOPDError):
    """A transfer of weights broke off; an engine that was in the middle of it holds two versions by halves."""
