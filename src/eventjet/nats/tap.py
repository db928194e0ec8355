"""`Tap`: hooks into `nats.aio.client.Client` for what eventjet needs and its public methods do not offer.

* Our parser replaces nats-py's. It returns the header block of a message as it was sent: nats-py makes one dict of a
  status and of a header `Status`, which anybody may send. A subject, reply or status that is not UTF-8 ends nats-py's
  reading for good, and nats-py turns the server's errors into small letters. And a message costs a tenth (ADR 0056).
* Every INFO is used: the limits of the account and the user come after the login, and nats-py uses the first INFO only.
* TLS is never skipped: nats-py sends its credentials in the clear to a server that offers no TLS.
* Messages that wait for a lost connection are dropped: nats-py would send them over the next connection, when the
  outcome of their save is settled.
* A connection whose server reads nothing is aborted: nats-py waits for its buffer to become empty.

Each hook has a test that fails without it (`test_tap.py` and `test_ways_in.py` in `tests/integration`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

from nats.aio.client import DEFAULT_BUFFER_SIZE
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import ProtocolError, StaleConnectionError, UnexpectedEOF
from nats.protocol.parser import AWAITING_CONTROL_LINE

from eventjet.codec.reasons import reason_of
from eventjet.codec.subjects import covers
from eventjet.errors import ConnectionLost, Refused, UsageError
from eventjet.nats.protocol import Control, Frame, FrameParser, publish_frame
from eventjet.urls import WEBSOCKET

NO_TLS = "it does not offer TLS, which this endpoint demands"
"""What is wrong with a server that would take credentials in the clear."""
PAUSE_S = 0.2
"""Pause between two tries to connect."""
REQUESTS_MAX = 24
"""Pages that may be requested at once: together they are smaller than what a server keeps for a slow client (64 MB)."""
# fmt: off
_PRIVATE = (
    "_ps", "_process_msg", "_process_info", "_process_ping", "_process_pong", "_process_err", "_process_op_err",
    "_attempt_reconnect", "_connect_to_server", "_process_connect_init", "_pongs", "_remove_sub", "_send_unsubscribe",
    "_close", "_error_cb", "_flush_pending", "_flush_queue", "_pending", "_pending_data_size", "_server_info", "_subs",
    "_transport",
)
_OF_PARSER = ("state", "buf", "needed", "header_needed", "msg_arg")
# fmt: on
_TAP = "_eventjet_tap"
_sid_of, _body_of = itemgetter(0), itemgetter(4)


@dataclass(slots=True, eq=False)
class Watcher:
    """The callbacks of one user of a nats-py client. None of them may raise."""

    inbox: bytes
    """Prefix of the user's reply subjects: unsent messages with such a reply are dropped with the lost connection."""
    waits: Callable[[bytes, bytes], bool]
    """Returns whether the user waits for an answer; called with the reply subject and the subject of the request."""
    on_error: Callable[[Exception], object]
    """Called with each error that nats-py reports to its `error_cb`."""
    on_fault: Callable[[str], object]
    """Called with an error that the server sends: the text of an `-ERR`."""
    on_lost: Callable[[str], object]
    """Called with the reason why the connection was lost."""
    on_info: Callable[[], object]
    """Called after each new INFO of the server."""
    on_reconnected: Callable[[], object]
    on_closed: Callable[[str], object]
    """Called after the client was closed, with the reason; it is empty if its owner has closed it."""


