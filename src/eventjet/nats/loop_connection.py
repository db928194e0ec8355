"""A connection to NATS that the loop reads by itself: many requests at once, their answers as frames.

For one loop. It does not reconnect: whoever asks opens another one.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Self

from eventjet.errors import ConnectionLost
from eventjet.nats.dial import Dialled, dial
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.faults import server_fault
from eventjet.nats.protocol import Control, Frame, publish_frame, subscribe_frame

_CHUNK = 131_072
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_subject_of = itemgetter(1)

Hand = Callable[["list[Frame] | Exception"], object]
"""Takes what came of a request: frames, or what ended it."""


class LoopConnection:
    """Made by `open`. Whatever ends it ends every request on it, with the same error."""

    def __init__(self, dialled: Dialled, endpoint: Endpoint) -> None:
        self._sock = dialled.sock
        self._parser = dialled.parser
        self._peer = dialled.peer
        self._inbox = f"{endpoint.inbox_prefix}.{secrets.token_hex(11)}"
        self._loop = asyncio.get_running_loop()
        self._asked: dict[bytes, Hand] = {}
        self._count = 0
        self._unsent = bytearray()
        self._is_sending = False
        self.usable = True
        """False once it was closed or lost."""
        self.heard_at = time.monotonic()
        """When the server last said anything, by the steady clock."""
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._readable)
        self._send(subscribe_frame(f"{self._inbox}.*", b"1"))
        if dialled.controls:
            self._loop.call_soon(self._answer, dialled.controls)

    @classmethod
    async def open(cls, endpoint: Endpoint, timeout_s: float) -> Self:
        """Connect to the first server that answers, in a thread; raises what `wire.Link.open` raises."""
        dialling = asyncio.get_running_loop().run_in_executor(None, dial, endpoint, timeout_s)
        try:
            return cls(await asyncio.shield(dialling), endpoint)
        except asyncio.CancelledError:
            dialling.add_done_callback(_hang_up)
            raise

    def ask(self, subject: str, payload: bytes, hand: Hand) -> bytes:
        """Send a request, and have `hand` called with each part of its answer; what to `forget` it by."""
        self._count += 1
        reply = f"{self._inbox}.{self._count}".encode()
        frame = publish_frame(subject, payload, reply=reply)
        self._asked[reply] = hand
        self._send(frame)
        return reply

    def forget(self, reply: bytes) -> None:
        """Drop what still comes of a request."""
        self._asked.pop(reply, None)

    def close(self, fault: Exception) -> None:
        """End it, and every request on it with `fault`; any number of times."""
        if not self.usable:
            return
        self.usable = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        asked, self._asked = self._asked, {}
        for hand in asked.values():
            hand(fault)

    def lost(self, reason: str) -> None:
        """Close it because the server is gone, or seems to be."""
        self.close(ConnectionLost(f"NATS at {self._peer}", reason))

    def _send(self, data: bytes) -> None:
        self._unsent += data
        if not self._is_sending:
            # What others ask in the same turn of the loop goes with it.
            self._is_sending = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_sending = False
        if not self.usable:
            return
        try:
            sent = self._sock.send(self._unsent)
        except _WOULD_BLOCK:
            sent = 0
        except OSError as error:
            self.lost(f"the connection broke ({error})")
            return
        del self._unsent[:sent]
        if self._unsent:
            self._is_sending = True
            self._loop.add_writer(self._sock, self._flush)
        else:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            frames, controls = self._parser.feed(self._received())
        except ValueError as error:
            self.lost(f"it sent {error}")
            return
        except OSError as error:
            self.lost(f"the connection broke ({error})")
            return
        self.heard_at = time.monotonic()
        for reply, each in groupby(frames, _subject_of):
            hand = self._asked.get(reply)
            if hand is not None:
                hand(list(each))
        if controls:
            self._answer(controls)

    def _received(self) -> bytes:
        """What has come; raises `OSError` at the end of the connection."""
        chunks: list[bytes] = []
        try:
            while True:
                chunk = self._sock.recv(_CHUNK)
                if not chunk:
                    raise ConnectionResetError("the server closed it")
                chunks.append(chunk)
                if not _held_back(self._sock):
                    break
        except _WOULD_BLOCK:
            pass
        return b"".join(chunks)

    def _answer(self, controls: list[Control]) -> None:
        for verb, argument in controls:
            if verb == b"PING":
                self._send(b"PONG\r\n")
            elif verb == b"-ERR":
                # A denied subject is the same one for all who ask.
                self.close(server_fault(argument.decode("utf-8", "replace"), self._peer))


def _held_back(sock: socket.socket) -> int:
    """Bytes that TLS has read and not handed out, which wake nobody."""
    return sock.pending() if isinstance(sock, ssl.SSLSocket) else 0


def _hang_up(dialling: asyncio.Future[Dialled]) -> None:
    if not dialling.cancelled() and dialling.exception() is None:
        dialling.result().sock.close()
