"""A fake server with scripted answers, for answers that a real server gives only under rare faults."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from typing import Self

from eventjet.nats.endpoint import Endpoint

GRANTED = b'{"num_pending": 9, "config": {}, "success": true}'
_PUBLISHED = re.compile(rb"PUB (\S+) (\S+) (\d+)\r\n")

INFO = b'INFO {"server_id":"fake","version":"2.15.1","headers":true,"max_payload":1048576}\r\n'


class FakeServer:
    """Accepts connections one after another, and runs `script` with each in a thread."""

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
    """Greet the client as a server without authentication does."""
    conversation.sendall(INFO)
    read_until(conversation, b"PING\r\n")
    conversation.sendall(b"PONG\r\n")


def jetstream(on_pull: Callable[[bytes, int], bytes]) -> Callable[[socket.socket], None]:
    """Return a script that grants every request and answers a consumer's n-th pull with `on_pull(consumer, n)`."""

    def script(conversation: socket.socket) -> None:
        greet(conversation)
        buffer, pulls = b"", 0
        while data := conversation.recv(65_536):
            buffer += data
            while match := _PUBLISHED.search(buffer):
                subject, reply, size = match[1], match[2], int(match[3])
                if len(buffer) < match.end() + size + 2:
                    break
                buffer = buffer[match.end() + size + 2 :]
                if b"MSG.NEXT" in subject:
                    pulls += 1
                    conversation.sendall(on_pull(subject.rpartition(b".")[2], pulls))
                else:
                    conversation.sendall(b"MSG %b 1 %d\r\n%b\r\n" % (reply, len(GRANTED), GRANTED))

    return script


def status(line: bytes) -> bytes:
    """Return a status message to the inbox of a pull, which is subscription 2 of our readers."""
    block = b"NATS/1.0 %b\r\n\r\n" % line
    return b"HMSG inbox 2 %d %d\r\n%b\r\n" % (len(block), len(block), block)


def delivery(consumer: bytes, position: int, sequence: int, *, delivered: int = 1) -> bytes:
    """Return the delivery of an event of the stream `bank`."""
    ack = b"$JS.ACK.bank.%b.%d.%d.%d.1700000000000000000.5" % (consumer, delivered, position, sequence)
    return b"MSG bank.account.a 2 %b 2\r\n{}\r\n" % ack


def read_until(conversation: socket.socket, end: bytes) -> bytes:
    """Return what the client sent, up to and including `end`."""
    data = b""
    while end not in data:
        more = conversation.recv(65_536)
        if not more:
            raise ConnectionResetError
        data += more
    return data