class Tap:
    """The hooks into one nats-py client, which stays usable by everybody else."""

    def __init__(
        self, nats: NatsClient, *, needs_tls: bool = False, on_try: Callable[[Any], object] | None = None
    ) -> None:
        """Hook into a connected client; or, with `on_try`, into one that will connect with `failed` as its `error_cb`.

        `on_try` is called with the server before each try to connect, to renew the credentials. Raises `UsageError` for
        a version of nats-py without the attributes that are used here.
        """
        client: Any = nats
        missing = [name for name in _PRIVATE if not hasattr(client, name)]
        missing = missing or [f"_ps.{name}" for name in _OF_PARSER if not hasattr(client._ps, name)]
        if missing:
            problem = f"nats-py {version('nats-py')} has no {missing[0]}"
            raise UsageError(f"{problem}, which eventjet needs. Install nats-py 2.16.")
        self.watchers: list[Watcher] = []
        self.last_error: Exception | None = None
        self.room = asyncio.Semaphore(REQUESTS_MAX)
        """Limits how many pages all users of the connection request at once."""
        self.greeting: dict[str, Any] = dict(client._server_info)
        """The server's INFO from before the login."""
        self.info = self.greeting
        """The server's newest INFO, with the limits of the account and the user."""
        self._takers: dict[Any, Callable[[list[Frame]], object]] = {}
        self._nats = client
        self.loop = asyncio.get_running_loop()
        self._needs_tls = needs_tls
        self._on_try = on_try
        self._given_error_cb = None if on_try else client._error_cb
        self._reason = ""
        self._connected_at = time.monotonic()
        self._process_info = client._process_info
        self._process_op_err = client._process_op_err
        self._attempt_reconnect = client._attempt_reconnect
        self._connect_to_server = client._connect_to_server
        self._process_connect_init = client._process_connect_init
        self._close = client._close
        setattr(client, _TAP, self)
        client._ps = _Parser(self, client)
        client._process_info = self._handle_info
        client._process_op_err = self._broken
        client._attempt_reconnect = self._reconnecting
        client._connect_to_server = self._connecting
        client._process_connect_init = self._logging_in
        client._close = self._closing
        client._error_cb = self.failed

    @classmethod
    def of(cls, nats: NatsClient) -> Tap:
        """Return the tap of a connected client, creating it if needed; raises `UsageError` as the constructor does."""
        return getattr(nats, _TAP, None) or cls(nats)

    async def subscribe(self, subject: str, take: Callable[[list[Frame]], object], queue: str = "") -> Subscription:
        """Call `take`, which must not raise, with messages of a subject as they arrive, also over later connections."""

        async def passed_by(message: Msg) -> None:
            raise AssertionError(f"a message of {message.subject} passed by its taker")

        self._takers[passed_by] = take
        subscribe = cast("Callable[..., Any]", self._nats.subscribe)
        return await subscribe(subject, queue, passed_by)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription once every message that the server has sent for it was taken."""
        nats_subscription: Any = subscription
        try:
            with suppress(NatsError):
                # nats-py's `drain` sends its PING ahead of the UNSUB, and drops what the server sends in between.
                await self._nats._send_unsubscribe(nats_subscription._id)
                await self._nats._flush_pending(force_flush=True)
                await self._nats.flush(60)  # the caller may be cancelled before
        finally:
            # nats-py subscribes anew to what it could not drain.
            self._nats._remove_sub(nats_subscription._id)
            self._takers.pop(nats_subscription._cb, None)
            nats_subscription._stop_processing()
            nats_subscription._closed = True

    def taker(self, sid: int) -> Callable[[list[Frame]], object] | None:
        """Return the `take` of a subscription; None for a subscription that others have made."""
        subscription = self._nats._subs.get(sid)
        return None if subscription is None else self._takers.get(subscription._cb)

    def hears(self, subject: str) -> bool:
        """Return whether any subscription of the client, whoever made it, matches a subject."""
        return any(covers(subscription._subject, subject) for subscription in self._nats._subs.values())

    async def failed(self, error: Exception) -> None:
        """Report an error of the client to all watchers and to the client's own callback; nats-py's `error_cb`."""
        self.last_error = error
        for watcher in tuple(self.watchers):
            watcher.on_error(error)
        if self._given_error_cb is not None:
            await self._given_error_cb(error)

    def server_error(self, text: str) -> None:
        """Report the text of an `-ERR` to all watchers."""
        for watcher in tuple(self.watchers):
            watcher.on_fault(text)

    def end(self, reason: str) -> None:
        """End the connection at once; waiting requests raise an error with this reason, or with an earlier reason."""
        self._reason = self._reason or reason
        self.abort()

    def write(self, frames: bytes) -> None:
        """Send encoded frames at once, also while the loop does not run."""
        self._nats._pending.append(frames)
        self._nats._pending_data_size += len(frames)
        self.flush()

    def flush(self) -> None:
        """Write the messages that wait to be sent; if the socket is full, leave that to nats-py's flusher task."""
        client = self._nats
        if not client._pending:
            return
        writer = getattr(client._transport, "_io_writer", None)  # a WebSocket has none
        is_open = writer is not None and client.is_connected and not writer.transport.is_closing()
        if writer is not None and is_open and not writer.transport.get_write_buffer_size():
            writer.write(b"".join(client._pending))
            client._pending = []
            client._pending_data_size = 0
        elif client._flush_queue.empty():
            client._flush_queue.put_nowait(self.loop.create_future())

    def read_at_most(self, size: int) -> None:
        """Set how many bytes are read at a time; asyncio reads 256 KB."""
        self._nats._transport._io_writer.transport.max_size = size

    def abort(self) -> None:
        """Abort the socket, so that nothing waits for a server that reads nothing."""
        for name in ("_io_writer", "_bare_io_writer"):
            writer = getattr(self._nats._transport, name, None)
            if writer is not None:
                writer.transport.abort()

    # These replace methods of nats-py, and call them.

    async def _handle_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        self.greeting = info if initial_connection else self.greeting
        self.info = info if initial_connection else {**self.info, **info}
        if initial_connection and self._on_try and not info.get("headers"):
            raise NatsError("nats: it does not know headers, so it is older than NATS 2.2")
        if initial_connection and self._needs_tls:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise NatsError(f"nats: {NO_TLS}")
            info["tls_required"] = True
        if "max_payload" in info:
            self._nats._max_payload = info["max_payload"]
        for watcher in tuple(self.watchers):
            watcher.on_info()
        if self._on_try or self._nats._current_server.uri.scheme in WEBSOCKET:
            # An attacker may have written what comes before TLS, and nats-py would accept certificates for the names in
            # it. On a WebSocket, nats-py would add the cluster's servers as nats:// servers, which are not WebSockets.
            info = {name: value for name, value in info.items() if name != "connect_urls"}
        await self._process_info(info, initial_connection)

    async def _connecting(self, server: Any) -> None:
        try:
            if self._on_try is not None:
                self._on_try(server)
            await self._connect_to_server(server)
        except BaseException:
            server.reconnects += 1  # at its first connection, nats-py would try it again after a pause
            raise

    async def _logging_in(self) -> None:
        self._nats._ps.reset()  # nats-py does so only where it is reconnecting
        transport, line, unsent = self._nats._transport, b"", b""
        read: Callable[[], Awaitable[bytes]] = transport.readline
        send: Callable[[bytes], object] = transport.write
        is_verbose: bool = self._nats.options["verbose"]  # then the server answers CONNECT, too

        def write(frames: bytes) -> None:
            """Send CONNECT together with the PING that follows.

            A server that refuses a certificate closes the connection. It resets the connection when it gets more, and a
            second write would then fail before the reason, a TLS alert, was read.
            """
            nonlocal unsent
            unsent += frames
            if is_verbose or unsent.endswith(b"PING\r\n"):
                send(unsent)
                unsent = b""

        async def readline() -> bytes:
            nonlocal line
            line = await read()
            return line

        transport.readline, transport.write = readline, write
        try:
            await self._process_connect_init()
            if not self._nats.is_connected:  # nats-py takes the end of the connection for a PONG
                raise ConnectionResetError("closed the connection during the greeting")
        except BaseException as error:
            reader = getattr(transport, "_io_reader", None)  # a WebSocket has none
            cause = reader and reader.exception()  # of TLS, for instance
            self.abort()  # nats-py opens the next connection and leaves this socket open
            if line.startswith(b"-ERR") and isinstance(error, NatsError):
                raise NatsError(f"nats: {line[4:].decode('utf-8', 'replace').strip()}") from None
            if cause is not None and isinstance(error, OSError):
                raise cause from None
            raise
        finally:
            del transport.readline, transport.write
        # Over a WebSocket, the limits of the user come in one frame with the PONG, and nats-py reads only the PONG.
        await self._nats._ps.parse(line.partition(b"PONG\r\n")[2])

    async def _broken(self, error: Exception) -> None:
        match error:
            case UnexpectedEOF():  # which is a StaleConnectionError
                reason = "it closed the connection"
            case StaleConnectionError():
                reason = "it has been silent"
            case _:
                reason = f"the connection broke ({reason_of(error)})"
        self._reason = self._reason or reason
        await self._process_op_err(error)

    async def _reconnecting(self) -> None:
        self.end("it is left")
        reason, self._reason = self._reason, ""
        for watcher in tuple(self.watchers):
            watcher.on_lost(reason)
            self._drop(watcher.inbox)
        # Without the pause, a server that ends every connection would be asked again at once.
        await asyncio.sleep(max(0.0, self._connected_at + PAUSE_S - time.monotonic()))
        task = asyncio.current_task()
        while True:
            try:
                await self._attempt_reconnect()
            except asyncio.InvalidStateError:  # raised by a future of nats-py, where the client is closed meanwhile
                break
            except Exception as error:  # noqa: BLE001 - of a callback or a file; nats-py would not try again
                await self.failed(error)
            if self._nats.is_connected or self._nats.is_closed or (task is not None and task.cancelling()):
                break
            await asyncio.sleep(PAUSE_S)
        self._connected_at = time.monotonic()
        if self._nats.is_connected:
            for watcher in tuple(self.watchers):
                watcher.on_reconnected()

    async def _closing(self, status: int, do_cbs: bool = True) -> None:
        await self._close(status, do_cbs)
        if self._nats.is_closed:
            for watcher in tuple(self.watchers):
                watcher.on_closed(self._reason)

    def _drop(self, inbox: bytes) -> None:
        # The messages of a batch before its last have no reply subject; the server drops a batch without an end.
        commands = [
            command
            for command in self._nats._pending
            if inbox not in command.split(b"\r\n", 1)[0] and b"\r\nNats-Batch-Id: " not in command
        ]
        self._nats._pending = commands
        self._nats._pending_data_size = sum(map(len, commands))


