"""`Client`: what an application's loop asks, sends and hears, over one `nats.aio.client.Client`.

nats-py dials, authenticates, pings, parses, reconnects and subscribes anew. Added here: one inbox with a table of what
waits for answers, answers of many messages, a bound on every wait, violations told to the request whose subject they
name, room in the buffer before a publish, and the end of what waits when a connection is lost. See ADR 0056.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from eventjet.codec.envelope import RawRecord
from eventjet.codec.reasons import reason_of
from eventjet.errors import (
    ApiRefused,
    ConnectionClosed,
    ConnectionLost,
    Forbidden,
    NoResponders,
    StoreError,
    StoreUnavailable,
    StreamMissing,
    Unauthorized,
    Unreachable,
    UsageError,
)
from eventjet.nats.answers import PROBE, Answerers, ExpectedAnswer
from eventjet.nats.api import CONFLICTS, LAG_S, STATUS, Request, call, is_page, reading_records
from eventjet.nats.connection import check_pages
from eventjet.nats.dial import check_files, dial, tls_context
from eventjet.nats.endpoint import Endpoint, is_file
from eventjet.nats.protocol import Frame, nobody_listens, server_fault
from eventjet.nats.requirements import check_server
from eventjet.observability import logs
from eventjet.settings import Settings

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CONNECT_S = 3.0
"""For each server of the cluster."""
_PAUSE_S = 0.2
"""Between two tries to connect."""
_PING_S = 10.0
_PONG_S = 4.0
"""How long a server that let a request wait may take for a sign of life, before another connection is made."""
_ROOM_BYTES = 1 << 20
"""What may wait for the socket before those who send wait with it: half of what nats-py lets wait by default."""
_ROOM_PAUSE_S = 0.001
_STILL_S = 0.1
"""A loop that is later than this stood still, while something else had the process (ADR 0043)."""
_ANSWERED_MAX = 1_000
"""So many publishes are remembered after their answer: a second one says that somebody else answers, too."""
_END_S = 0.5
"""How long the end of a page may take before it is asked for again."""
_REFUSED_S = 0.25
"""So long after an error that refuses a publish an acknowledgement is waited for: no error says whose it is."""
_INBOX = re.compile(rb"[^\x00-\x20\x7f-\xff.*>]+(\.[^\x00-\x20\x7f-\xff.*>]+)+")
"""A subject of several tokens in ASCII, without wildcards: what a client makes for its answers."""
_INBOX_MAX = 1_000
"""Bytes of one."""
_CREDENTIALS = (
    "Set EVENTJET_CREDENTIALS, EVENTJET_NKEY, EVENTJET_USER and EVENTJET_PASSWORD, or EVENTJET_TOKEN; "
    "EVENTJET_TLS_CERT and EVENTJET_TLS_KEY where it asks for a certificate."
)

_NO_JETSTREAM = (
    "If the log is in the JetStream of another domain, such as that of the hub of a leaf node, set "
    "EVENTJET_JETSTREAM_DOMAIN to its name. Else start the server with `-js`, or with a "
    "`jetstream { store_dir: … sync_interval: always }` block."
)
_NO_DOMAIN = (
    "Set EVENTJET_JETSTREAM_DOMAIN to the `domain` of the JetStream that has the log, or EVENTJET_JETSTREAM_PREFIX to "
    "what this account imports its API as, and see whether the link to its server is up."
)


async def connect(settings: Settings) -> Client:
    """A client that is connected; raises `Unreachable`, and `UsageError` for files that cannot be used.

    Checked at once: the credentials, the server's version, the size of its messages, and that JetStream is on.
    """
    for name in ("credentials", "nkey", "tls_ca", "tls_cert", "tls_key"):
        path: Path | None = getattr(settings, name)
        if path is not None and not is_file(path):
            # Not shown: people put the seed itself where its file belongs.
            what = f"The file of EVENTJET_{name.upper()}"
            raise Unreachable(what, "it does not exist", "Give the path of a file that is there.")
    check_files(Endpoint.of(settings))
    client = Client(Endpoint.of(settings), settings.request_timeout_s)
    where = f"The NATS server at {', '.join(client.endpoint.servers)}"
    try:
        check_server(where, await client.connect())
        await _check_jetstream(where, client)
    except BaseException as error:
        await client.close()
        if not isinstance(error, Unauthorized):
            raise
        raise Unreachable(where, f"it refused the credentials ({error.reason})", _CREDENTIALS) from None
    return client


@asynccontextmanager
async def connected(settings: Settings) -> AsyncGenerator[Client]:
    """What `connect` gives, closed on the way out."""
    client = await connect(settings)
    try:
        yield client
    finally:
        await client.close()


async def _check_jetstream(where: str, client: Client) -> None:
    try:
        client.domain = str((await client.api("INFO")).get("domain", ""))
    except Forbidden as denied:
        if client.is_own_inbox(denied.subject.encode()):
            raise  # no answer would ever come
        # Else credentials without this right may still append and read.
    except (StoreUnavailable, ApiRefused, Unreachable) as error:
        choosing = " In a cluster that is choosing the leader of its JetStream, try again in some seconds."
        is_elsewhere = client.endpoint.is_elsewhere
        below = f" below {client.endpoint.jetstream_prefix}" if is_elsewhere else ""
        raise Unreachable(
            f"JetStream{below} on {where[0].lower()}{where[1:]}",
            f"it is not available ({error})",
            (_NO_DOMAIN if is_elsewhere else _NO_JETSTREAM) + (choosing if len(client.endpoint.servers) > 1 else ""),
        ) from None


class _Nats(Nats):
    """nats-py's client, which tells of each INFO: the account's and the user's limits come after the login."""

    def __init__(self, on_info: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self._on_info = on_info

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        self._on_info(info)
        await super()._process_info(info, initial_connection)


@dataclass(slots=True, eq=False)
class Listening:
    """One subscription, which outlives connections."""

    subject: str
    heard: Callable[[Frame], object]
    queue: str = ""
    subscription: Subscription | None = None


class _Exchange:
    """One request, and what has come in answer to it."""

    __slots__ = (
        "_frames",
        "_grace_s",
        "_loop",
        "_timer",
        "_wake",
        "accepts",
        "fault",
        "late",
        "patience_s",
        "reply",
        "subjects",
    )

    def __init__(
        self,
        reply: str,
        subjects: Collection[str],
        patience_s: float,
        accepts: Callable[[Frame], bool] | None,
        late: Callable[[], object],
    ) -> None:
        self.reply = reply
        self.subjects = subjects
        """What was published for it: a violation on any of them ends it."""
        self.patience_s = patience_s
        """How long its answer, or the next part of it, may take."""
        self.accepts = accepts
        """Whether a frame is of whoever was asked, None where nobody else answers; others' frames give no more time."""
        self.late = late
        self.fault: Exception | None = None
        self._frames: list[Frame] = []
        self._wake: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._grace_s = patience_s
        self._timer = self._loop.call_later(patience_s, self._look)

    async def came(self) -> list[Frame]:
        """The next frames of the answer, at least one; raises what ended the exchange."""
        if not self._frames and self.fault is None:
            self._wake = self._loop.create_future()
            await self._wake
        if not self._frames and self.fault is not None:
            raise self.fault
        frames, self._frames = self._frames, []
        return frames

    def arrived(self, frame: Frame) -> None:
        """Take a part of the answer; what comes after the end is not one."""
        if self.fault is None and (self.accepts is None or self.accepts(frame)):
            self._frames.append(frame)
            self._timer.cancel()
            self._timer = self._loop.call_later(self.patience_s, self._look)
            self._wake_up()

    def end(self, fault: Exception) -> None:
        """There will be no more."""
        if self.fault is None:
            self.fault = fault
            self._wake_up()
        self._timer.cancel()

    def forget(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        still_s = min(self._loop.time() - self._timer.when(), self._grace_s)
        if still_s > _STILL_S:
            # The loop could not have heard an answer: what has come meanwhile is read first.
            self._grace_s -= still_s
            self._timer = self._loop.call_later(still_s, self._look)
            return
        self.end(StoreUnavailable(next(iter(self.subjects)), f"no answer within {self.patience_s:g} s"))
        self.late()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Client:
    """For any number of tasks of one loop. Every wait ends: by an answer, a violation, a lost connection or in time.

    Between two connections, requests wait for the next one, for as long as they may take.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        """How long a request may take unless it sets a time of its own."""
        self.on_lost: list[Callable[[], object]] = []
        """Called when the connection is lost: what was known of the log may be of another past."""
        self.on_denied: list[Callable[[Forbidden], object]] = []
        """Called for what the server denies that nobody waits for: an answer, or a subscription."""
        self.info: dict[str, Any] = {}
        """The server's newest INFO, with the limits of the account and the user."""
        self.domain: str | None = None
        """The JetStream domain of what answers this account's API, as it has told; None where it was not asked.

        That may be another than the connected server's: a leaf node can have one of its own for other accounts alone.
        """
        self.answerers = Answerers()
        """Who else answers what this client publishes."""
        self._nats: Nats | None = None
        self._usable = asyncio.Event()
        self._inbox = f"{endpoint.inbox_prefix}.{secrets.token_hex(11)}"
        self._mute: Forbidden | None = None
        """Why no answer would ever come."""
        self._number = 0
        self._waiting: dict[str, _Exchange] = {}
        self._answered: dict[str, Callable[[Frame], bool]] = {}
        self._listening: list[Listening] = []
        self._opening: asyncio.Task[None] | None = None
        self._doubting: asyncio.Task[None] | None = None
        self._fault: Exception | None = None
        self._closed = False

    async def connect(self) -> dict[str, Any]:
        """Connect at once; the server's INFO. Raises `Unauthorized`, `Unreachable` and `UsageError`."""
        nats = _Nats(self._learn)
        bound_s = _CONNECT_S * (len(self.endpoint.servers) + 1)
        try:
            async with asyncio.timeout(bound_s):
                await nats.connect(**self._options())
        except (OSError, NatsError, TimeoutError) as error:
            await nats.close()
            # nats-py does not say which server said what. The same servers are asked one after the other.
            dialled = await asyncio.to_thread(dial, self.endpoint, bound_s)
            dialled.sock.close()
            raise Unreachable("NATS", reason_of(error), "Try again.") from None
        # Only from now on: the first connection is not to be waited for.
        nats.options |= {"allow_reconnect": True, "max_reconnect_attempts": -1}
        self._nats = nats
        self._mute = None
        await nats.subscribe(f"{self._inbox}.*", cb=self._answer, pending_msgs_limit=0, pending_bytes_limit=0)
        for each in self._listening:
            each.subscription = await self._subscribed(nats, each)
        self._usable.set()
        return self.info

    def _options(self) -> dict[str, Any]:
        endpoint = self.endpoint
        servers = [f"{'tls' if each.tls else 'nats'}://{each.host}:{each.port}" for each in endpoint.addresses()]
        options: dict[str, Any] = {
            "servers": servers,
            "name": endpoint.name,
            "inbox_prefix": endpoint.inbox_prefix,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": _PAUSE_S,
            "connect_timeout": _CONNECT_S,
            "ping_interval": _PING_S,
            "max_outstanding_pings": 2,
            "user": endpoint.user,
            "password": endpoint.password,
            "token": endpoint.token,
            "nkeys_seed": None if endpoint.nkey is None else str(endpoint.nkey),
            "user_credentials": None if endpoint.credentials is None else str(endpoint.credentials),
            "tls_handshake_first": endpoint.tls_first,
            "skip_subject_validation": True,
            "error_cb": self._failed,
            "disconnected_cb": self._lost,
            "reconnected_cb": self._reconnected,
            "closed_cb": self._ended,
        }
        if any(each.tls for each in endpoint.addresses()):
            options["tls"] = tls_context(endpoint)
        return options

    def check_open(self) -> None:
        """Raise `ConnectionClosed` after `close`."""
        if self._closed:
            raise ConnectionClosed

    async def close(self) -> None:
        """End the connection and all that waits for it; any number of times."""
        self._closed = True
        for task in (self._opening, self._doubting):
            if task is not None:
                task.cancel()
        self._end_all(ConnectionClosed())
        if self._nats is not None:
            await self._nats.close()

    # Requests.

    async def ask(self, request: Request[T], timeout_s: float | None = None) -> T:
        """The answer to a request; raises what it means, `StoreUnavailable`, and `Forbidden`."""
        frame = await self.request(request.subject, request.payload, request.headers, timeout_s, stream=request.stream)
        return request.parse(frame)

    async def api(self, subject: str, body: object = None) -> dict[str, Any]:
        """A JetStream request in JSON, `subject` without `$JS.API.`; raises `ApiRefused` for its `error`."""
        return await self.ask(call(subject, body))

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        headers: bytes = b"",
        timeout_s: float | None = None,
        before: Collection[tuple[str, bytes, bytes]] = (),
        stream: str = "",
    ) -> Frame:
        """Publish, and wait for one answer; `before` are (subject, payload, headers) that go before it over the same
        connection, and are part of the same matter.

        What is to be stored names its `stream`: answers of others are passed over, and one that may be another's is
        none, so it raises `StoreUnavailable` as well.
        """
        subjects = {subject, *(each[0] for each in before)} if before else (subject,)
        if self.endpoint.is_elsewhere:
            # A server of this domain names in violations what it maps it to.
            subject, asked = self.endpoint.routed(subject), subjects
            before = [(self.endpoint.routed(to), body, block) for to, body, block in before]
            subjects = (subject, *(each[0] for each in before), *asked)
        wait_s = timeout_s or self.timeout_s
        until = asyncio.get_running_loop().time() + wait_s
        nats = await self._with_room(subject, until)
        expected = self._expected(stream, subject, 1 + len(before)) if stream else None
        exchange = self._exchange(subjects, wait_s, expected and expected.accepts)
        try:
            for each in before:
                self._send(nats, *each)
                if nats.pending_data_size > _ROOM_BYTES:
                    await self._with_room(subject, until)
                if exchange.fault is not None:
                    raise exchange.fault
            self._send(nats, subject, payload, headers, exchange.reply)
            frames = await exchange.came()
            frame = frames[0] if expected is None else await _answer_of_stream(exchange, expected, frames)
        except StoreUnavailable as error:
            if type(error) is not StoreUnavailable or expected is None or not expected.stranger:
                raise
            raise StoreUnavailable(error.what, f"{error.reason}; {expected.stranger} answered") from None
        finally:
            self._forget(exchange)
        if nobody_listens(frame):
            raise NoResponders(subject)
        return frame

    def probe(self, stream: str, subject: str) -> None:
        """Ask who answers a publish there; nobody stores it, and `answerers` names who is not the stream.

        Waits for nothing, not even for the permission, without which nobody is asked.
        """
        nats, subject = self._nats, self.endpoint.routed(subject)
        if nats is not None and nats.is_connected and nats.pending_data_size <= _ROOM_BYTES:
            exchange = self._exchange((subject,), self.timeout_s, self._expected(stream, subject, 1).accepts)
            self._send(nats, subject, b"", PROBE, exchange.reply)
            self._forget(exchange)

    async def stream(self, request: Request[Any]) -> AsyncGenerator[list[Frame]]:
        """The parts of a long answer as they come, for as long as whoever asks wants more; raises as `request`."""
        subject, came = self.endpoint.routed(request.subject), 0
        nats = await self._with_room(subject, asyncio.get_running_loop().time() + self.timeout_s)
        exchange = self._exchange((subject, request.subject), self.timeout_s)
        try:
            self._send(nats, subject, request.payload, request.headers, exchange.reply)
            while True:
                frames = await exchange.came()
                if nobody_listens(frames[-1]):
                    raise NoResponders(subject)
                came += len(frames)
                yield frames
        except StoreUnavailable as late:
            if came == 1 and type(late) is StoreUnavailable:
                await check_pages(self.endpoint, request)
            raise
        finally:
            self._forget(exchange)

    async def records(self, stream: str, subject: str, limit: int | None = None) -> list[RawRecord]:
        """All records whose subject matches: see `reading_records`. None where there is no stream."""
        reading, answer = reading_records(stream, subject, limit), None
        try:
            while True:
                request = reading.send(answer)
                if request is None:
                    answer = await asyncio.sleep(LAG_S)
                else:
                    answer = await (self._page(request) if is_page(request) else self.ask(request))
        except StopIteration as ended:
            return ended.value
        except StreamMissing:
            return []

    async def _page(self, request: Request[Any]) -> list[Frame]:
        """All messages of a long answer, the last of which is the status that ends it."""
        found: list[Frame] = []
        async with aclosing(self.stream(request)) as parts:
            async for part in parts:
                found += part
                if part[-1][3].startswith(STATUS):
                    break
        return found

    async def check_pages(self, request: Request[Any]) -> None:
        """Raise `SingleResponse` where a page of one message has no end, as often as it is asked for.

        Where nobody answers, or these credentials may not ask, nothing is raised.
        """
        came: list[Frame] = []
        with suppress(TimeoutError, StoreUnavailable, Forbidden):
            async with asyncio.timeout(_END_S), aclosing(self.stream(request)) as parts:
                async for part in parts:
                    came += part
                    if part[-1][3].startswith(STATUS):
                        return
        if len(came) == 1:
            await check_pages(self.endpoint, request)

    def _expected(self, stream: str, subject: str, messages: int) -> ExpectedAnswer:
        domain = self.domain
        if domain is None and self.info.get("jetstream") and not self.endpoint.is_elsewhere:
            domain = str(self.info.get("domain", ""))
        return ExpectedAnswer(stream, subject, messages, domain, self.answerers)

    def _exchange(
        self, subjects: Collection[str], patience_s: float, accepts: Callable[[Frame], bool] | None = None
    ) -> _Exchange:
        self._number += 1
        exchange = _Exchange(f"{self._inbox}.{self._number}", subjects, patience_s, accepts, self._doubt)
        self._waiting[exchange.reply] = exchange
        return exchange

    def _forget(self, exchange: _Exchange) -> None:
        """Ignore whatever still comes in answer to it, but for who it is that answers."""
        exchange.forget()
        del self._waiting[exchange.reply]
        if exchange.accepts is not None:
            self._answered[exchange.reply] = exchange.accepts
            if len(self._answered) > _ANSWERED_MAX:
                del self._answered[next(iter(self._answered))]

    async def _answer(self, message: Msg) -> None:
        exchange = self._waiting.get(message.subject)
        if exchange is not None:
            exchange.arrived(frame_of(message))
        elif message.subject in self._answered:
            self._answered[message.subject](frame_of(message))

    # What is published and heard.

    async def listen(self, subject: str, heard: Callable[[bytes], object]) -> None:
        """Have `heard` called with each payload on a subject, from now on and over every later connection.

        Messages are lost while there is none, and a subscription that the server denies only stays silent.
        Raises `ConnectionClosed` after `close`.
        """
        await self.serve(subject, lambda frame: heard(frame[4]))

    async def serve(self, subject: str, heard: Callable[[Frame], object], queue: str = "") -> Listening:
        """As `listen`, with whole messages, and as a member of a queue group where one is named."""
        self.check_open()
        listening = Listening(subject, heard, queue)
        self._listening.append(listening)
        if self._nats is not None and not self._nats.is_closed:
            listening.subscription = await self._subscribed(self._nats, listening)
        return listening

    async def _subscribed(self, nats: Nats, listening: Listening) -> Subscription:
        async def hear(message: Msg) -> None:
            listening.heard(frame_of(message))

        return await nats.subscribe(
            listening.subject, listening.queue, hear, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def unsubscribe(self, served: Collection[Listening]) -> None:
        """Hear nothing of these any more; returns when the server knows."""
        for each in served:
            self._listening.remove(each)
            if each.subscription is not None:
                with suppress(NatsError):
                    await each.subscription.unsubscribe()
        with suppress(StoreError, ApiRefused):
            await self.api("INFO")  # answered after what was sent before it

    def publish(self, subject: str, payload: bytes, headers: bytes = b"") -> None:
        """Send one message and wait for nothing; it is lost where there is no connection."""
        if self._nats is not None and self._nats.is_connected:
            self._send(self._nats, subject, payload, headers)

    def may_answer(self, reply: bytes) -> bool:
        """Whether an answer may go to the reply subject of a request, which whoever asks chooses freely: to an inbox of
        callers, never to this client's own, whose messages it believes to be the server's.

        A request from another account comes with a reply below `_R_.`, which the server makes and takes from no client.
        """
        if len(reply) > _INBOX_MAX or not _INBOX.fullmatch(reply) or self.is_own_inbox(reply):
            return False
        return reply.startswith((b"_R_.", *(f"{prefix}.".encode() for prefix in self.endpoint.caller_inboxes)))

    def is_own_inbox(self, subject: bytes) -> bool:
        """Whether what is published there would be read as an answer to this client."""
        return subject.lower().startswith(f"{self._inbox}.".lower().encode())

    def _send(self, nats: Nats, subject: str, payload: bytes, headers: bytes, reply: str = "") -> None:
        """Publish at once; nats-py waits only where its buffer is full, and swallows cancellations then."""
        work = nats.publish(subject, payload, reply, _pairs(headers) if headers else None)
        try:
            work.send(None)
        except StopIteration:
            return
        except (NatsError, OSError) as error:
            raise ConnectionLost("NATS", reason_of(error)) from error
        work.close()
        raise StoreUnavailable(subject, "the connection takes nothing")

    # The connection.

    async def _with_room(self, what: str, until: float) -> Nats:
        """The connection, once it takes more; raises `StoreUnavailable` when there is none in time."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            if self._mute is not None:
                raise self._mute
            nats = self._nats
            is_connected = nats is not None and nats.is_connected
            if nats is not None and is_connected and nats.pending_data_size <= _ROOM_BYTES:
                return nats
            left_s = until - loop.time()
            if left_s <= 0:
                reason = "the connection takes nothing" if is_connected else "there is no connection"
                raise StoreUnavailable(what, f"{reason}{f' ({self._fault})' if self._fault else ''}")
            if is_connected:
                await asyncio.sleep(_ROOM_PAUSE_S)
                continue
            if nats is None or nats.is_closed:
                self._open()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._usable.wait()
        raise ConnectionClosed

    def _open(self) -> None:
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._opened())

    async def _opened(self) -> None:
        """Connect, trying for as long as it takes: nats-py gives up where the server has ended the login."""
        while True:
            try:
                await self.connect()
                self._fault = None
                return
            except Exception as error:  # noqa: BLE001 - nobody else would open one again, whatever it is
                if not isinstance(error, (StoreError, Unreachable, UsageError)) and repr(error) != repr(self._fault):
                    logs.NO_CONNECTION.tell(_log, reason=reason_of(error), trace="")
                self._fault = error
                await asyncio.sleep(_PAUSE_S)

    def _learn(self, info: dict[str, Any]) -> None:
        self.info |= info
        self.endpoint = self.endpoint.with_discovered(info.get("connect_urls") or ())

    def _end_all(self, fault: Exception) -> None:
        for exchange in self._waiting.values():
            exchange.end(fault)

    async def _failed(self, error: Exception) -> None:
        """What nats-py calls with every error."""
        self._fault = error
        text = str(error).removeprefix("nats: ")
        fault = server_fault(text, self._peer) if "permissions violation" in text.lower() else None
        if isinstance(fault, Forbidden):
            self._denied(fault)

    def _denied(self, fault: Forbidden) -> None:
        """A violation ends what was published on its subject; nats-py gives that in small letters."""
        subject = fault.subject.lower()
        if subject.startswith(self._inbox.lower()):
            self._mute = fault
            self._end_all(fault)
            return
        concerned = [each for each in self._waiting.values() if subject in map(str.lower, each.subjects)]
        for exchange in concerned:
            exchange.end(fault)
        if not concerned:
            for tell in self.on_denied:
                tell(fault)

    async def _lost(self) -> None:
        self._usable.clear()
        if not self._closed:
            self._end_all(
                ConnectionLost(f"NATS at {self._peer}", reason_of(self._fault) if self._fault else "it is gone")
            )
            for forget in self.on_lost:
                forget()
            if self._nats is not None and not self._nats.is_closed and self._nats.options.get("tls"):
                self._nats.options["tls"] = tls_context(self.endpoint)  # the files may be newer ones

    async def _reconnected(self) -> None:
        self._fault = self._mute = None
        self._usable.set()

    async def _ended(self) -> None:
        self._usable.clear()
        if not self._closed:
            self._open()

    def _doubt(self) -> None:
        """A request had no answer in time: a server that says nothing at all is left for another."""
        if self._doubting is None or self._doubting.done():
            self._doubting = asyncio.create_task(self._pinged())

    async def _pinged(self) -> None:
        nats = self._nats
        if nats is None or not nats.is_connected:
            return
        try:
            await nats.flush(int(_PONG_S))
        except (NatsError, TimeoutError):
            if nats.is_connected:
                await nats.force_reconnect()

    @property
    def _peer(self) -> str:
        url = None if self._nats is None else self._nats.connected_url
        return "its server" if url is None else url.netloc.rpartition("@")[2]


def frame_of(message: Msg) -> Frame:
    """A message as the reader of the log has them."""
    block = b"" if message.headers is None else _block(message.headers)
    return (b"", message.subject.encode(), message.reply.encode(), block, message.data)


def _block(headers: Mapping[str, str]) -> bytes:
    """The header block of what nats-py has taken apart; the status of a message without one is in the first line."""
    status = headers.get("Status", "")
    first = f"NATS/1.0 {status} {headers.get('Description', '')}".rstrip() if status else "NATS/1.0"
    lines = [f"{name}: {value}\r\n" for name, value in headers.items() if not status or name not in _INLINE]
    return f"{first}\r\n{''.join(lines)}\r\n".encode()


def _pairs(block: bytes) -> dict[str, str]:
    lines = block.decode().split("\r\n")[1:]
    return dict(line.split(": ", 1) for line in lines if line)


_INLINE = ("Status", "Description")


async def _answer_of_stream(exchange: _Exchange, expected: ExpectedAnswer, frames: list[Frame]) -> Frame:
    """An acknowledgement if one comes, else an error; raises `StoreUnavailable` for what another may have said."""
    frame, answer = expected.best(frames)
    # A conflict is looked at anyway, whoever has told of it; where two answer, both are heard.
    if answer is not None and answer.is_error and (answer.error not in CONFLICTS or expected.doubt(answer)):
        with suppress(TimeoutError):
            async with asyncio.timeout(_REFUSED_S):
                while answer is not None and answer.is_error and len(frames) < 2:
                    frames = [*frames, *await exchange.came()]
                    frame, answer = expected.best(frames)
    doubt = "" if answer is None else expected.doubt(answer)
    if doubt:
        raise StoreUnavailable(expected.subject, doubt)
    return frame
