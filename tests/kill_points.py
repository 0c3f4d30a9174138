"""Named moments at which a process of a run sends itself SIGKILL, found from outside the code under test.

An audit hook sees every file that is opened, renamed or deleted; a trace callback sees every statement of SQLite. So
the library needs no line that is there for the tests only.
"""

import os
import signal
import sqlite3
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER_POINTS = (
    "lease_commit",
    "leased",
    "payload_open",
    "half_payload",
    "payload_rename",
    "payload_placed",
    "put_commit",
    "put",
)
"""A lease before and after its COMMIT; a payload before it is opened, half written, before its rename and before its
put; the put before and after its COMMIT."""
LEARNER_POINTS = (
    "ledger_tables",
    "resume_commit",
    "batch_commit",
    "publish_started",
    "publish_rename",
    "step_commit",
    "stepped",
    "checkpoint_write",
    "checkpoint_rename",
    "checkpoint_delete",
    "weights_delete",
    "payload_delete",
)
"""The ledger before its tables are there; a roll-back, a leased batch and a step before their COMMITs; weights half
published; a step just committed; a checkpoint half written, before its rename, half deleted; weights and payloads while
they are deleted."""
ONCE = ("ledger_tables", "resume_commit")
"""Points that a life comes to once."""
_STATEMENTS = (
    ("INSERT INTO leases", "lease_commit", "leased"),
    ("UPDATE samples SET state = 2, rolled_by", "put_commit", "put"),
    ("UPDATE samples SET state = 4, scored_by", "put_commit", "put"),
    ("INSERT INTO steps", "step_commit", "stepped"),
    ("DELETE FROM steps", "resume_commit", ""),
    ("UPDATE samples SET state = 5", "batch_commit", ""),
    ("CREATE TABLE", "ledger_tables", ""),
)
"""How a transaction is recognised, and the points before and after its COMMIT."""


@dataclass(slots=True)
class Fuse:
    """Kills this process the ``left``-th time that it comes to ``point``.

    mark        a file that is written just before, for whoever counts
    before, after   points around the COMMIT of the transaction in progress
    """

    point: str
    left: int
    mark: Path
    before: str = ""
    after: str = ""
    placed: bool = False

    def reach(self, point: str, torn: str = "") -> None:
        """``torn`` is a file to cut in half first."""
        if not point or point != self.point:
            return
        self.left -= 1
        if self.left == 0:
            self.point = ""
            if torn:
                os.truncate(torn, os.path.getsize(torn) // 2)
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def see_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook."""
        if event == "os.rename":
            self._see_rename(os.fspath(arguments[0]), os.fspath(arguments[1]))
        elif event == "os.remove":
            path = str(arguments[0])
            if "/payloads/" in path:
                self.reach("payload_delete")
            if path.endswith("manifest.json"):
                self.reach("checkpoint_delete")
        elif event == "os.mkdir":
            self.reach("publish_started" if "/weights/.writing-" in str(arguments[0]) else "")
            self.reach("checkpoint_write" if "/checkpoints/v" in str(arguments[0]) else "")
        elif event == "open" and isinstance(arguments[1], str) and "w" in arguments[1]:
            path = str(arguments[0])
            if path.endswith(".part"):
                self.reach("payload_open")
            if "/checkpoints/v" in path:
                self.reach("checkpoint_write")

    def _see_rename(self, source: str, target: str) -> None:
        if source.endswith(".part"):
            self.reach("half_payload", torn=source)
            self.reach("payload_rename")
            self.placed = True
        elif target.endswith("manifest.json"):
            self.reach("checkpoint_rename")
        elif "/weights/.writing-" in source:
            self.reach("publish_rename")
        elif "/weights/.deleting-" in target:
            self.reach("weights_delete")

    def see_statement(self, statement: str) -> None:
        """The trace callback, called before each statement."""
        if self.after:
            self.reach(self.after)
            self.after = ""
        if statement.startswith("BEGIN") and self.placed:
            self.placed = False
            self.reach("payload_placed")
        if statement == "COMMIT":
            self.reach(self.before)
            # What follows the COMMIT comes with the next statement.
            self.after, self.before = next((a for _, b, a in _STATEMENTS if b == self.before and b), ""), ""
        for begins, before, _ in _STATEMENTS:
            if statement.startswith(begins):
                self.before = before


def arm(point: str, count: int, mark: Path) -> None:
    """From here on, this process dies the ``count``-th time that it comes to ``point``."""
    fuse = Fuse(point=point, left=count, mark=mark)
    sys.addaudithook(fuse.see_event)
    connect = sqlite3.connect

    def watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_trace_callback(fuse.see_statement)
        return connection

    sqlite3.connect = watched
