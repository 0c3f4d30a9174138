"""Services in a thread, and proxies that misbehave, for the tests of service and client."""

import asyncio
import socket
import threading
import time
from types import TracebackType
from typing import Self

import uvicorn

from teacher_cache.identity import TeacherIdentity
from teacher_cache.scorer import Scorer
from teacher_cache.service import ServiceConfig, TeacherService
from tests.teacher_cache.build_requests import IDENTITY, CountingScorer


class ThreadedService:
    """A real server on a real port."""

    def __init__(
        self,
        scorer: Scorer | None = None,
        *,
        identity: TeacherIdentity = IDENTITY,
        port: int = 0,
        token: str | None = None,
        **settings: int,
    ) -> None:
        self.scorer = scorer or CountingScorer()
        self.service = TeacherService(self.scorer, identity, ServiceConfig(**settings), token=token)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(self.service.app, log_level="warning"))
        self._thread = threading.Thread(target=self.server.run, args=([self._socket],))

    def __enter__(self) -> Self:
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """As SIGTERM does."""
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


class CuttingProxy:
    """Passes connections on to a service and cuts the first ``cuts`` answers after ``after`` bytes."""

    def __init__(self, port: int, *, cuts: int, after: int, flips: bool = False) -> None:
        self._target, self._cuts, self._after, self._flips = port, cuts, after, flips
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._handle, "127.0.0.1", 0), self._loop
        ).result()
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._target)
        forward = asyncio.ensure_future(_copy(reader, inner_writer))
        passed = 0
        while data := await inner_reader.read(65536):
            # Handshakes are small and pass; what is cut is a scoring answer.
            if self._cuts and b"x-safetensors" in data or passed:
                passed += len(data)
            if self._cuts and passed > self._after:
                self._cuts -= 1
                if self._flips:
                    writer.write(data[:-3] + bytes([data[-3] ^ 0xFF, data[-2] ^ 0xFF, data[-1] ^ 0xFF]))
                    passed = 0
                    continue
                writer.write(data[: self._after])
                break
            writer.write(data)
            await writer.drain()
        forward.cancel()
        writer.close()
        inner_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
