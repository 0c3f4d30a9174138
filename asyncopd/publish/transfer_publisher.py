"""Weights straight from the learner's memory: the end that publishes.

    publish ──> [ held: newest version ] ──a thread an engine, when it asks──> TransferGroup.send
       └── some versions: file

An engine asks when it is ready for new weights, so none waits for another, and none that died is waited for. A send
reads what was held when it began, so the learner waits for nobody either. The answer to an engine that asks for another
version than the one held is no: it takes the file then, or asks again.

Whoever asks must know a key that lies in the run folder.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import torch
from torch import Tensor

from asyncopd.errors import TransferError
from asyncopd.publish.config import PublishConfig
from asyncopd.publish.probe import Probe
from asyncopd.publish.stream import Weights, file_order, stored_dtype
from asyncopd.publish.transfer_group import (
    HOST,
    Rendezvous,
    TensorSpec,
    TransferGroup,
    chunks,
    open_store,
    packed,
    unpacked,
)
from asyncopd.publish.weights import WeightStore

LOG = logging.getLogger(__name__)
_PAUSE_S = 0.1
_JOIN_S = 2.0
CHUNK_BYTES = 2**26
"""Size of a buffer, of which the engine takes one while the next comes in."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What an engine is told of a version before its bytes come.

    rendezvous   where the ends meet; the same for as long as they are connected
    """

    version: int
    specs: tuple[TensorSpec, ...]
    probe: Probe | None
    rendezvous: Rendezvous


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    version: int
    specs: tuple[TensorSpec, ...]
    buffers: list[Tensor]
    probe: Probe | None


class TransferPublisher:
    """A WeightPublisher that hands the newest version to engines, and writes some versions to files.

    ranks        processes of one engine, its tensor parallel size
    device       the learner's, from which NCCL sends
    needs_file   which versions are read from files by somebody else; the first of a life always has one
    """

    def __init__(
        self,
        store: WeightStore,
        run_dir: Path,
        config: PublishConfig,
        *,
        ranks: int,
        device: torch.device,
        needs_file: Callable[[int], bool],
    ) -> None:
        self.dtype = store.dtype
        self._store = store
        self._config = config
        self._ranks = ranks
        self._device = device
        self._needs_file = needs_file
        self._held: _Held | None = None
        self._closing = False
        key = secrets.token_bytes(32)
        self._listener = Listener((HOST, 0), authkey=key)
        self._port: int = self._listener.address[1]
        write_address(run_dir, self._port, key)
        self._thread = threading.Thread(target=self._listen, name="transfers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no further connections, and let go of the weights."""
        self._closing = True
        # Closing a socket does not wake who waits for it.
        with suppress(OSError):
            socket.create_connection((HOST, self._port), timeout=_JOIN_S).close()
        self._thread.join(_JOIN_S)
        self._listener.close()
        self._held = None

    def publish(self, version: int, weights: Weights, probe: Probe | None = None) -> Path | None:
        """The file, where there must be one, and then to the engines."""
        specs = tuple(
            TensorSpec.of(name, weights[name], stored_dtype(weights[name], self.dtype))
            for name in file_order(weights, self.dtype)
        )
        cut = chunks(specs, CHUNK_BYTES)
        # Packed once, for every engine, and before anybody waits for it.
        buffers = [packed(chunk, weights) for chunk in cut]
        written = None
        if self._held is None or self._needs_file(version):
            pieces = zip(cut, buffers, strict=True)
            copy = dict(piece for chunk, buffer in pieces for piece in unpacked(chunk, buffer))
            written = self._store.publish(version, copy, probe)
        self._held = _Held(version, specs, buffers, probe)
        return written

    def probe(self, version: int) -> Probe | None:
        """Of a version that has a file."""
        return self._store.probe(version)

    def directory(self, version: int) -> Path:
        """Of a version that has a file."""
        return self._store.directory(version)

    def versions(self) -> list[int]:
        """Versions that have a file, ascending."""
        return self._store.versions()

    def settle(self, oldest: int) -> None:
        """Make the files survive a loss of power. A version without one is published again from a checkpoint."""
        self._store.settle(oldest)

    def keep_from(self, version: int, besides: Collection[int] = ()) -> None:
        """Delete older files."""
        self._store.keep_from(version, besides)

    def forget_after(self, version: int) -> None:
        """Delete newer files."""
        self._store.forget_after(version)

    def _listen(self) -> None:
        while not self._closing:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, OSError) as error:
                if not self._closing:
                    LOG.warning("somebody who asked for weights was turned away: %s", error)
                # Where no descriptor is left, the next comes at once.
                time.sleep(_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="transfer", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """One engine, for as long as it lives."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # Behind the training step's kernels a transfer would wait for the step.
            torch.cuda.set_stream(torch.cuda.Stream())
        store = open_store(self._config.deadline_s)
        rendezvous = Rendezvous(
            backend=self._config.backend,
            port=store.port,
            size=1 + self._ranks,
            deadline_s=self._config.deadline_s,
            chunk_bytes=CHUNK_BYTES,
        )
        group: TransferGroup | None = None
        try:
            while True:
                asked, held = connection.recv(), self._held
                if held is None or held.version != asked:
                    connection.send(None)
                    continue
                connection.send(Offer(held.version, held.specs, held.probe, rendezvous))
                if group is None:
                    group = TransferGroup(rendezvous, 0, self._device, store)
                group.send(held.buffers, alive=lambda: not connection.poll())
        except (EOFError, ConnectionError):
            LOG.debug("an engine hung up")
        except TransferError as error:
            LOG.warning("an engine did not get the weights; it is started again: %s", error)
        finally:
            # The other end sees this, and over gloo the end of the group too.
            connection.close()
            if group is not None:
                group.abort()


def write_address(run_dir: Path, port: int, key: bytes) -> None:
    """Tell the workers of this run where to ask."""
    beside = _address(run_dir).with_suffix(".new")
    beside.touch(mode=0o600)
    beside.write_text(json.dumps({"port": port, "key": key.hex()}))
    os.replace(beside, _address(run_dir))


def read_address(run_dir: Path) -> tuple[int, bytes]:
    """Port and key of the learner; TransferError if it left none."""
    try:
        found = json.loads(_address(run_dir).read_text())
    except FileNotFoundError as error:
        raise TransferError(f"{run_dir} holds no address of a learner that hands out weights") from error
    return found["port"], bytes.fromhex(found["key"])


def _address(run_dir: Path) -> Path:
    return run_dir / "transfers.json"
