"""A proxy before a real Prefect API, which can be away, answer in the API's place, or hold requests back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from prefect_gpu.clock import DEADLOCK_S
from tests.fakes.ports import free_port


class Answer(NamedTuple):
    """What the proxy answers in the API's place."""

    status: int
    headers: str = ""


class Call(NamedTuple):
    """One request that has reached the proxy."""

    at_s: float
    #: Method and path.
    what: str
    #: `None`: the API has answered.
    answer: Answer | None


class Proxy:
    """Passes requests on to an API.

    Args:
        api_url: Of the API.
    """

    def __init__(self, api_url: str) -> None:
        url = urlsplit(api_url)
        assert url.hostname is not None and url.port is not None
        self._upstream = url.hostname, url.port
        #: Called in any thread with method and path; it may wait. `None`: the API answers.
        self.choose_answer: Callable[[str], Answer | None] = lambda what: None
        self.calls: list[Call] = []
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._port = free_port()
        self.come_back()
        self.url = f"http://127.0.0.1:{self._port}{url.path}"

    def come_back(self) -> None:
        """Listen, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def go_away(self) -> None:
        """End all connections and refuse new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for each in list(self._open):
            self._end(each)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._open.add(client)
                if self._listener is not listener:
                    self._end(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _end(self, each: socket.socket) -> None:
        self._open.discard(each)
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def _serve(self, client: socket.socket) -> None:
        upstream = socket.create_connection(self._upstream, DEADLOCK_S)
        self._open.add(upstream)
        threading.Thread(target=self._relay, args=(upstream, client), daemon=True).start()
        try:
            reader = client.makefile("rb")
            while first := reader.readline():
                head = first
                while (line := reader.readline()).strip():
                    head += line
                head += line
                fields = dict(
                    each.lower().split(b":", 1) for each in head.splitlines() if b": " in each
                )
                body = reader.read(int(fields.get(b"content-length", b"0")))
                method, path, _ = first.decode().split(" ", 2)
                answer = self.choose_answer(f"{method} {path}")
                self.calls.append(Call(time.monotonic(), f"{method} {path}", answer))
                if answer is None:
                    upstream.sendall(head + body)
                else:
                    text = f"HTTP/1.1 {answer.status} x\r\n{answer.headers}content-length: 2\r\n\r\n{{}}"
                    client.sendall(text.encode())
                if b"upgrade" in fields:
                    while data := reader.read1(65536):
                        upstream.sendall(data)
        except OSError:
            pass
        finally:
            self._end(upstream)
            self._end(client)

    def _relay(self, upstream: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := upstream.recv(65536):
                client.sendall(data)
        self._end(client)


@contextlib.contextmanager
def proxy(api_url: str) -> Iterator[Proxy]:
    """Yield a proxy before an API."""
    made = Proxy(api_url)
    try:
        yield made
    finally:
        made.go_away()
