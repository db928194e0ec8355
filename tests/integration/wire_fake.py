"""A server that says what a test tells it to say, for what a real one would say only under rare faults."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Self

from eventjet.wire import Endpoint

INFO = b'INFO {"server_id":"fake","version":"2.15.1","headers":true,"max_payload":1048576}\r\n'


class FakeServer:
    """Accepts one connection after the other and hands each to `script`, in a thread."""

    def __init__(self, script: Callable[[socket.socket], None]) -> None:
        self._script = script
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._conversations: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint((self.url,))

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone would not wake a thread that waits in accept.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for conversation in self._conversations:
            conversation.close()
        self._thread.join(5.0)

    def _serve(self) -> None:
        while True:
            try:
                conversation, _ = self._listening.accept()
                self._conversations.append(conversation)
                self._script(conversation)
            except OSError:
                return


def greet(conversation: socket.socket) -> None:
    """The greeting of a server that lets everybody in."""
    conversation.sendall(INFO)
    read_until(conversation, b"PING\r\n")
    conversation.sendall(b"PONG\r\n")


def read_until(conversation: socket.socket, end: bytes) -> bytes:
    """What the client sent, up to and including `end`."""
    data = b""
    while end not in data:
        more = conversation.recv(65_536)
        if not more:
            raise ConnectionResetError
        data += more
    return data
