"""`LoopClient`: requests, messages and subscriptions of an application's event loop, over one nats-py client.

nats-py dials, authenticates, pings, reconnects and subscribes anew. This module adds one inbox with a table of the
requests that wait for answers, answers of many messages, a bound on every wait, permission violations raised in the
request whose subject they name, room in the buffer before a publish, and the end of every request that waits when its
connection is lost. See ADR 0056.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias, cast
from urllib.parse import urlparse

from nats.aio.client import Client as NatsClient
from nats.aio.client import Srv
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from eventjet.codec.reasons import reason_of
from eventjet.errors import (
    ConnectionClosed,
    ConnectionLost,
    Forbidden,
    StoreError,
    StoreUnavailable,
    Unauthorized,
    Unreachable,
    UsageError,
)
from eventjet.nats.endpoint import Address, Endpoint
from eventjet.nats.exchange import LOOK_S, STILL_S, Exchange, Exchanges
from eventjet.nats.login import fault_of, login, refusal_of, tls_context, unreachable_remedy
from eventjet.nats.protocol import Frame, server_fault
from eventjet.nats.tap import PAUSE_S, REQUESTS_MAX, Tap, Watcher, send
from eventjet.observability import logs
from eventjet.runtime import LoopGuard
from eventjet.settings import Settings
from eventjet.urls import WEBSOCKET

Message: TypeAlias = tuple[str, bytes, bytes]
"""(subject, payload, header block or empty)."""

_log = logging.getLogger(__name__)

_CONNECT_S = 3.0
"""How long connecting to one server of the cluster may take."""
_CLOSE_S = 2.0
"""How long `close` waits for messages that are still to be sent."""
_PONG_S = 4.0
"""How long a server may take to answer the ping that follows a late request, before another connection is made."""
_ROOM_BYTES = 1 << 20
"""How many bytes may wait for the socket before senders wait, too: half of what nats-py lets wait by default."""
_CHUNK_BYTES = 1 << 16
"""How many bytes of a batch are sent at a time."""
_ROOM_PAUSE_S = 0.001
_INBOX = re.compile(rb"[^\x00-\x20\x7f-\xff.*>]+(\.[^\x00-\x20\x7f-\xff.*>]+)+")
"""A subject of several tokens in ASCII, without wildcards: a reply subject that a client makes for its answers."""
_INBOX_MAX = 1_000
"""Bytes of such a subject at most."""


def given_endpoint(nats: NatsClient, settings: Settings) -> Endpoint:
    """Return the endpoint of an open nats-py client, otherwise by the settings; raises `UsageError`."""
    client: Any = nats
    if client._reading_task is not None and client._reading_task.get_loop() is not asyncio.get_running_loop():
        raise UsageError("The NATS client that was given is of another loop. Connect one in this loop.")
    if nats.is_closed or nats.is_draining or not nats.is_connected:
        state = "closed" if nats.is_closed else "draining" if nats.is_draining else "not connected"
        raise UsageError(f"The NATS client that was given is {state}. Give one that is connected.")
    scheme = client._current_server.uri.scheme
    urls = [url for url in nats.servers if (url.scheme in WEBSOCKET) == (scheme in WEBSOCKET)]
    return replace(
        Endpoint.of(settings),
        servers=tuple(f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}" for url in urls),
        inbox_prefix=bytes(client._inbox_prefix).decode(),
        name=str(nats.options["name"] or "eventjet"),
    )


@dataclass(slots=True, eq=False)
class Listening:
    """A subscription that continues over every later connection."""

    subject: str
    take: Callable[[list[Frame]], object]
    queue: str = ""
    subscription: Subscription | None = None


class LoopClient:
    """A NATS client for any number of tasks of one event loop.

    Every wait is bounded: it ends with an answer, a permission violation, a lost connection or a timeout. Between two
    connections, requests wait for the next connection, each as long as it may take.
    """

    reconnects = True
    """Whether a lost connection is replaced by another; otherwise `unfit` says from then on how it was lost."""
    ping_interval_s = 5.0
    """How often the server is pinged; it counts as lost when two pings of a client that reconnects have no answer."""

    def __init__(self, endpoint: Endpoint, timeout_s: float, nats: NatsClient | None = None) -> None:
        """`nats` is an open client that somebody else closes; without it, `connect` opens a client."""
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        """How long a request may take unless it sets a time of its own."""
        self.on_lost: list[Callable[[], object]] = []
        """Called when the connection is lost: what is remembered of the log may no longer be true."""
        self.on_denied: list[Callable[[Forbidden], object]] = []
        """Called with permission violations of no waiting request: a denied answer or subscription, for example."""
        self._exchanges = Exchanges(f"{endpoint.inbox_prefix}.{secrets.token_hex(11)}", self._doubt)
        self.nats = nats
        """The client of nats-py that carries the messages; None before the first connection."""
        self.is_own = nats is None
        """Whether `close` closes the nats-py client, too; a given client is closed by its owner."""
        self.room = asyncio.Semaphore(REQUESTS_MAX) if nats is None else Tap.of(nats).room
        """Limits how many pages are requested at once; shared by everything that uses the connection."""
        self._tap: Tap | None = None
        self._watcher = Watcher(
            self._exchanges.inbox.encode(),
            self._exchanges.waits,
            self._failed,
            self._on_server_error,
            self._lost,
            self._informed,
            self._reconnected,
            self._ended,
        )
        self._usable = asyncio.Event()
        self.unfit: Exception | None = None
        """Why this connection cannot be used: no answer would come, or the server is too old; None if it can."""
        self._answers: Subscription | None = None
        self._listening: list[Listening] = []
        self._open_task: asyncio.Task[None] | None = None
        self._ping_task: asyncio.Task[None] | None = None
        self._fault: Exception | None = None
        self._closed = False
        self.guard = LoopGuard()

    def another(self, name: str) -> Self:
        """Return another client of the same servers, which connects at its first use and which the caller closes."""
        client = type(self)(self.endpoint.with_name(name), self.timeout_s)
        client.guard = self.guard
        return client

    @property
    def info(self) -> dict[str, Any]:
        """The server's newest INFO, with the limits of the account and the user; empty before the first connection."""
        return {} if self._tap is None else self._tap.info

    async def connect(
        self, addresses: Sequence[Address] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Connect at once, or use the client that was given; return the server's INFO from before the login.

        The addresses are those of the endpoint unless others are given; they share the timeout. Raises `Unauthorized`
        when a server refused the credentials and no other let this client in, since servers may know new credentials
        one after the other; else `Unreachable`, and `UsageError`.
        """
        self.guard.check()
        nats = self.nats
        if nats is None or self.is_own:
            if addresses is None:
                addresses = self.endpoint.addresses(shuffle=self.reconnects)
            nats = await self._connected(addresses, timeout_s or _CONNECT_S * (len(addresses) + 1))
        tap = self._tap = Tap.of(nats)
        self.nats, self.unfit = nats, None
        tap.watchers.append(self._watcher)
        try:
            self._answers = await tap.subscribe(f"{self._exchanges.inbox}.*", self._exchanges.deliver)
            for listening in self._listening:
                listening.subscription = await tap.subscribe(listening.subject, listening.take, listening.queue)
        except NatsError as error:
            raise Unreachable("NATS", f"it ended the connection at once ({reason_of(error)})", "Try again.") from None
        if nats.is_closed:  # a closed nats-py client does not reconnect
            raise Unreachable("NATS", "it ended the connection at once", "Try again.")
        self._informed()
        self._usable.set()
        return tap.greeting

    async def _connected(self, addresses: Sequence[Address], timeout_s: float) -> NatsClient:
        """Return a nats-py client that is connected to the first server, in order, that lets it in.

        nats-py itself gives up at the first server that refuses the login, and does not say which server said what.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        faults: dict[str, Exception] = {}
        refusal: Unauthorized | None = None
        for index, address in enumerate(addresses):
            share_s = (deadline - loop.time()) / (len(addresses) - index)
            if share_s <= 0:
                break
            try:
                return await self._connected_to(address, share_s)
            except (OSError, NatsError, TimeoutError) as error:
                fault = self._fault or error
                if isinstance(fault, UsageError):
                    raise fault from None
                refusal = refusal_of(fault, self.endpoint, address.peer) or refusal
                faults[address.peer] = fault
        if refusal is not None:
            raise refusal
        where = f"The WebSocket at {', '.join(self.endpoint.servers)}" if self.endpoint.is_websocket else "NATS"
        reason = "; ".join(f"{peer} {fault_of(fault)}" for peer, fault in faults.items())
        remedy = unreachable_remedy(self.endpoint, faults.values())
        raise Unreachable(where, reason or f"no time left after {timeout_s:g} s", remedy)

    async def _connected_to(self, address: Address, timeout_s: float) -> NatsClient:
        nats = NatsClient()
        needs_tls = address.tls and address.scheme not in WEBSOCKET
        tap = Tap(nats, needs_tls=needs_tls, on_try=lambda server: self._renew(nats, server))
        self._fault = None
        try:
            async with asyncio.timeout(timeout_s):
                options: dict[str, Any] = {**self._options(), "connect_timeout": timeout_s, "error_cb": tap.failed}
                await nats.connect(servers=[address.url], **options)
        except BaseException as error:
            self._fault = tap.last_error or (error if isinstance(error, Exception) else None)
            await _close(nats, tap)
            raise
        # Set only now: the first connection is tried once and not waited for.
        nats.options |= {"allow_reconnect": self.reconnects, "max_reconnect_attempts": -1}
        nats.options["connect_timeout"] = _CONNECT_S
        return nats

    def _renew(self, nats: NatsClient, server: Srv) -> None:
        """Read certificates and keys for the next connection: their files may have changed since the last."""
        for address in self.endpoint.addresses():
            if urlparse(address.url).netloc == server.uri.netloc:
                server.tls_name = address.name
        if any(address.tls for address in self.endpoint.addresses()):
            nats.options["tls"] = tls_context(self.endpoint)
        # Unusable files are an error even where no server asks for them.
        if nkey := login(self.endpoint, "").get("nkey"):
            cast("Any", nats)._public_nkey = nkey

    def _options(self) -> dict[str, Any]:
        endpoint = self.endpoint

        def jwt() -> bytes:
            return login(endpoint, "")["jwt"].encode()

        def sign(nonce: str) -> bytes:
            return login(endpoint, nonce)["sig"].encode()

        return {
            "name": endpoint.name,
            "inbox_prefix": endpoint.inbox_prefix,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": PAUSE_S,
            "ping_interval": self.ping_interval_s,
            "max_outstanding_pings": 2 if self.reconnects else 1,
            "user": endpoint.user,
            "password": endpoint.password if endpoint.user is None else endpoint.password or "",
            "token": endpoint.token,
            "user_jwt_cb": endpoint.user_jwt_cb if endpoint.credentials is None else jwt,
            "signature_cb": endpoint.signature_cb if endpoint.credentials is None and endpoint.nkey is None else sign,
            "tls_handshake_first": endpoint.tls_first,
        }

    def check_open(self) -> None:
        """Raise `ConnectionClosed` after `close`, and `UsageError` in a loop that did not open this client."""
        self.guard.check()
        if self._closed:
            raise ConnectionClosed

    async def close(self) -> None:
        """End all requests and subscriptions, and the connection unless it was given; may be called again."""
        self.guard.check()
        self._closed = True
        tasks = {task for task in (self._open_task, self._ping_task) if task is not None}
        for task in tasks:
            task.cancel()
        self._exchanges.end_all(ConnectionClosed())
        self._usable.set()
        if tasks:
            await asyncio.wait(tasks)  # `connect` closes its socket, and Python 3.11 may lose the cancellation
        nats, tap = self.nats, self._tap
        if nats is None or tap is None:
            return
        if self._watcher in tap.watchers:
            tap.watchers.remove(self._watcher)
        if self.is_own:
            await _close(nats, tap)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                for subscription in (self._answers, *(listening.subscription for listening in self._listening)):
                    if subscription is not None:
                        await tap.unsubscribe(subscription)

    # Requests.

    async def begin(
        self, messages: Sequence[Message], wait_s: float, accepts: Callable[[Frame], bool] | None = None
    ) -> Exchange:
        """Publish messages over one connection; return the exchange that waits for the answer to the last message.

        The caller gives the exchange to `forget` in the end. `wait_s` is how long the connection, and then each part of
        the answer, may take. Where others may answer, too, `accepts` tells which answers count. Raises
        `StoreUnavailable`, `Forbidden` and `Refused`.
        """
        self.check_open()
        subjects = [message[0] for message in messages]
        what = subjects[-1]
        if self.endpoint.is_elsewhere:
            messages = [(self.endpoint.routed(subject), body, block) for subject, body, block in messages]
            # In a violation, a server of this domain names the subject that it maps the routed subject to.
            subjects = [*(subject for subject, _, _ in messages), *subjects]
        nats = self._client_with_room() or await self.wait_for_room(what, wait_s)
        exchange, tap = self._exchanges.begin(subjects, wait_s, accepts), Tap.of(nats)
        try:
            for subject, payload, block in messages[:-1]:
                send(nats, subject, payload, block)
                if nats.pending_data_size > _CHUNK_BYTES:
                    tap.flush()  # so that the server works on the first messages while the next ones are framed
                    if nats.pending_data_size > _ROOM_BYTES:
                        await self.wait_for_room(what, exchange.until - asyncio.get_running_loop().time())
                    if exchange.fault is not None:
                        raise exchange.fault
            send(nats, *messages[-1], exchange.reply)
            if len(self._exchanges.waiting) == 1:
                tap.flush()  # nobody else is likely to send in this turn of the loop
        except BaseException:
            self.forget(exchange)
            raise
        return exchange

    @property
    def inbox(self) -> str:
        """Prefix of the reply subjects of this client's requests, which have one more token."""
        return self._exchanges.inbox

    def end_requests(self, fault: Exception) -> None:
        """End all requests that wait for an answer with this error."""
        self._exchanges.end_all(fault)

    def forget(self, exchange: Exchange) -> None:
        """Stop waiting for the answer of an exchange."""
        self._exchanges.forget(exchange)

    def try_request(self, message: Message, accepts: Callable[[Frame], bool]) -> None:
        """Publish if the connection takes the message at once; each answer goes to `accepts`, whenever it comes."""
        nats, subject = self.nats, self.endpoint.routed(message[0])
        if nats is not None and nats.is_connected and nats.pending_data_size <= _ROOM_BYTES:
            exchange = self._exchanges.begin((subject,), self.timeout_s, accepts)
            send(nats, subject, *message[1:], exchange.reply)
            self.forget(exchange)

    # Subscriptions and messages.

    async def serve(self, subject: str, handler: Callable[[Frame], object], queue: str = "") -> Listening:
        """Call `handler` with each message on a subject, from now on and over every later connection.

        With `queue`, the subscription is a member of that queue group. Messages are lost while there is no connection,
        and a subscription that the server denies stays silent. Raises `ConnectionClosed` after `close`.
        """
        self.check_open()
        loop = asyncio.get_running_loop()

        def take(frames: list[Frame]) -> None:
            # Each in a turn of the loop of its own, so that an error of `handler` does not reach waiting requests.
            for frame in frames:
                loop.call_soon(handler, frame)

        listening = Listening(subject, take, queue)
        self._listening.append(listening)
        if self._tap is not None and self.nats is not None and not self.nats.is_closed:
            listening.subscription = await self._tap.subscribe(subject, take, queue)
        return listening

    async def unsubscribe(self, listenings: Collection[Listening]) -> None:
        """End subscriptions, and return once their last messages were taken, or the connection is lost."""
        tap, nats, subscriptions = (
            self._tap,
            self.nats,
            [listening.subscription for listening in listenings if listening.subscription],
        )
        for listening in listenings:
            self._listening.remove(listening)
        if tap is None or nats is None or not subscriptions:
            return
        leaving = asyncio.gather(*map(tap.unsubscribe, subscriptions))
        try:
            while not leaving.done() and nats.is_connected:
                await asyncio.wait({leaving}, timeout=LOOK_S)
        finally:
            leaving.cancel()
        with suppress(asyncio.CancelledError):
            leaving.result()

    def publish(self, subject: str, payload: bytes, headers: bytes = b"") -> None:
        """Send one message and wait for nothing; the message is lost where there is no connection."""
        if self.nats is not None:
            with suppress(StoreUnavailable):
                send(self.nats, subject, payload, headers)

    def may_answer(self, reply: bytes, subject: bytes = b"") -> bool:
        """Return whether the reply subject of a request may be answered.

        Callers choose their reply subjects freely. Inboxes of callers are answered; this client's own inbox is not,
        since the client takes its messages for the server's. A caller over the same connection gets an answer only
        while it waits for an answer to its request on `subject`. A request from another account has a reply subject
        below `_R_.`, which the server makes and accepts from no client.
        """
        if len(reply) > _INBOX_MAX or not _INBOX.fullmatch(reply):
            return False
        tap = self._tap
        is_heard = not self.is_own and tap is not None and tap.hears(reply.decode())
        if is_heard or reply.startswith(self._watcher.inbox):
            return tap is not None and any(watcher.waits(reply, subject) for watcher in tap.watchers)
        return reply.startswith((b"_R_.", *(f"{prefix}.".encode() for prefix in self.endpoint.caller_inboxes)))

    # The connection.

    def _client_with_room(self) -> NatsClient | None:
        """Return the nats-py client if it takes a message now, else None."""
        nats = self.nats
        if nats is None or self.unfit is not None or not nats.is_connected or (not self.is_own and nats.is_draining):
            return None
        return nats if nats.pending_data_size <= _ROOM_BYTES else None

    async def wait_for_room(self, what: str, wait_s: float) -> NatsClient:
        """Return the nats-py client once it takes a message; raises `StoreUnavailable` after `wait_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while not self._closed:
            if isinstance(self.unfit, Unreachable):
                raise StoreUnavailable(what, str(self.unfit))
            if self.unfit is not None:
                raise self.unfit
            nats = self.nats
            if nats is not None and not self.is_own and (nats.is_draining or nats.is_closed):
                state = "closed" if nats.is_closed else "draining"
                raise StoreUnavailable(what, f"the NATS client that was given is {state}")
            if client := self._client_with_room():
                return client
            is_connected = nats is not None and nats.is_connected
            left_s = deadline - loop.time()
            if left_s <= 0:
                reason = "the connection takes nothing" if is_connected else "there is no connection"
                raise StoreUnavailable(what, f"{reason}{f' ({self._fault})' if self._fault else ''}")
            due = loop.time() + (_ROOM_PAUSE_S if is_connected else min(left_s, LOOK_S))
            if not is_connected:
                if self.reconnects and (nats is None or nats.is_closed):
                    self._open()
                self._usable.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await (asyncio.sleep(_ROOM_PAUSE_S) if is_connected else self._usable.wait())
            if (still_s := loop.time() - due) > STILL_S:
                deadline += still_s
        raise ConnectionClosed

    def _open(self) -> None:
        if self._open_task is None or self._open_task.done():
            self._open_task = asyncio.create_task(self._keep_opening())

    async def _keep_opening(self) -> None:
        """Try to connect until it succeeds: nats-py itself gives up where the server has ended the login."""
        while not self._closed:
            try:
                await self.connect()
                self._check_again()
                self._fault = None
                return
            except Exception as error:  # noqa: BLE001 - nobody else would open one again, whatever it is
                if not isinstance(error, (StoreError, Unreachable, UsageError)) and repr(error) != repr(self._fault):
                    logs.NO_CONNECTION.log(_log, reason=reason_of(error), trace="")
                self._fault = error
                await asyncio.sleep(PAUSE_S)

    def check_server(self, where: str, greeting: Mapping[str, Any]) -> None:
        """Raise `Unreachable` for a server that cannot be used, by its INFO; subclasses override this."""

    def _check_again(self) -> None:
        """Check the server of a new connection, which may be another server, and keep in `unfit` why it is unusable."""
        try:
            self.check_server(f"The NATS server at {self.peer}", {} if self._tap is None else self._tap.greeting)
        except Unreachable as error:
            self.unfit = error

    def _failed(self, error: Exception) -> None:
        self._fault = error

    def _on_server_error(self, text: str) -> None:
        """End the requests whose subject a permission violation names; the server's other errors end the connection."""
        fault = server_fault(text, self.peer)
        self._fault = fault
        if type(fault) is not Forbidden:
            return
        if fault.subject.startswith(self._exchanges.inbox):
            # No answer will arrive, whether or not the message was stored.
            self.unfit = fault
            self._exchanges.end_all(ConnectionLost(f"NATS at {self.peer}", fault.reason))
        elif not self._exchanges.denied(fault):
            for callback in self.on_denied:
                callback(fault)

    def _lost(self, reason: str) -> None:
        self._usable.clear()
        self.unfit = None
        if self._closed:
            return
        self._exchanges.end_all(ConnectionLost(f"NATS at {self.peer}", reason))
        for callback in self.on_lost:
            callback()

    def _informed(self) -> None:
        """Add the other servers of the cluster, each with the name that its certificate must have."""
        nats = self.nats
        if nats is None or not self.is_own:
            return
        if not self.endpoint.is_websocket:
            self.endpoint = self.endpoint.with_discovered(self.info.get("connect_urls") or ())
        pool: list[Srv] = cast("Any", nats)._server_pool
        hosts = {server.uri.netloc for server in pool}
        for address in self.endpoint.addresses():
            uri = urlparse(address.url)
            if uri.netloc not in hosts:
                pool.append(Srv(uri, discovered=True, tls_name=address.name))

    def _reconnected(self) -> None:
        self._fault = None  # `unfit` stays: the inbox is subscribed to by now, and may have been denied
        self._check_again()
        self._usable.set()

    def _ended(self, reason: str) -> None:
        """End all requests after nats-py's client was closed: by its owner, or because the server ended the login."""
        fault = self._fault
        if not isinstance(fault, ConnectionLost | Unauthorized):  # what the server said tells more
            fault = ConnectionLost(f"NATS at {self.peer}", reason or (reason_of(fault) if fault else "it was closed"))
        self._lost(fault.reason)
        if self.is_own and not self._closed:
            if self.reconnects:
                self._open()
            else:
                self.unfit = fault
                self._usable.set()  # so that those who wait for a connection see it

    def _doubt(self) -> None:
        """Ping the server after a request had no answer in time, and leave it for another if it is silent."""
        if self.is_own and self.reconnects and (self._ping_task is None or self._ping_task.done()):
            self._ping_task = asyncio.create_task(self._ping())

    async def _ping(self) -> None:
        nats = self.nats
        if nats is None or self._tap is None or not nats.is_connected:
            return
        try:
            await nats.rtt(int(_PONG_S))
        except (NatsError, TimeoutError):
            if nats.is_connected:
                self._tap.end(f"it has been silent for {_PONG_S:g} s")

    @property
    def peer(self) -> str:
        """`host:port` of the server, or of the last server while there is none."""
        server = None if self.nats is None else cast("Any", self.nats)._current_server
        return "its server" if server is None else server.uri.netloc.rpartition("@")[2]


async def _close(nats: NatsClient, tap: Tap) -> None:
    """Close a client of our own in bounded time: nats-py waits for ever if the server reads nothing or TLS failed."""

    async def close() -> None:
        with suppress(AssertionError, OSError):  # it was never connected, or is broken
            await nats.close()

    closing = asyncio.ensure_future(close())
    try:
        await asyncio.wait({closing}, timeout=_CLOSE_S)
    finally:  # also if this is cancelled
        tap.abort()
    await asyncio.wait({closing}, timeout=_CLOSE_S)
