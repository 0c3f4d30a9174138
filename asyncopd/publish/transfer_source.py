"""Weights straight from the learner's memory: the end of a rollout worker.

ask for a version ──held──> TransferGroup.receive, inside the engine
       └── not held ──> its file, if there is one ── none: ask again
"""

import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Protocol

from asyncopd.errors import CheckpointError, TransferError
from asyncopd.publish.probe import Probe
from asyncopd.publish.transfer_group import HOST
from asyncopd.publish.transfer_publisher import Offer, read_address
from asyncopd.publish.weights import FileSource, LoadsFiles, WeightStore

_ASK_S = 0.02
"""Seconds between two questions for a version that is neither held nor in a file."""


class ReceivesWeights(LoadsFiles, Protocol):
    """What a rollout engine must be able to do to take weights from the learner's memory."""

    def receive_weights(self, offer: Offer) -> None:
        """Take part in the transfer of what is offered; TransferError where it breaks off."""


class TransferSource:
    """A WeightSource that asks the learner, and reads the files of ``store`` where it must.

    newest       the newest published version, where a newer one than was asked for will do
    deadline_s   seconds after which the learner is taken to be unable to answer
    beat         tells of progress while it waits

    A worker that has just started, or slept through some versions, asks like any other.
    """

    def __init__(
        self,
        run_dir: Path,
        store: WeightStore,
        engine: ReceivesWeights,
        *,
        newest: Callable[[], int] | None,
        deadline_s: float,
        beat: Callable[[], None],
    ) -> None:
        self._store = store
        self._engine = engine
        self._newest = newest
        self._deadline_s = deadline_s
        self._beat = beat
        port, key = read_address(run_dir)
        try:
            self._connection = Client((HOST, port), authkey=key)
        except (OSError, EOFError, AuthenticationError) as error:
            raise TransferError(f"the learner does not answer on port {port}: {error}") from error

    def move_to(self, version: int) -> Probe | None:
        """To ``version``, or to the newest one; TransferError where the learner cannot give it."""
        until = time.monotonic() + self._deadline_s
        while True:
            offer = self._ask(version)
            if offer is not None:
                self._engine.receive_weights(offer)
                return offer.probe
            if version in self._store.versions():
                try:
                    return FileSource(self._store, self._engine).move_to(version)
                except (CheckpointError, FileNotFoundError):
                    # Deleted meanwhile: the newest will do, where any newer one does.
                    if self._newest is None:
                        raise
            if time.monotonic() > until:
                raise TransferError(
                    f"policy version {version} is neither in the learner's memory nor in {self._store.root}, "
                    f"for publish.deadline_s ({self._deadline_s:.0f} s)"
                )
            self._beat()
            time.sleep(_ASK_S)
            if self._newest is not None:
                version = self._newest()

    def _ask(self, version: int) -> Offer | None:
        try:
            self._connection.send(version)
            if not self._connection.poll(self._deadline_s):
                raise TransferError(f"the learner did not answer within {self._deadline_s:.0f} s")
            return self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise TransferError(f"the learner hung up: {error!r}") from error
