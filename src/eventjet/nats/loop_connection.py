"""A connection to NATS that the loop reads by itself: many requests at once, their answers as frames.

For one loop. It does not reconnect: `Client` opens another one.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import Self

import orjson

from eventjet.errors import ConnectionLost, Forbidden, Unreachable
from eventjet.nats.dial import Dialled, dial
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.open_request import Lateness, OpenRequest, stood_still_s
from eventjet.nats.protocol import Control, Frame, publish_frame, server_fault, subscribe_frame

PING_S, PONG_S = 10.0, 4.0
"""After so much silence the server is asked for a sign of life, sooner when a request is late; and how long that may
take before the server counts as lost."""
ROOM_BYTES = 1 << 20
"""What may wait for the socket before those who send wait with it."""
_CHUNK = 131_072
_CHUNKS_MAX = 64
_REPLIES = b"1"
_ANSWERED_MAX = 1_000
"""So many publishes are remembered after their answer: a second one says that somebody else answers, too."""
_SETTLED_S = 0.5
"""Between two looks whether the loop that asked for a connection is still there to take it."""
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_subject_of = itemgetter(1)


class LoopConnection:
    """Made by `open`. Whatever ends it ends every exchange over it, with the same error."""

    def __init__(self, dialled: Dialled, endpoint: Endpoint, on_end: Callable[[LoopConnection], object]) -> None:
        self.info = dialled.info
        """The server's INFO, its newest."""
        self.usable = True
        """False once it was closed or lost."""
        self.on_denied: Callable[[Forbidden], object] | None = None
        """Called for a violation that concerns nothing that waits for an answer."""
        self._sock = dialled.sock
        self._parser = dialled.parser
        self._peer = dialled.peer
        self._on_end = on_end
        self._inbox = f"{endpoint.inbox_prefix}.{secrets.token_hex(11)}"
        self._replies = f"{self._inbox}.".encode()
        self._loop = asyncio.get_running_loop()
        self._exchanges: dict[bytes, OpenRequest] = {}
        self._answered: dict[bytes, Callable[[Frame], bool]] = {}
        self._heard: dict[bytes, Callable[[Frame], object]] = {}
        self._subscribed = 0
        self._count = 0
        self._unsent = bytearray()
        self._unsent_requests: list[OpenRequest] = []
        self._is_sending = False
        self._heard_at = self._loop.time()
        self._pinged_at = 0.0
        self._doubted = False
        """Whether the answer to the last ping was waited for twice."""
        self._lateness = Lateness(self._exchanges, self._read_on, self._doubt)
        self._pinging = self._loop.call_later(PING_S, self._check_alive)
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._readable)
        self.send(subscribe_frame(f"{self._inbox}.*", _REPLIES))
        if dialled.controls:
            self._loop.call_soon(self._took, list[Frame](), dialled.controls)

    @classmethod
    async def open(cls, endpoint: Endpoint, timeout_s: float, on_end: Callable[[LoopConnection], object]) -> Self:
        """Connect to the first server that lets this client in; raises what `NatsConnection.open` raises."""
        return cls(await _dialled(endpoint, timeout_s), endpoint, on_end)

    @property
    def has_room(self) -> bool:
        """Whether it is usable and takes more at once."""
        return self.usable and len(self._unsent) <= ROOM_BYTES

    @property
    def domain(self) -> str | None:
        """The server's JetStream domain, empty where it has none; None where the server itself has no JetStream."""
        return str(self.info.get("domain", "")) if self.info.get("jetstream") else None

    def exchange(
        self,
        subjects: Collection[str],
        patience_s: float,
        until: float | None = None,
        accepts: Callable[[Frame], bool] | None = None,
    ) -> OpenRequest:
        """Prepare for the answer to what is published on `subjects`; give the exchange to `forget` in the end.

        Where others may answer, too, `accepts` tells whose answers count. It sees those that come later as well.
        """
        now = self._loop.time()
        until = now + patience_s if until is None else until
        self._count += 1
        reply = b"%b%d" % (self._replies, self._count)
        exchange = OpenRequest(reply, subjects, patience_s, until, now, accepts)
        self._exchanges[reply] = exchange
        self._lateness.watch(exchange.look_at(now))
        return exchange

    def is_own_inbox(self, subject: bytes) -> bool:
        """Whether what is published there would be read as an answer to this connection."""
        return subject.startswith(self._replies)

    def forget(self, exchange: OpenRequest) -> None:
        """Ignore whatever still comes in answer to it, but for who it is that answers."""
        self._exchanges.pop(exchange.reply, None)
        if exchange.accepts is not None:
            self._answered[exchange.reply] = exchange.accepts
            if len(self._answered) > _ANSWERED_MAX:
                del self._answered[next(iter(self._answered))]

    def publish(self, subject: str, payload: bytes, headers: bytes = b"", exchange: OpenRequest | None = None) -> None:
        """Send one message with what else is sent in this turn of the loop, to be answered in an exchange."""
        reply = b"" if exchange is None else exchange.reply
        self.send(publish_frame(subject, payload, reply=reply, headers=headers))
        if exchange is not None:
            self._unsent_requests.append(exchange)

    def subscribe(self, subject: str, heard: Callable[[Frame], object], queue: str = "") -> bytes:
        """Have `heard` called with each message of a subject, as a member of a queue group where one is named.

        What is returned ends it: see `unsubscribe`.
        """
        self._subscribed += 1
        sid = b"%d" % (self._subscribed + 1)
        self._heard[sid] = heard
        self.send(subscribe_frame(subject, sid, queue))
        return sid

    def unsubscribe(self, sid: bytes) -> None:
        """Hear nothing of it any more."""
        self._heard.pop(sid, None)
        self.send(b"UNSUB %b\r\n" % sid)

    def send(self, data: bytes) -> None:
        """Send whole frames as they are."""
        self._unsent += data
        if not self._is_sending:
            # What others send in the same turn of the loop goes with it.
            self._is_sending = True
            self._loop.call_soon(self._flush)

    def close(self, fault: Exception) -> None:
        """End it, and every exchange over it with `fault`; any number of times."""
        if not self.usable:
            return
        self._flush()
        if not self.usable:
            return  # the flush found it lost
        self.usable = False
        self._pinging.cancel()
        self._lateness.close()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for exchange in self._exchanges.values():
            exchange.end(fault)
        self._on_end(self)

    # Helpers.

    def _lost(self, reason: str, cause: Exception | None = None) -> None:
        self._unsent.clear()
        lost = ConnectionLost(f"NATS at {self._peer}", reason)
        lost.__cause__ = cause
        self.close(lost)

    def _flush(self) -> None:
        self._is_sending = False
        if not self.usable or not self._unsent:
            return
        try:
            sent = self._sock.send(self._unsent)
        except _WOULD_BLOCK:
            sent = 0
        except OSError as error:
            self._lost(f"the connection broke ({error})")
            return
        del self._unsent[:sent]
        if self._unsent:
            self._is_sending = True
            self._loop.add_writer(self._sock, self._flush)
        else:
            self._loop.remove_writer(self._sock)
            now = self._loop.time()
            for exchange in self._unsent_requests:
                exchange.sent(now)
            self._unsent_requests.clear()

    def _read_on(self) -> None:
        """Take what has come by now: a socket holds no more."""
        for _ in range(_CHUNKS_MAX):
            if not self.usable or not self._readable():
                return

    def _readable(self) -> bool:
        """Whether something had come."""
        try:
            data = self._received()
            if not data:
                return False
            frames, controls = self._parser.feed(data)
        except ValueError as error:
            self._lost(f"it sent {error}")
        except OSError as error:
            self._lost(f"the connection broke ({error})")
        else:
            self._took(frames, controls)
        return True

    def _took(self, frames: list[Frame], controls: list[Control]) -> None:
        now = self._heard_at = self._loop.time()
        # A violation comes before the answer to what was let through of the same batch.
        faults = [
            server_fault(said.decode("utf-8", "replace"), self._peer) for verb, said in controls if verb == b"-ERR"
        ]
        ends = [fault for fault in faults if not self._is_settled(fault)]
        for subject, each in groupby(frames, _subject_of):
            exchange = self._exchanges.get(subject)
            if exchange is not None:
                exchange.arrived(list(each), now)
            elif subject in self._answered:
                for frame in each:
                    self._answered[subject](frame)
            elif self._heard:
                for frame in each:
                    if frame[0] in self._heard:
                        # In a turn of its own: what it raises is no matter of those who wait for answers.
                        self._loop.call_soon(self._heard[frame[0]], frame)
        if controls:
            self._answer(controls)
        if ends:
            # Whoever waits must not take it for an answer: what was sent before it may have arrived.
            self._lost(f"the server ended it ({ends[0]})", ends[0])

    def _received(self) -> bytes:
        """What has come; raises `OSError` at the end of the connection."""
        chunks: list[bytes] = []
        try:
            while True:
                chunk = self._sock.recv(_CHUNK)
                if not chunk:
                    raise ConnectionResetError("the server closed it")
                chunks.append(chunk)
                # What TLS has read and not handed out wakes nobody.
                if not isinstance(self._sock, ssl.SSLSocket) or not self._sock.pending():
                    break
        except _WOULD_BLOCK:
            pass
        return b"".join(chunks)

    def _answer(self, controls: list[Control]) -> None:
        for verb, argument in controls:
            if verb == b"PING":
                self.send(b"PONG\r\n")
            elif verb == b"INFO":
                with suppress(ValueError):
                    self.info |= orjson.loads(argument)

    def _is_settled(self, fault: Exception) -> bool:
        """Whether it is a violation, which ends what was published on its subject; all else ends the connection.

        So does a violation of the inbox: no answer would ever come.
        """
        if type(fault) is not Forbidden or fault.subject.startswith(self._inbox):
            return False
        concerned = [one for one in self._exchanges.values() if fault.subject in one.subjects]
        for exchange in concerned:
            exchange.end(fault)
        if not concerned and self.on_denied is not None:
            self.on_denied(fault)
        return True

    def _doubt(self) -> None:
        """A request had no answer in time. A server that said nothing else either is asked now: it may be frozen."""
        now = self._loop.time()
        if self.usable and self._pinged_at <= self._heard_at and now - self._heard_at >= PONG_S:
            self._pinging.cancel()
            self._ping(now)

    def _ping(self, now: float) -> None:
        self.send(b"PING\r\n")
        self._pinged_at, self._doubted = now, False
        self._pinging = self._loop.call_later(PONG_S, self._check_alive)

    def _check_alive(self) -> None:
        still_s = stood_still_s(self._pinging.when())
        if still_s:
            self._read_on()
            if not self.usable:
                return
        now = self._loop.time()
        if self._pinged_at > self._heard_at:
            if not still_s or self._doubted:
                self._lost(f"it has been silent for {now - self._heard_at:.0f} s")
                return
            self._doubted = True  # the ping may have been sent a moment ago
            self._pinging = self._loop.call_later(PONG_S, self._check_alive)
        elif now - self._heard_at >= PING_S:
            self._ping(now)
        else:
            self._pinging = self._loop.call_later(PING_S, self._check_alive)


