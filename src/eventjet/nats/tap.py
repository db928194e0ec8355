"""`Tap`: what eventjet needs of `nats.aio.client.Client` and its public side does not give.

* Messages with their header block as it came: nats-py makes one dict of a status line and of a header `Status`, which
  anybody may send (`Client._process_headers`), and one task for each subscription.
* Every INFO: the limits of the account and the user come after the login, and nats-py goes by the first one.
* TLS or nothing: nats-py greets a server that offers none in the clear, credentials included.
* What waits for a lost connection is forgotten: nats-py sends it over the next one, when its outcome was settled.
* A connection whose server reads nothing is let go of: nats-py waits for its buffer to become empty.

Each has a test that fails without it (`tests/integration/test_tap.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import StaleConnectionError, UnexpectedEOF

from eventjet.codec.reasons import reason_of
from eventjet.errors import ConnectionLost, Refused, StoreUnavailable, UsageError
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Frame
from eventjet.settings import Settings

PAUSE_S = 0.2
"""Between two tries to connect."""
_PRIVATE = (
    "_process_info",
    "_process_msg",
    "_process_op_err",
    "_attempt_reconnect",
    "_close",
    "_error_cb",
    "_pending",
    "_pending_data_size",
    "_server_info",
    "_subs",
)


@dataclass(slots=True, eq=False)
class Watcher:
    """Whoever goes over a client of nats-py, and what it is told. Nothing of it may raise."""

    inbox: bytes
    """The prefix of its reply subjects: what waits with one of them is dropped with the connection."""
    on_error: Callable[[Exception], object]
    on_lost: Callable[[str], object]
    """With the reason."""
    on_reconnected: Callable[[], object]
    on_closed: Callable[[], object]


class Tap:
    """Made by `of`, one for each client of nats-py, which stays usable by everybody else."""

    _taps: ClassVar[WeakKeyDictionary[Nats, Tap]] = WeakKeyDictionary()

    def __init__(self, nats: Nats, *, is_given: bool, needs_tls: bool) -> None:
        client: Any = nats
        missing = [name for name in _PRIVATE if not hasattr(client, name)]
        if missing:
            raise UsageError(
                f"nats-py {version('nats-py')} has no {missing[0]}, which eventjet needs. Install nats-py 2.16."
            )
        self.watchers: list[Watcher] = []
        self.last_error: Exception | None = None
        self.greeting: dict[str, Any] = dict(client._server_info)
        """What the server said of itself before the login."""
        self.info = self.greeting
        """Its newest INFO, with the limits of the account and the user."""
        self._takers: dict[Any, Callable[[Frame], object]] = {}
        self._nats = client
        self._needs_tls = needs_tls
        self._given_error_cb = client._error_cb if is_given else None
        self._process_info = client._process_info
        self._process_msg = client._process_msg
        self._reason = ""
        self._connected_at = time.monotonic()
        self._process_op_err = client._process_op_err
        self._attempt_reconnect = client._attempt_reconnect
        self._close = client._close
        client._process_info = self._took_info
        client._process_msg = self._took_msg
        client._process_op_err = self._broken
        client._attempt_reconnect = self._reconnecting
        client._close = self._closing
        client._error_cb = self.failed

    @classmethod
    def of(cls, nats: Nats) -> Tap:
        """The one of a client that is connected; raises `UsageError` for another version of nats-py."""
        return cls._taps.get(nats) or cls._taps.setdefault(nats, cls(nats, is_given=True, needs_tls=False))

    @classmethod
    def of_new(cls, nats: Nats, *, needs_tls: bool) -> Tap:
        """The one of a client that is to be connected, with `failed` as its callback for errors; raises as `of`."""
        return cls._taps.setdefault(nats, cls(nats, is_given=False, needs_tls=needs_tls))

    async def subscribe(self, subject: str, take: Callable[[Frame], object], queue: str = "") -> Subscription:
        """Call `take`, which must not raise, with each message of a subject, over every later connection too."""

        async def passed_by(message: Msg) -> None:
            raise AssertionError(f"a message of {message.subject} passed by its taker")

        self._takers[passed_by] = take
        subscribe = cast("Callable[..., Any]", self._nats.subscribe)
        return await subscribe(subject, queue, passed_by)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Hear nothing of it any more, once what the server has sent by then was taken."""
        with suppress(NatsError):
            await subscription.drain()
        self._takers.pop(cast("Any", subscription)._cb, None)

    async def failed(self, error: Exception) -> None:
        """Take an error of the client's, whatever it is of: its callback for errors."""
        self.last_error = error
        for watcher in tuple(self.watchers):
            watcher.on_error(error)
        if self._given_error_cb is not None:
            await self._given_error_cb(error)

    def hears(self, subject: str) -> bool:
        """Whether a subscription of the client is to what is published there, whoever made it."""
        tokens = subject.split(".")
        return any(_matches(each._subject.split("."), tokens) for each in self._nats._subs.values())

    def abort(self, reason: str = "") -> None:
        """End the connection at once, so that nobody waits for a server that reads nothing."""
        self._reason = self._reason or reason
        for name in ("_io_writer", "_bare_io_writer"):
            writer = getattr(self._nats._transport, name, None)
            if writer is not None:
                writer.transport.abort()

    # In place of nats-py's own, which they call.

    async def _took_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        self.greeting = info if initial_connection else self.greeting
        self.info = info if initial_connection else {**self.info, **info}
        if initial_connection and self._needs_tls:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise NatsError("nats: the server does not offer TLS, which is demanded")
            info["tls_required"] = True
        if "max_payload" in info:
            self._nats._max_payload = info["max_payload"]
        await self._process_info(info, initial_connection)

    async def _took_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        subscription = self._nats._subs.get(sid)
        take = None if subscription is None else self._takers.get(subscription._cb)
        if take is None:
            try:
                await self._process_msg(sid, subject, reply, data, headers)
            except (ValueError, IndexError) as error:
                # Else one message that is not UTF-8 ends nats-py's reading for good, and `is_connected` stays true.
                await self.failed(error)
            return
        self._nats.stats["in_msgs"] += 1
        self._nats.stats["in_bytes"] += len(data)
        take((b"", bytes(subject), bytes(reply), bytes(headers or b""), bytes(data)))

    async def _broken(self, error: Exception) -> None:
        match error:
            case StaleConnectionError():
                reason = "it has been silent"
            case UnexpectedEOF():
                reason = "it closed the connection"
            case _:
                reason = f"the connection broke ({reason_of(error)})"
        self._reason = self._reason or reason
        await self._process_op_err(error)

    async def _reconnecting(self) -> None:
        self.abort("it is left")
        reason, self._reason = self._reason, ""
        for watcher in tuple(self.watchers):
            watcher.on_lost(reason)
            self._drop(watcher.inbox)
        # A server that ends every connection is asked again at once otherwise.
        await asyncio.sleep(max(0.0, self._connected_at + PAUSE_S - time.monotonic()))
        with suppress(asyncio.InvalidStateError):  # a future of nats-py's own, where it is closed meanwhile
            await self._attempt_reconnect()
        self._connected_at = time.monotonic()
        if self._nats.is_connected:
            for watcher in tuple(self.watchers):
                watcher.on_reconnected()

    async def _closing(self, status: int, do_cbs: bool = True) -> None:
        await self._close(status, do_cbs)
        if self._nats.is_closed:
            for watcher in tuple(self.watchers):
                watcher.on_closed()

    def _drop(self, inbox: bytes) -> None:
        kept = [command for command in self._nats._pending if inbox not in command.split(b"\r\n", 1)[0]]
        self._nats._pending = kept
        self._nats._pending_data_size = sum(map(len, kept))


