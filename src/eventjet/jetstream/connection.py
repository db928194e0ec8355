"""`NatsConnection`: one blocking connection to NATS.

For one thread at a time; `close` may be called from any. Every wait is bounded: by its own timeout, and by pings that
tell a server which stopped answering from one that has nothing to say. It does not reconnect: its owner knows where to
go on. Messages of other subscriptions that arrive during a `request` are kept for the next `receive`.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

from eventjet.codec.headers import RawRecord
from eventjet.errors import (
    ApiRefused,
    ConnectionClosed,
    ConnectionLost,
    Forbidden,
    NoResponders,
    SingleResponse,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from eventjet.jetstream.answers import PROBE, Answerers, ExpectedAnswer
from eventjet.jetstream.api import (
    LAG_S,
    Conversation,
    Request,
    call,
    is_page,
    is_status,
    reading_records,
    reading_values,
    shortened,
)
from eventjet.nats.dial import Dialled, dial
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Control, Frame, nobody_listens, publish_frame, server_fault, subscribe_frame

T = TypeVar("T")

_CHUNK = 131_072
_REPLIES = b"1"
_KEPT_MAX = 200_000
_SEND_TIMEOUT_S = 10.0
_TRIES, _END_S = 3, 0.5
"""How often a page of one message without an end is asked for again, and how long its end may take."""


class NatsConnection:
    """A blocking connection; see `open`."""

    def __init__(self, dialled: Dialled, endpoint: Endpoint, ping_interval_s: float) -> None:
        self.info = dialled.info
        """The server's INFO, as it was at the greeting."""
        self.peer = dialled.peer
        self.inbox = f"{endpoint.inbox_prefix}.{secrets.token_hex(11)}"
        """Prefix of the subjects that are this connection's own."""
        self.routed = endpoint.routed
        self._is_elsewhere = endpoint.is_elsewhere
        self._sock = dialled.sock
        self._parser = dialled.parser
        self._early = dialled.controls
        self._ping_interval_s = ping_interval_s
        self._heard_at = time.monotonic()
        self._pinged_at: float | None = None
        self._kept: list[Frame] = []
        self._sids = 1
        self._requests = 0
        self._closed = False
        self._broken = False
        self._busy = threading.Lock()
        self._answerers = Answerers()
        self._domain: str | None = None
        """See `Client.domain`; asked for before the first publish for a stream."""
        self.max_payload = int(self.info.get("max_payload", 1024 * 1024))

    @classmethod
    def open(cls, endpoint: Endpoint, *, timeout_s: float = 5.0, ping_interval_s: float = 5.0) -> Self:
        """Connect to the first server that lets this client in.

        Raises `Unauthorized` when one refused the credentials and no other took them, `Unreachable` when none answers,
        `UsageError` for credentials that cannot be read. A server silent for two `ping_interval_s` counts as lost.
        """
        return cls(dial(endpoint, timeout_s), endpoint, ping_interval_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What is sent.

    def publish(self, subject: str, payload: bytes = b"", *, headers: bytes = b"", reply: str = "") -> None:
        """Send one message and do not wait; raises `UsageError` where the server would drop the connection over it."""
        self.send(self._message(self.routed(subject), payload, headers, reply.encode()))

    def subscribe(self, subject: str) -> bytes:
        """Subscribe to a subject; returns the subscription id that its frames carry."""
        self._sids += 1
        sid = b"%d" % self._sids
        self.send(subscribe_frame(subject, sid))
        return sid

    def send(self, data: bytes) -> None:
        """Send whole frames as they are."""
        if self._closed:
            raise ConnectionClosed
        try:
            with self._busy:
                self._sock.settimeout(_SEND_TIMEOUT_S)
                self._sock.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    # What is received.

    def receive(self, timeout_s: float) -> list[Frame]:
        """Return the messages that are there, or the first to come; empty when none came in time.

        With 0 it takes only what has arrived. Raises `ConnectionLost`, `ConnectionClosed`, and `Forbidden` for a denied
        permission, which leaves the connection usable.
        """
        if self._kept:
            kept, self._kept = self._kept, []
            return kept

        deadline = time.monotonic() + timeout_s
        if self._early:
            early, self._early = self._early, []
            self._answer(early, [])
        while True:
            left = deadline - time.monotonic()
            data = self._read(max(0.0, min(left, self._ping_interval_s)))
            if data:
                self._heard_at, self._pinged_at = time.monotonic(), None
                try:
                    frames, controls = self._parser.feed(data)
                except ValueError as error:
                    raise ConnectionLost(f"NATS at {self.peer}", f"it sent {error}") from error
                if controls:
                    self._answer(controls, frames)
                if frames:
                    return frames
            elif left > 0:
                self._keep_alive()
            if left <= 0:
                return []

    def receive_of(self, sid: bytes, timeout_s: float) -> list[Frame]:
        """Receive from one subscription; messages of others are kept for `receive`.

        Raises as `receive`, and `ConnectionLost` where too many are kept.
        """
        kept, self._kept = self._kept, []
        if own := [frame for frame in kept if frame[0] == sid]:
            self._kept = [frame for frame in kept if frame[0] != sid]
            return own
        try:
            frames = self.receive(timeout_s)
            kept += [frame for frame in frames if frame[0] != sid]
            if len(kept) > _KEPT_MAX:
                raise ConnectionLost(f"NATS at {self.peer}", f"more than {_KEPT_MAX} messages came before an answer")
            return [frame for frame in frames if frame[0] == sid]
        finally:
            self._kept = kept + self._kept

    def keep(self, frames: list[Frame]) -> None:
        """Give frames back for the next `receive`."""
        self._kept += frames

    def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: bytes = b"",
        timeout_s: float = 5.0,
        stream: str = "",
        messages: int = 1,
    ) -> Frame:
        """Send and wait for the answer; raises `NoResponders` at once, `StoreUnavailable` after `timeout_s`.

        What is to be stored names its `stream`, and how many messages are stored with it: see `ExpectedAnswer`.
        """
        expected = self._expected(stream, subject, messages)
        return self._answers([(subject, payload, headers)], [expected], timeout_s)[0]

    def ask(self, request: Request[T], *, timeout_s: float = 5.0) -> T:
        """Return the answer to a request; raises what it means, and as `request`."""
        return self.ask_all([request], timeout_s=timeout_s)[0]

    def ask_all(self, requests: Sequence[Request[T]], *, timeout_s: float = 5.0) -> list[T]:
        """Return the answers, in order, to requests that are sent together, with one deadline; raises as `ask`."""
        frames = self._answers(
            [(each.subject, each.payload, each.headers) for each in requests],
            [self._expected(each.stream, each.subject) for each in requests],
            timeout_s,
        )
        return [each.parse(frame) for each, frame in zip(requests, frames, strict=True)]

    def records(self, stream: str, subject: str, limit: int | None = None) -> list[RawRecord]:
        """Return all records whose subject matches: see `reading_records`."""
        return self.run(reading_records(stream, subject, limit))

    def values(self, bucket: str, keys: str, limit: int | None = None) -> list[RawRecord]:
        """Return the values of all keys of a bucket that match, in a few requests: see `reading_values`."""
        return self.run(reading_values(bucket, keys, limit))

    def run(self, conversation: Conversation[T], timeout_s: float = 5.0) -> T:
        """Drive a conversation to its end and return what it returns."""
        answer: Any = None
        error: Exception | None = None
        try:
            while True:
                request = conversation.send(answer) if error is None else conversation.throw(error)
                answer = error = None
                try:
                    if request is None:
                        time.sleep(LAG_S)
                    elif is_page(request):
                        answer = self._page(request, timeout_s)
                    else:
                        answer = self.ask(request, timeout_s=timeout_s)
                except StoreError as raised:
                    error = raised
        except StopIteration as ended:
            return ended.value

    def _page(self, request: Request[Any], timeout_s: float) -> list[Frame]:
        """Return all messages of a long answer, the last of which is the status that ends it; raises as `ask`."""
        frames = self._part(request, timeout_s)
        if not frames or not is_status(frames[-1]):
            if len(frames) == 1:
                self.check_pages(request)
            raise StoreUnavailable(request.subject, f"no whole answer within {timeout_s:g} s")
        if nobody_listens(frames[-1]):
            raise NoResponders(self.routed(request.subject))
        return frames

    def _part(self, request: Request[Any], timeout_s: float) -> list[Frame]:
        """Return what arrives of a long answer within the time, up to the status that ends it."""
        (reply,) = self._reply_subjects(1)
        self.send(self._message(self.routed(request.subject), request.payload, request.headers, reply))
        frames: list[Frame] = []
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            frames += [frame for frame in self.receive_of(_REPLIES, left) if frame[1] == reply]
            if frames and is_status(frames[-1]):
                break
        return frames

    def check_pages(self, request: Request[Any]) -> None:
        """Raise `SingleResponse` where a page brings its first message and never its end, however often it is asked."""
        for _ in range(_TRIES):
            frames = self._part(shortened(request), _END_S)
            if len(frames) != 1 or is_status(frames[0]):
                return
        raise SingleResponse(self.routed(request.subject))

    def api(self, subject: str, body: object = None, *, timeout_s: float = 5.0) -> dict[str, Any]:
        """Make a JetStream request in JSON, `subject` without `$JS.API.`; raises `ApiRefused` for its `error`."""
        return self.ask(call(subject, body), timeout_s=timeout_s)

    def probe(self, kinds: Sequence[tuple[str, str]], wait_s: float) -> tuple[list[ExpectedAnswer], tuple[str, ...]]:
        """Ask who answers what is published to each (stream, subject); return the answers, and who else gave some.

        Nobody stores it. A subject that these credentials may not use has no answer.
        """
        asked: dict[bytes, ExpectedAnswer] = {}
        sid = self.subscribe(f"{self.inbox}.who.*")
        for number, (stream, subject) in enumerate(kinds):
            expected = self._expected(stream, subject)
            assert expected is not None
            reply = f"{self.inbox}.who.{number}"
            asked[reply.encode()] = expected
            self.publish(subject, headers=PROBE, reply=reply)
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(Forbidden):
                for frame in self.receive_of(sid, left_s):
                    if frame[1] in asked:
                        asked[frame[1]].accepts(frame)
        self.send(b"UNSUB %b\r\n" % sid)
        return list(asked.values()), self._answerers.others

    def _expected(self, stream: str, subject: str, messages: int = 1) -> ExpectedAnswer | None:
        if not stream:
            return None
        if self._domain is None:
            self._domain = self._asked_domain()
        return ExpectedAnswer(stream, subject, messages, self._domain, self._answerers)

    def _asked_domain(self) -> str | None:
        """Return the JetStream domain by the API, else by the server's greeting; None where neither names one."""
        with suppress(Forbidden, ApiRefused, StoreUnavailable):
            return str(self.api("INFO").get("domain", ""))
        if self._is_elsewhere or not self.info.get("jetstream"):
            return None
        return str(self.info.get("domain", ""))

    def _answers(
        self,
        messages: Sequence[tuple[str, bytes, bytes]],
        expected: Sequence[ExpectedAnswer | None],
        timeout_s: float,
    ) -> list[Frame]:
        """Send (subject, payload, headers) of each message, and return their answers in order."""
        messages = [(self.routed(subject), payload, headers) for subject, payload, headers in messages]
        replies = self._reply_subjects(len(messages))
        waiting = {reply: message[0] for reply, message in zip(replies, messages, strict=True)}
        wanted = {reply: each for reply, each in zip(replies, expected, strict=True) if each is not None}
        self.send(b"".join([self._message(*message, reply) for reply, message in zip(replies, messages, strict=True)]))
        answers: dict[bytes, Frame] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for frame in self.receive_of(_REPLIES, left):
                if frame[1] in wanted and not wanted[frame[1]].accepts(frame):
                    continue
                if frame[1] in waiting:  # else a late answer to an earlier request
                    subject = waiting.pop(frame[1])
                    if nobody_listens(frame):
                        raise NoResponders(subject)
                    answers[frame[1]] = frame
        if waiting:
            raise StoreUnavailable(next(iter(waiting.values())), f"none within {timeout_s:g} s")
        return [answers[reply] for reply in replies]

    def _reply_subjects(self, count: int) -> list[bytes]:
        """Return new reply subjects, subscribed to since the first request."""
        if not self._requests:
            self.send(subscribe_frame(f"{self.inbox}.r.*", _REPLIES))
        first, self._requests = self._requests + 1, self._requests + count
        return [f"{self.inbox}.r.{number}".encode() for number in range(first, first + count)]

    # The end.

    def close(self) -> None:
        """From any thread, any number of times: the thread that waits on it raises `ConnectionClosed` at once."""
        self._closed = True
        with suppress(OSError):
            # Past ssl's own shutdown, which would pull the TLS state from under the reader.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        with self._busy, suppress(OSError):
            self._sock.close()

    @property
    def usable(self) -> bool:
        """False once it was closed or lost."""
        return not (self._closed or self._broken)

    # Helpers.

    def _message(self, subject: str, payload: bytes, headers: bytes, reply: bytes) -> bytes:
        if len(payload) + len(headers) > self.max_payload:
            raise UsageError(
                f"A message of {len(payload) + len(headers)} bytes exceeds the server's limit of {self.max_payload}. "
                "Send less, or raise max_payload."
            )
        return publish_frame(subject, payload, reply=reply, headers=headers)

    def _read(self, timeout_s: float) -> bytes:
        """Return what has arrived; empty after the timeout."""
        if self._closed:
            raise ConnectionClosed
        try:
            with self._busy:
                self._sock.settimeout(timeout_s)
                data = self._sock.recv(_CHUNK)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError) as error:
            if self._closed:
                raise ConnectionClosed from error
            return b""
        except OSError as error:
            raise self._lost(error) from error
        if not data:
            raise self._lost(None)
        return data

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if self._pinged_at is not None:
            if now - self._pinged_at >= self._ping_interval_s:
                self._broken = True
                raise ConnectionLost(f"NATS at {self.peer}", f"it has been silent for {now - self._heard_at:.1f} s")
        elif now - self._heard_at >= self._ping_interval_s:
            self.send(b"PING\r\n")
            self._pinged_at = now

    def _answer(self, controls: list[Control], frames: list[Frame]) -> None:
        """Answer pings; raises the first `-ERR`, keeping `frames` for later."""
        fault: Exception | None = None
        for verb, argument in controls:
            if verb == b"PING":
                self.send(b"PONG\r\n")
            elif verb == b"-ERR" and fault is None:
                fault = server_fault(argument.decode("utf-8", "replace"), self.peer)
        if fault is not None:
            self._kept = frames
            self._broken = self._broken or type(fault) is not Forbidden
            raise fault

    def _lost(self, error: OSError | None) -> StoreUnavailable:
        if self._closed:
            return ConnectionClosed()
        self._broken = True
        reason = "it closed the connection" if error is None else f"the connection broke ({error})"
        return ConnectionLost(f"NATS at {self.peer}", reason)


def ask_once(endpoint: Endpoint, request: Request[T], *, timeout_s: float = 5.0) -> T:
    """Return the answer to a request over a connection of its own; raises as `NatsConnection.open` and `ask`."""
    with NatsConnection.open(endpoint, timeout_s=timeout_s) as link:
        return link.ask(request, timeout_s=timeout_s)
