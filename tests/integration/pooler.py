"""A PostgreSQL pooler that ignores the startup `options` of its clients, as PgBouncer can be configured to do."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

import psycopg
from sqlalchemy import make_url

_STARTUP = 196608


@dataclass
class Pooler:
    """Listens on 127.0.0.1. With `by_transaction` each transaction gets the longest idle session, or the last used with
    `lifo`; otherwise a connection keeps its session."""

    url: str
    """The URL of the server, as SQLAlchemy writes it."""
    by_transaction: bool
    lifo: bool = False
    sessions_max: int = 20
    startup_parameters: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """The parameters of each client's startup message."""
    _idle: list[socket.socket] = field(default_factory=list[socket.socket])
    _open_sessions: int = 0
    _turn: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Start the pooler, and yield its URL."""
        with ExitStack() as stack, closing(socket.create_server(("127.0.0.1", 0))) as server:
            threading.Thread(target=self._accept, args=(server, stack), daemon=True).start()
            yield make_url(self.url).set(port=server.getsockname()[1]).render_as_string(hide_password=False)
            server.shutdown(socket.SHUT_RDWR)

    def _accept(self, server: socket.socket, stack: ExitStack) -> None:
        with suppress(OSError):
            for number in count(1):
                client, _ = server.accept()
                threading.Thread(target=self._serve, args=(client, stack, number), daemon=True).start()

    def _serve(self, client: socket.socket, stack: ExitStack, number: int) -> None:
        session: socket.socket | None = None
        with closing(client), suppress(OSError, EOFError, ValueError):  # closed at the end of the test
            self._greet(client, number)
            while True:
                started = _some(client)
                if started[:1] == b"X":
                    break
                session = session or self._take(stack)
                session.sendall(started)
                _relay(client, session)
                if self.by_transaction:
                    self._give(session)
                    session = None
        if session is not None:
            # The open transaction is rolled back and settings are lost, as with `server_reset_query = DISCARD ALL`.
            session.close()
            with self._turn:
                self._open_sessions -= 1
                self._turn.notify()

    def _greet(self, client: socket.socket, number: int) -> None:
        while True:
            (size,) = struct.unpack("!i", _exactly(client, 4))
            body = _exactly(client, size - 4)
            if struct.unpack("!i", body[:4])[0] == _STARTUP:
                break
            client.sendall(b"N")  # neither TLS nor GSS
        words = body[4:].decode().rstrip("\0").split("\0")
        self.startup_parameters.append(dict(zip(words[::2], words[1::2], strict=False)))
        parameters = {"server_version": "18.0", "client_encoding": "UTF8", "standard_conforming_strings": "on"}
        parameters |= {"integer_datetimes": "on", "DateStyle": "ISO, MDY", "TimeZone": "UTC"}
        client.sendall(_message(b"R", struct.pack("!i", 0)))
        for name, value in parameters.items():
            client.sendall(_message(b"S", f"{name}\0{value}\0".encode()))
        client.sendall(_message(b"K", struct.pack("!ii", number, number)) + _message(b"Z", b"I"))

    def _take(self, stack: ExitStack) -> socket.socket:
        with self._turn:
            while not self._idle and self._open_sessions >= self.sessions_max:
                self._turn.wait()
            if self._idle and (self.lifo or self._open_sessions > 1):
                return self._idle.pop(-1 if self.lifo else 0)
            self._open_sessions += 1
        connection = psycopg.connect(self.url.replace("+psycopg", "", 1), autocommit=True)
        stack.callback(connection.close)
        return stack.enter_context(closing(socket.socket(fileno=os.dup(connection.pgconn.socket))))

    def _give(self, session: socket.socket) -> None:
        with self._turn:
            self._idle.append(session)
            self._turn.notify()


def _relay(client: socket.socket, session: socket.socket) -> None:
    """Relay both ways until the server reports that no transaction is open."""
    session.setblocking(True)
    waiting = b""
    while True:
        ready, _, _ = select.select([client, session], [], [])
        if client in ready:
            session.sendall(_some(client))
        if session in ready:
            came = _some(session)
            client.sendall(came)
            waiting += came
            status = b""
            while len(waiting) > 5 and len(waiting) > (size := struct.unpack("!i", waiting[1:5])[0]):
                status = waiting[5:6] if waiting[:1] == b"Z" else b""
                waiting = waiting[size + 1 :]
            if not waiting and status == b"I":  # later bytes of the client begin another transaction
                return


def _some(end: socket.socket, most: int = 1 << 16) -> bytes:
    came = end.recv(most)
    if not came:
        raise EOFError
    return came


def _exactly(end: socket.socket, size: int) -> bytes:
    came = b""
    while len(came) < size:
        came += _some(end, size - len(came))
    return came


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body
