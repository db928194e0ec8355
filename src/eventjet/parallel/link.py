"""`FoldLink`: messages between a process and one of its fold processes, over a socket that nobody else can reach.

A message is its length, its kind and its payload. Every send and every receive has a bound.
"""

from __future__ import annotations

import select
import socket
import struct
from contextlib import suppress
from typing import TypeAlias

TASK, RECORDS, CUT = b"T", b"R", b"C"
"""To a fold process: what to do, raw records of its own, and the end of a batch with its mark."""
BEGUN, DONE, FAILED = b"B", b"D", b"F"
"""From it: that it has begun; what a batch came to; and, last of all, why it cannot go on."""

Kind: TypeAlias = bytes

_HEAD = struct.Struct(">cQ")
_PIECE = 1 << 20
_BUFFER = 1 << 20
"""What a socket should hold, as far as the system lets it."""


class LinkClosed(Exception):
    """The other process is gone."""


class FoldLink:
    """One end. One thread may send while another one receives."""

    def __init__(self, sock: socket.socket, bound_s: float | None = None) -> None:
        """`bound_s` is how long the other end may take nothing, or leave off within a message; None: for ever."""
        sock.settimeout(bound_s)
        self._socket = sock
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        self._received = bytearray()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Blocks while the other end takes nothing; raises `LinkClosed`, and `TimeoutError` past the bound."""
        try:
            self._socket.sendall(_HEAD.pack(kind, len(payload)))
            self._socket.sendall(payload)
        except TimeoutError:
            raise
        except OSError as error:
            raise LinkClosed from error

    def is_ready(self, timeout_s: float) -> bool:
        """Whether something has come, or the other end is gone; waits for it so long."""
        if self._received:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1_000 * timeout_s))

    def receive(self) -> tuple[Kind, bytes]:
        """The next message; raises `LinkClosed`, and `TimeoutError` past the bound."""
        self._fill(_HEAD.size)
        kind, length = _HEAD.unpack_from(self._received)
        self._fill(_HEAD.size + length)
        payload = bytes(memoryview(self._received)[_HEAD.size : _HEAD.size + length])
        del self._received[: _HEAD.size + length]
        return kind, payload

    def close(self) -> None:
        """Also wakes whoever waits in another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, size: int) -> None:
        received = self._received
        while len(received) < size:
            try:
                piece = self._socket.recv(min(_PIECE, size - len(received)))
            except TimeoutError:
                raise
            except OSError as error:
                raise LinkClosed from error
            if not piece:
                raise LinkClosed
            received += piece