def _matches(pattern: list[str], tokens: list[str]) -> bool:
    if pattern[-1] == ">":
        return len(tokens) >= len(pattern) and all(map(_fits, pattern[:-1], tokens))
    return len(pattern) == len(tokens) and all(map(_fits, pattern, tokens))


def _fits(token: str, other: str) -> bool:
    return token in ("*", other)


def send(nats: Nats, subject: str, payload: bytes, headers: bytes = b"", reply: str = "") -> None:
    """Publish at once; raises `ConnectionLost`, `StoreUnavailable` where the buffer is full, and `Refused`.

    `Client.publish` waits only where its buffer is full, and swallows cancellations then: so it is not awaited. It does
    not count the headers, and for a message that is too large the server would end the connection.
    """
    if not nats.is_connected:
        raise ConnectionLost("NATS", "there is no connection")
    if (size := len(headers) + len(payload)) > nats.max_payload:
        raise Refused(
            f"A message of {size:,} bytes to {subject}",
            f"the server takes {nats.max_payload:,} from this user, headers included",
            "Nothing was sent. Record less in one event, or raise the limit: `max_payload` of the server, or the "
            "`payload` of the account or user.",
        )
    pairs = dict(line.split(": ", 1) for line in headers.decode().split("\r\n")[1:] if line) if headers else None
    work = nats.publish(subject, payload, reply, pairs)
    try:
        work.send(None)
    except StopIteration:
        return
    except (NatsError, OSError) as error:
        raise ConnectionLost("NATS", reason_of(error)) from error
    work.close()
    raise StoreUnavailable(subject, "the connection takes nothing")


def endpoint_of(nats: Nats, settings: Settings) -> Endpoint:
    """The servers and credentials of a client that was given, for whoever opens a connection of its own beside it.

    Raises `UsageError` for one that is closed, draining, not connected, or of another loop.
    """
    client, by_settings = cast("Any", nats), Endpoint.of(settings)
    if client._reading_task is not None and client._reading_task.get_loop() is not asyncio.get_running_loop():
        raise UsageError("The NATS client that was given is of another loop. Connect one in this loop.")
    if nats.is_closed or nats.is_draining or not nats.is_connected:
        state = "closed" if nats.is_closed else "draining" if nats.is_draining else "not connected"
        raise UsageError(f"The NATS client that was given is {state}. Give one that is connected.")
    options: dict[str, Any] = client.options
    named = [server for server in client._server_pool if not server.discovered]
    return Endpoint(
        tuple(server.uri.geturl() for server in named or client._server_pool),
        user=options["user"],
        password=options["password"],
        token=options["token"],
        tls=options.get("tls"),
        tls_hostname=options.get("tls_hostname"),
        tls_first=options["tls_handshake_first"],
        user_jwt_cb=client._user_jwt_cb,
        signature_cb=client._signature_cb,
        public_nkey=client._public_nkey,
        inbox_prefix=bytes(client._inbox_prefix).decode(),
        caller_inboxes=by_settings.caller_inboxes,
        jetstream_prefix=by_settings.jetstream_prefix,
        discovered=tuple(server.uri.netloc for server in client._server_pool if server.discovered),
        name=options["name"] or "eventjet",
    )