class _Parser:
    """The parser that replaces nats-py's: it gives our messages to their takers, and leaves the rest to nats-py.

    nats-py reads in a task that a stream wakes up, which costs a request 15 µs (ADR 0056). So once that stream is
    empty, data is parsed as soon as it arrives, and the task handles only messages of other subscriptions and controls.
    """

    def __init__(self, tap: Tap, nats: Any) -> None:
        self._tap = tap
        self._nats = nats
        self.reset()
        self._previous_parser = nats._ps

    def reset(self) -> None:
        self._previous_parser: Any = None
        self._frames = FrameParser()
        self._wake: Callable[[bytes], object] | None = None
        self._deferred: list[tuple[list[Frame], list[Control]]] = []
        self._fault: ValueError | None = None

    async def parse(self, data: bytes = b"") -> None:
        """Handle data from the server; raises `ProtocolError`, which ends the connection."""
        if self._nats.is_closed or self._nats.is_reconnecting:
            return
        if self._wake is None:
            previous_parser, self._previous_parser = self._previous_parser, None
            self._feed((b"" if previous_parser is None else _unparsed(previous_parser)) + data)
            stream = getattr(self._nats._transport, "_io_reader", None)  # a WebSocket has none
            if stream is not None and 0 < len(data) < DEFAULT_BUFFER_SIZE:
                wake = self._wake = stream.feed_data
                stream.feed_data = partial(self._received, wake)
        while self._deferred:
            await self._handle(*self._deferred.pop(0))
        if self._fault is not None:
            self._tap.end(f"it sent {self._fault}")
            raise ProtocolError from self._fault

    def _received(self, wake: Callable[[bytes], object], data: bytes) -> None:
        if wake is not self._wake:
            return  # data of an earlier connection
        self._feed(bytes(data))
        if self._deferred or self._fault is not None:
            wake(data)  # as many bytes as wait, so that the stream pauses the socket where there are too many

    def _feed(self, data: bytes) -> None:
        if self._fault is not None or self._nats.is_closed or self._nats.is_reconnecting:
            return
        try:
            frames, controls = self._frames.feed(data)
        except ValueError as error:
            self._fault = error
            return
        for verb, argument in controls:
            if verb == b"-ERR":
                # Reported before the answer to the permitted messages of the same batch.
                self._tap.server_error(_text(argument))
        other_frames: list[Frame] = []
        # What arrives shows that the server is there, also while a PONG waits behind it.
        self._nats._pings_outstanding = 0
        is_of_one = len(set(map(_sid_of, frames))) == 1  # as in a read of many messages
        for sid, group in ((frames[0][0], frames),) if is_of_one else groupby(frames, _sid_of):
            messages, take = group if isinstance(group, list) else list(group), self._tap.taker(int(sid))
            if take is None:
                other_frames += messages
                continue
            self._nats.stats["in_msgs"] += len(messages)
            self._nats.stats["in_bytes"] += sum(map(len, map(_body_of, messages)))
            take(messages)
        if other_frames or controls:
            self._deferred.append((other_frames, controls))

    async def _handle(self, frames: list[Frame], controls: list[Control]) -> None:
        for sid, subject, reply, headers, body in frames:
            try:
                await self._nats._process_msg(int(sid), subject, reply, body, headers or None)
            except (ValueError, IndexError) as error:  # not UTF-8
                await self._tap.failed(error)
        for verb, argument in controls:
            if verb == b"PING":
                await self._nats._process_ping()
            elif verb == b"PONG":
                await self._handle_pong()
            elif verb == b"INFO":
                await self._nats._process_info(json.loads(argument))
            elif verb == b"-ERR":
                await self._handle_fault(_text(argument).lower())

    async def _handle_pong(self) -> None:
        pongs = self._nats._pongs
        if pongs and pongs[0].done():
            # The caller of the ping has given up, and setting the result would end nats-py's reading.
            pongs.pop(0)
            self._nats._pings_outstanding = 0
        else:
            await self._nats._process_pong()

    async def _handle_fault(self, text: str) -> None:
        if text.startswith("maximum payload violation"):
            # nats-py would close itself for good; the INFO of the next connection has the limit.
            await self._nats._process_op_err(NatsError(f"nats: {text}"))
        else:
            await self._nats._process_err(text)


