"""Stands between the flows and Prefect's server, and makes it go away."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Literal

Mode = Literal["open", "refuse", "503"]

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
    b"Connection: close\r\n\r\n{}"
)


class Proxy:
    """A proxy of TCP connections, in a thread of its own.

    Args:
        port: Of the server, on this machine.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._mode: Mode = "open"
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)
        self._ready = threading.Event()
        #: Where it listens.
        self.port = 0
        self._thread.start()
        self._ready.wait()

    def set_mode(self, mode: Mode) -> None:
        """Let connections through, close them, or answer each request with 503."""
        self._loop.call_soon_threadsafe(self._set_mode, mode)

    def close(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._listen())

    async def _listen(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=200)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        self._set_mode("refuse")
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    def _set_mode(self, mode: Mode) -> None:
        self._mode = mode
        if mode != "open":
            for writer in tuple(self._open):
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._mode == "503":
                await reader.readuntil(b"\r\n\r\n")
                writer.write(_BUSY)
                await writer.drain()
            elif self._mode == "open":
                await self._join(reader, writer)
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner = await asyncio.open_connection("127.0.0.1", self._target)
        self._open |= {writer, inner}
        try:
            await asyncio.gather(_pass_on(reader, inner), _pass_on(inner_reader, writer))
        finally:
            self._open -= {writer, inner}
            inner.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
