"""The live view of a run: a thread that reads the run folder and draws, and never touches the pipeline."""

import logging
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from rich import get_console
from rich.console import Console
from rich.live import Live

from asyncopd.errors import AsyncOPDError
from asyncopd.tracking.dashboard import plain_line, render
from asyncopd.tracking.snapshot import RunSnapshot, RunWatcher

REFRESH_S = 1.0
LINE_EVERY_S = 15.0

_log = logging.getLogger(__name__)


class LiveView:
    """Shows a run while the block goes on. On a terminal a view that is redrawn every second, elsewhere a line of log
    every quarter of a minute (logger `asyncopd.tracking.live`, level INFO).

    It starts with the first snapshot that can be read, so it may be entered before the run has written anything. What
    other code prints meanwhile appears above the view.
    """

    def __init__(self, run_dir: Path, console: Console | None = None) -> None:
        self._run_dir = Path(run_dir)
        self._console = console if console is not None else get_console()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._show, name="live-view", daemon=True)
        self._watcher: RunWatcher | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _show(self) -> None:
        if self._console.is_terminal:
            self._draw()
        else:
            self._write_lines()

    def _draw(self) -> None:
        with Live(console=self._console, auto_refresh=False) as live, _logs_above():
            # A second Ctrl-C ends the process at once, and a hidden cursor would stay hidden.
            self._console.show_cursor()
            while True:
                stopping = self._stop.wait(REFRESH_S)
                snapshot = self._snapshot()
                if snapshot is not None:
                    live.update(render(snapshot), refresh=True)
                if stopping:
                    return

    def _write_lines(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(LINE_EVERY_S)
            snapshot = self._snapshot()
            if snapshot is not None:
                _log.info("%s", plain_line(snapshot))

    def _snapshot(self) -> RunSnapshot | None:
        """None while the folder is not ready; a view must not end because a file is being made."""
        try:
            if self._watcher is None:
                self._watcher = RunWatcher(self._run_dir)
            return self._watcher.snapshot()
        except (AsyncOPDError, OSError, sqlite3.Error) as error:
            _log.debug("no snapshot of %s: %s", self._run_dir, error)
            return None


@contextmanager
def _logs_above() -> Iterator[None]:
    """Log lines appear above the view: `Live` has put itself in the place of sys.stderr, which handlers made before it
    do not know."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stderr__, sys.__stdout__)
    ]
    streams = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
            if stream is not None:
                handler.setStream(stream)