def _unparsed(parser: Any) -> bytes:
    """Return the bytes of the unfinished frame that nats-py's own parser has read so far."""
    if parser.state == AWAITING_CONTROL_LINE:
        return bytes(parser.buf)
    verb, head = (b"HMSG", b"%d " % parser.header_needed) if parser.header_needed else (b"MSG", b"")
    fields = parser.msg_arg
    reply = fields["reply"] + b" " if fields["reply"] else b""
    return b"%b %b %d %b%b%d\r\n%b" % (verb, fields["subject"], fields["sid"], reply, head, parser.needed, parser.buf)


def _text(argument: bytes) -> str:
    return argument.decode("utf-8", "replace").strip("' ")


def send(nats: NatsClient, subject: str, payload: bytes, headers: bytes = b"", reply: bytes = b"") -> None:
    """Publish a message without waiting; all that is sent in one turn of the loop is written together.

    It replaces nats-py's `Client.publish`, which takes headers as a dict, waits where its buffer is full, swallows
    cancellations then, and does not count the headers: for a message that is too large the server would end the
    connection. Raises `ConnectionLost` and `Refused`.
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
    client: Any = nats
    frame = publish_frame(subject, payload, reply=reply, headers=headers)
    if not client._pending:
        tap: Tap = getattr(client, _TAP)
        tap.loop.call_soon(tap.flush)
    client._pending.append(frame)
    client._pending_data_size += len(frame)
    client.stats["out_msgs"] += 1
    client.stats["out_bytes"] += len(payload)
