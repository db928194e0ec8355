"""`NatsConnection`: one blocking connection to NATS, for one thread at a time.

It is the client of an application (`Client`) in an event loop of its own, which runs in the calling thread and only
while a call waits: what arrives in between stays in the socket. Every wait is bounded: by its own timeout, and by pings
that tell a server which stopped answering from a server that has nothing to send. The connection does not reconnect,
since only its owner knows where to continue.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeVar

from eventjet.errors import ApiRefused, ConnectionClosed, ConnectionLost, Forbidden, StoreUnavailable, UsageError
from eventjet.jetstream.answers import PROBE, ExpectedAnswer
from eventjet.jetstream.api import Conversation, Request, call
from eventjet.jetstream.client import Client, check_jetstream
from eventjet.nats.endpoint import Address, Endpoint
from eventjet.nats.protocol import Frame
from eventjet.nats.tap import Tap, send

T = TypeVar("T")


_CHUNK = 131_072
"""Bytes of one read: what comes of twice as many does not stay in the processor's cache, which costs a tenth."""


class _OneConnection(Client):
    """A client that ends with its connection."""

    reconnects = False


class NatsConnection:
    """A blocking connection to NATS, for one thread at a time; see `open`. `close` may be called from any thread."""

    def __init__(
        self, endpoint: Endpoint, timeout_s: float, ping_interval_s: float, addresses: Sequence[Address] | None
    ) -> None:
        if endpoint.is_websocket:
            raise UsageError(
                f"{endpoint.servers[0]} is a WebSocket, which carries the commands and histories of an application, "
                "and nothing else. Workers, rebuilds and the tools need a server's nats:// or tls:// URL."
            )
        self._loop = asyncio.SelectorEventLoop()
        self._busy = threading.Lock()
        self._closed = self._is_receiving = False
        self._frames: list[Frame] = []
        self._denials: list[Forbidden] = []
        self._is_domain_known = False
        self._client = client = _OneConnection(endpoint, timeout_s)
        client.ping_interval_s = ping_interval_s
        client.on_denied.append(self._on_denied)
        client.on_lost.append(self._wake)
        try:
            self._run(client.connect(addresses, timeout_s))
        except BaseException:
            self.close()
            raise
        assert client.nats is not None
        self._nats, self._tap = client.nats, Tap.of(client.nats)
        self._tap.read_at_most(_CHUNK)
        self.peer = client.peer
        self.inbox = client.inbox
        """Prefix of the reply subjects of this connection."""
        self.routed = endpoint.routed

    @classmethod
    def open(
        cls,
        endpoint: Endpoint,
        *,
        timeout_s: float = 5.0,
        ping_interval_s: float = 5.0,
        addresses: Sequence[Address] | None = None,
    ) -> Self:
        """Connect to the first server that lets this client in, of the endpoint's or of these addresses.

        Raises `Unauthorized` when a server refused the credentials and no other accepted them, `Unreachable` when no
        server answers, and `UsageError` for credentials that cannot be read, and for a WebSocket. A server that is
        silent for two `ping_interval_s` counts as lost.
        """
        return cls(endpoint, timeout_s, ping_interval_s, addresses)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def info(self) -> dict[str, Any]:
        """The server's newest INFO."""
        return self._client.info

    @property
    def max_payload(self) -> int:
        """How many bytes a message may have, headers included."""
        return self._nats.max_payload

    @property
    def usable(self) -> bool:
        """Whether the connection was neither closed nor lost."""
        return not self._closed and self._client.unfit is None

    # Messages.

    def publish(self, subject: str, payload: bytes = b"", *, headers: bytes = b"", reply: str = "") -> None:
        """Send one message without waiting; raises `Refused` for a message that is too large for the server."""
        self._check_usable()
        with self._busy:
            send(self._nats, self.routed(subject), payload, headers, reply.encode())
            self._tap.flush()

    def send(self, frames: bytes) -> None:
        """Send frames that are encoded already, without waiting."""
        self._check_usable()
        with self._busy:
            self._tap.write(frames)

    def subscribe(self, subject: str) -> bytes:
        """Subscribe to a subject, and return the subscription id that the frames of its messages carry."""
        return b"%d" % self._run(self._subscribe(subject))

    async def _subscribe(self, subject: str) -> int:
        subscription: Any = await self._tap.subscribe(subject, self._take)
        self._tap.flush()
        return subscription._id

    def _take(self, frames: list[Frame]) -> None:
        self._frames = self._frames + frames if self._frames else frames
        self._wake()

    def _on_denied(self, fault: Forbidden) -> None:
        self._denials.append(fault)
        self._wake()

    def _wake(self) -> None:
        if self._is_receiving:
            self._loop.stop()

    def receive(self, timeout_s: float) -> list[Frame]:
        """Return the messages of the subscriptions that have arrived, or wait for the first; empty after the timeout.

        A `timeout_s` of 0 does not wait. Raises `ConnectionLost`, `ConnectionClosed`, and `Forbidden` for a denied
        permission, which leaves the connection usable.
        """
        deadline = self._loop.time() + timeout_s
        while not (self._frames or self._denials):
            self._check_usable()
            left_s = deadline - self._loop.time()
            with self._busy:
                self._drive(self._run_once, left_s)
            if left_s <= 0:
                break
        if self._denials:
            raise self._denials.pop(0)
        frames, self._frames = self._frames, []
        return frames

    def _run_once(self, timeout_s: float) -> None:
        """Run the loop until `_wake`, for `timeout_s` at most: a tenth of the cost of a task for each time."""
        timer = self._loop.call_later(max(0.0, timeout_s), self._loop.stop)
        self._is_receiving = True
        try:
            self._loop.run_forever()
        finally:
            self._is_receiving = False
            timer.cancel()

    def keep(self, frames: list[Frame]) -> None:
        """Keep frames for the next `receive`, which returns them first."""
        self._frames = frames + self._frames

    # Requests.

    def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: bytes = b"",
        timeout_s: float = 5.0,
        stream: str = "",
        batch_size: int = 1,
    ) -> Frame:
        """Send a message and return the answer: see `Client.request`."""
        if stream:
            self._learn_domain()
        request = self._client.request(subject, payload, headers, timeout_s, stream=stream, batch_size=batch_size)
        return self._run(request)

    def ask(self, request: Request[T], *, timeout_s: float = 5.0) -> T:
        """Return the answer to a request; raises the error that it means, and as `request`."""
        if request.stream:
            self._learn_domain()
        return self._run(self._client.ask(request, timeout_s))

    def ask_all(self, requests: Sequence[Request[T]], *, timeout_s: float = 5.0) -> list[T]:
        """Send requests together and return their answers in order, within one timeout; raises as `ask`."""
        if any(request.stream for request in requests):
            self._learn_domain()

        async def ask_all() -> list[T | BaseException]:
            coroutines = (self._client.ask(request, timeout_s) for request in requests)
            return await asyncio.gather(*coroutines, return_exceptions=True)

        answers: list[T] = []
        for answer in self._run(ask_all()):
            if isinstance(answer, BaseException):
                raise self._error_of(answer)
            answers.append(answer)
        return answers

    def api(self, subject: str, body: object = None, *, timeout_s: float = 5.0) -> dict[str, Any]:
        """Send a JetStream request and return its JSON answer: see `Client.api`."""
        return self.ask(call(subject, body), timeout_s=timeout_s)

    def run(self, conversation: Conversation[T], timeout_s: float = 5.0, *, writes: bool = False) -> T:
        """Send the requests of a conversation and return its result; `writes` says that some are to be stored."""
        if writes:
            self._learn_domain()
        return self._run(self._client.run(conversation, timeout_s))

    def check_pages(self, request: Request[Any]) -> None:
        """Raise `SingleResponse` if only the first message of a page arrives: see `Client.check_pages`."""
        self._run(self._client.check_pages(request))

    def probe(self, kinds: Sequence[tuple[str, str]], wait_s: float) -> tuple[list[ExpectedAnswer], tuple[str, ...]]:
        """Ask who answers a publish to each (stream, subject); return the answers, and in words who else answered."""
        self._learn_domain()
        answers = [self._client.expected_answer(stream, subject) for stream, subject in kinds]

        async def probe() -> None:
            for answer in answers:
                self._client.try_request((answer.subject, b"", PROBE), answer.accepts)
            await asyncio.sleep(wait_s)

        self._run(probe())
        self._denials.clear()
        return answers, self._client.answerers.others

    def _learn_domain(self) -> None:
        """Ask once for the JetStream domain; without an answer, the client goes by the server's INFO."""
        if not self._is_domain_known:
            with suppress(Forbidden, ApiRefused, StoreUnavailable):
                self._run(self._client.learn_domain())
            self._is_domain_known = True

    def await_leader(self, election_s: float = 30.0) -> None:
        """Wait until a cluster that starts has chosen the leader of its JetStream.

        Raises `Unreachable` if JetStream does not become available, and for a server that is too old.
        """
        where = f"The NATS server at {', '.join(self._client.endpoint.servers)}"
        self._client.check_server(where, self.info)
        self._run(check_jetstream(where, self._client, election_s))
        self._is_domain_known = True

    # The loop.

    def close(self) -> None:
        """Close the connection, from any thread; one that waits for messages raises `ConnectionClosed` at once."""
        self._closed = True
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._end_waits)
        with self._busy:
            if not self._loop.is_closed():
                try:
                    self._drive(self._loop.run_until_complete, self._end())
                finally:
                    self._loop.close()

    def _end_waits(self) -> None:
        self._client.end_requests(ConnectionClosed())
        self._wake()

    async def _end(self) -> None:
        try:
            await self._client.close()
        finally:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._busy:
            if self._closed:
                work.close()
                raise ConnectionClosed
            try:
                return self._drive(self._loop.run_until_complete, work)
            except ConnectionLost as error:
                raise self._error_of(error) from None

    def _error_of(self, error: BaseException) -> BaseException:
        """Return why no answer can arrive, if a lost answer was due to that."""
        unfit = self._client.unfit
        return unfit if isinstance(error, ConnectionLost) and isinstance(unfit, Forbidden) else error

    def _drive(self, run: Callable[[Any], T], argument: Any) -> T:
        """Run the loop in this thread, or in another if a loop runs in this one."""
        if asyncio._get_running_loop() is None:  # pyright: ignore[reportPrivateUsage]
            return run(argument)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run, argument).result()

    def _check_usable(self) -> None:
        if self._closed:
            raise ConnectionClosed
        if self._client.unfit is not None:
            raise self._client.unfit


def ask_once(endpoint: Endpoint, request: Request[T], *, timeout_s: float = 5.0) -> T:
    """Open a connection for one request and return its answer; raises as `NatsConnection.open` and `ask`."""
    with NatsConnection.open(endpoint, timeout_s=timeout_s) as connection:
        return connection.ask(request, timeout_s=timeout_s)
