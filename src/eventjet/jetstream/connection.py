"""`NatsConnection`: one blocking connection to NATS.

It is for one thread at a time; `close` may be called from any thread. Every wait is bounded: by its own timeout, and by
pings that tell a server which stopped answering from a server that has nothing to send. The connection does not
reconnect, since only its owner knows where to continue. Messages of other subscriptions that arrive during a `request`
are kept for the next `receive`.
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
"""How often a page is requested whose end does not arrive, and how long the end may take."""


class NatsConnection:
    """A blocking connection to NATS, for one thread at a time; see `open`."""

    def __init__(self, dialled: Dialled, endpoint: Endpoint, ping_interval_s: float) -> None:
        self.info = dialled.info
        """The server's INFO, as it was after the login."""
        self.peer = dialled.peer
        self.inbox = f"{endpoint.inbox_prefix}.{secrets.token_hex(11)}"
        """Prefix of the reply subjects of this connection."""
        self.routed = endpoint.routed
        self._is_elsewhere = endpoint.is_elsewhere
        self._sock = dialled.sock
        self._parser = dialled.parser
        self._early_controls = dialled.controls
        self._ping_interval_s = ping_interval_s
        self._heard_at = time.monotonic()
        self._pinged_at: float | None = None
        self._kept_frames: list[Frame] = []
        self._sids = 1
        self._requests = 0
        self._closed = False
        self._broken = False
        self._busy = threading.Lock()
        self._answerers = Answerers()
        self._domain: str | None = None
        """The JetStream domain, as `Client.domain`; asked for before the first publish that names a stream."""
        self.max_payload = int(self.info.get("max_payload", 1024 * 1024))

    @classmethod
    def open(cls, endpoint: Endpoint, *, timeout_s: float = 5.0, ping_interval_s: float = 5.0) -> Self:
        """Connect to the first server that lets this client in.

        Raises `Unauthorized` when a server refused the credentials and no other accepted them, `Unreachable` when no
        server answers, and `UsageError` for credentials that cannot be read. A server that is silent for two
        `ping_interval_s` counts as lost.
        """
        return cls(dial(endpoint, timeout_s), endpoint, ping_interval_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Sending.

    def publish(self, subject: str, payload: bytes = b"", *, headers: bytes = b"", reply: str = "") -> None:
        """Send one message without waiting; raises `UsageError` for a message that is too large for the server."""
        self.send(self._message(self.routed(subject), payload, headers, reply.encode()))

    def subscribe(self, subject: str) -> bytes:
        """Subscribe to a subject, and return the subscription id that the frames of its messages carry."""
        self._sids += 1
        sid = b"%d" % self._sids
        self.send(subscribe_frame(subject, sid))
        return sid

    def send(self, data: bytes) -> None:
        """Send frames that are encoded already."""
        if self._closed:
            raise ConnectionClosed
        try:
            with self._busy:
                self._sock.settimeout(_SEND_TIMEOUT_S)
                self._sock.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    # Receiving, and requests.

    def receive(self, timeout_s: float) -> list[Frame]:
        """Return the messages that have arrived, or wait for the first; empty if none arrived in time.

        A `timeout_s` of 0 does not wait. Raises `ConnectionLost`, `ConnectionClosed`, and `Forbidden` for a denied
        permission, which leaves the connection usable.
        """
        if self._kept_frames:
            kept_frames, self._kept_frames = self._kept_frames, []
            return kept_frames

        deadline = time.monotonic() + timeout_s
        if self._early_controls:
            early_controls, self._early_controls = self._early_controls, []
            self._answer(early_controls, [])
        while True:
            left_s = deadline - time.monotonic()
            data = self._read(max(0.0, min(left_s, self._ping_interval_s)))
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
            elif left_s > 0:
                self._keep_alive()
            if left_s <= 0:
                return []

    def receive_of(self, sid: bytes, timeout_s: float) -> list[Frame]:
        """Receive messages of one subscription; messages of others are kept for `receive`.

        Raises as `receive`, and `ConnectionLost` if more than 200,000 messages are kept.
        """
        kept_frames, self._kept_frames = self._kept_frames, []
        if matching := [frame for frame in kept_frames if frame[0] == sid]:
            self._kept_frames = [frame for frame in kept_frames if frame[0] != sid]
            return matching
        try:
            frames = self.receive(timeout_s)
            kept_frames += [frame for frame in frames if frame[0] != sid]
            if len(kept_frames) > _KEPT_MAX:
                raise ConnectionLost(f"NATS at {self.peer}", f"more than {_KEPT_MAX} messages came before an answer")
            return [frame for frame in frames if frame[0] == sid]
        finally:
            self._kept_frames = kept_frames + self._kept_frames

    def keep(self, frames: list[Frame]) -> None:
        """Keep frames for the next `receive`, which returns them."""
        self._kept_frames += frames

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
        """Send a message and return the answer; raises `NoResponders` at once, `StoreUnavailable` after `timeout_s`.

        A message that is to be stored names its `stream`, and how many `messages` its batch has: see `ExpectedAnswer`.
        """
        expected = self._expected(stream, subject, messages)
        return self._answers([(subject, payload, headers)], [expected], timeout_s)[0]

    def ask(self, request: Request[T], *, timeout_s: float = 5.0) -> T:
        """Return the answer to a request; raises the error that it means, and as `request`."""
        return self.ask_all([request], timeout_s=timeout_s)[0]

    def ask_all(self, requests: Sequence[Request[T]], *, timeout_s: float = 5.0) -> list[T]:
        """Send requests together and return their answers in order, within one timeout; raises as `ask`."""
        frames = self._answers(
            [(request.subject, request.payload, request.headers) for request in requests],
            [self._expected(request.stream, request.subject) for request in requests],
            timeout_s,
        )
        return [request.parse(frame) for request, frame in zip(requests, frames, strict=True)]

    def records(self, stream: str, subject: str, limit: int | None = None) -> list[RawRecord]:
        """Return all records of a stream whose subject matches, at most `limit`: see `reading_records`."""
        return self.run(reading_records(stream, subject, limit))

    def values(self, bucket: str, keys: str, limit: int | None = None) -> list[RawRecord]:
        """Return the newest value of each matching key of a bucket, in a few requests: see `reading_values`."""
        return self.run(reading_values(bucket, keys, limit))

    def run(self, conversation: Conversation[T], timeout_s: float = 5.0) -> T:
        """Send the requests of a conversation and return its result."""
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
                except StoreError as store_error:
                    error = store_error
        except StopIteration as stop:
            return stop.value

    def _page(self, request: Request[Any], timeout_s: float) -> list[Frame]:
        """Return all messages of a page; the last of them is the status that ends the page. Raises as `ask`."""
        frames = self._part(request, timeout_s)
        if not frames or not is_status(frames[-1]):
            if len(frames) == 1:
                self.check_pages(request)
            raise StoreUnavailable(request.subject, f"no whole answer within {timeout_s:g} s")
        if nobody_listens(frames[-1]):
            raise NoResponders(self.routed(request.subject))
        return frames

    def _part(self, request: Request[Any], timeout_s: float) -> list[Frame]:
        """Return the messages of a page that arrive within the timeout, up to the status that ends the page."""
        (reply,) = self._reply_subjects(1)
        self.send(self._message(self.routed(request.subject), request.payload, request.headers, reply))
        frames: list[Frame] = []
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            frames += [frame for frame in self.receive_of(_REPLIES, left_s) if frame[1] == reply]
            if frames and is_status(frames[-1]):
                break
        return frames

    def check_pages(self, request: Request[Any]) -> None:
        """Raise `SingleResponse` if each of three requests for a page brings its first message and never its end."""
        for _ in range(_TRIES):
            frames = self._part(shortened(request), _END_S)
            if len(frames) != 1 or is_status(frames[0]):
                return
        raise SingleResponse(self.routed(request.subject))

    def api(self, subject: str, body: object = None, *, timeout_s: float = 5.0) -> dict[str, Any]:
        """Send a JetStream request and return its JSON answer; raises `ApiRefused` for an error in the answer.

        `subject` comes without `$JS.API.`.
        """
        return self.ask(call(subject, body), timeout_s=timeout_s)

    def probe(self, kinds: Sequence[tuple[str, str]], wait_s: float) -> tuple[list[ExpectedAnswer], tuple[str, ...]]:
        """Ask who answers a publish to each (stream, subject); return the answers, and in words who else answered.

        The messages are stored by no stream. A subject that these credentials may not use has no answer.
        """
        expected_answers: dict[bytes, ExpectedAnswer] = {}
        sid = self.subscribe(f"{self.inbox}.who.*")
        for number, (stream, subject) in enumerate(kinds):
            expected_answer = self._expected(stream, subject)
            assert expected_answer is not None
            reply = f"{self.inbox}.who.{number}"
            expected_answers[reply.encode()] = expected_answer
            self.publish(subject, headers=PROBE, reply=reply)
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(Forbidden):
                for frame in self.receive_of(sid, left_s):
                    if frame[1] in expected_answers:
                        expected_answers[frame[1]].accepts(frame)
        self.send(b"UNSUB %b\r\n" % sid)
        return list(expected_answers.values()), self._answerers.others

    def _expected(self, stream: str, subject: str, messages: int = 1) -> ExpectedAnswer | None:
        if not stream:
            return None
        if self._domain is None:
            self._domain = self._fetch_domain()
        return ExpectedAnswer(stream, subject, messages, self._domain, self._answerers)

    def _fetch_domain(self) -> str | None:
        """Return the JetStream domain that the API names, else that of the server's INFO; None if it is not known."""
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
        """Send messages, each as (subject, payload, headers), and return their answers in order."""
        messages = [(self.routed(subject), payload, headers) for subject, payload, headers in messages]
        replies = self._reply_subjects(len(messages))
        waiting = {reply: message[0] for reply, message in zip(replies, messages, strict=True)}
        expected_answers = {
            reply: expected_answer
            for reply, expected_answer in zip(replies, expected, strict=True)
            if expected_answer is not None
        }
        self.send(b"".join([self._message(*message, reply) for reply, message in zip(replies, messages, strict=True)]))
        answers: dict[bytes, Frame] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for frame in self.receive_of(_REPLIES, left_s):
                if frame[1] in expected_answers and not expected_answers[frame[1]].accepts(frame):
                    continue
                if frame[1] in waiting:  # otherwise it is a late answer to an earlier request
                    subject = waiting.pop(frame[1])
                    if nobody_listens(frame):
                        raise NoResponders(subject)
                    answers[frame[1]] = frame
        if waiting:
            raise StoreUnavailable(next(iter(waiting.values())), f"none within {timeout_s:g} s")
        return [answers[reply] for reply in replies]

    def _reply_subjects(self, count: int) -> list[bytes]:
        """Return new reply subjects; the first call subscribes to all of them."""
        if not self._requests:
            self.send(subscribe_frame(f"{self.inbox}.r.*", _REPLIES))
        first, self._requests = self._requests + 1, self._requests + count
        return [f"{self.inbox}.r.{number}".encode() for number in range(first, first + count)]

    # Closing.

    def close(self) -> None:
        """Close the connection; a thread that waits for messages raises `ConnectionClosed` at once.

        It may be called from any thread, any number of times.
        """
        self._closed = True
        with suppress(OSError):
            # Not the shutdown of `ssl`, which would take the TLS state away from a reading thread.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        with self._busy, suppress(OSError):
            self._sock.close()

    @property
    def usable(self) -> bool:
        """Whether the connection was neither closed nor lost."""
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
        """Return the bytes that have arrived, waiting up to `timeout_s` for them; empty after the timeout."""
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
        """Answer pings; raises the error of the first `-ERR`, and then keeps `frames` for the next `receive`."""
        fault: Exception | None = None
        for verb, argument in controls:
            if verb == b"PING":
                self.send(b"PONG\r\n")
            elif verb == b"-ERR" and fault is None:
                fault = server_fault(argument.decode("utf-8", "replace"), self.peer)
        if fault is not None:
            self._kept_frames = frames
            self._broken = self._broken or type(fault) is not Forbidden
            raise fault

    def _lost(self, error: OSError | None) -> StoreUnavailable:
        if self._closed:
            return ConnectionClosed()
        self._broken = True
        reason = "it closed the connection" if error is None else f"the connection broke ({error})"
        return ConnectionLost(f"NATS at {self.peer}", reason)


def ask_once(endpoint: Endpoint, request: Request[T], *, timeout_s: float = 5.0) -> T:
    """Open a connection for one request and return its answer; raises as `NatsConnection.open` and `ask`."""
    with NatsConnection.open(endpoint, timeout_s=timeout_s) as connection:
        return connection.ask(request, timeout_s=timeout_s)