async def _dialled(endpoint: Endpoint, timeout_s: float) -> Dialled:
    """`dial` in a thread of its own: the application's may all be busy, and nobody waits for this one to end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Dialled] = loop.create_future()
    settled = threading.Event()

    def settle(dialled: Dialled | None, error: Exception | None) -> None:
        settled.set()
        if future.done():
            if dialled is not None:
                dialled.sock.close()
        elif dialled is not None:
            future.set_result(dialled)
        elif error is not None:
            future.set_exception(error)

    def run() -> None:
        dialled, error = None, None
        try:
            dialled = dial(endpoint, timeout_s)
        except Exception as raised:  # noqa: BLE001 - whoever waits raises it
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, dialled, error)
        # One that ends before it comes to this leaves the connection to nobody.
        while dialled is not None and not settled.wait(_SETTLED_S):
            if loop.is_closed():
                dialled.sock.close()
                return

    try:
        threading.Thread(target=run, name="eventjet dial", daemon=True).start()
    except RuntimeError as error:
        raise Unreachable("NATS", f"this process cannot start a thread ({error})", "Raise its limits.") from None
    try:
        return await future
    except asyncio.CancelledError:
        # It may have come in the same turn of the loop.
        if not future.cancelled() and future.done() and future.exception() is None:
            future.result().sock.close()
        raise
