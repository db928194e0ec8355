"""`Client`: the loop's way to NATS, over one connection at a time that is opened anew whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from eventjet.calls import called
from eventjet.codec.envelope import RawRecord
from eventjet.codec.reasons import reason_of, traceback_of
from eventjet.errors import (
    ApiRefused,
    ConnectionClosed,
    Forbidden,
    NoResponders,
    StoreError,
    StoreUnavailable,
    StreamMissing,
    Unauthorized,
    Unreachable,
    UsageError,
)
from eventjet.loop_guard import LoopGuard
from eventjet.nats.answers import PROBE, Answerers, ExpectedAnswer
from eventjet.nats.api import CONFLICTS, LAG_S, STATUS, Request, call, is_page, reading_records
from eventjet.nats.dial import check_files
from eventjet.nats.endpoint import Endpoint, is_file
from eventjet.nats.loop_connection import LoopConnection
from eventjet.nats.open_request import LOOK_S, OpenRequest, stood_still_s
from eventjet.nats.protocol import Frame, nobody_listens
from eventjet.nats.requirements import check_server
from eventjet.observability import logs
from eventjet.settings import Settings

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 3.0
"""For each server of the cluster."""
_PAUSE_S = 0.2
_INBOX = re.compile(rb"[^\x00-\x20\x7f-\xff.*>]+(\.[^\x00-\x20\x7f-\xff.*>]+)+")
"""A subject of several tokens in ASCII, without wildcards: what a client makes for its answers."""
_INBOX_MAX = 1_000
"""Bytes of one."""
_ROOM_PAUSE_S = 0.001
_REFUSED_S = 0.25
"""So long after an error that refuses a publish an acknowledgement is waited for: no error says whose it is."""


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
    client = Client(replace(Endpoint.of(settings), shuffle=True), settings.request_timeout_s)
    where = f"The NATS server at {', '.join(client.endpoint.servers)}"
    try:
        check_server(where, await _connected(client))
        await _check_jetstream(where, client)
    except BaseException as error:
        await client.close()
        if not isinstance(error, Unauthorized):
            raise
        remedy = (
            "Set EVENTJET_CREDENTIALS, EVENTJET_NKEY, EVENTJET_USER and EVENTJET_PASSWORD, or EVENTJET_TOKEN; "
            "EVENTJET_TLS_CERT and EVENTJET_TLS_KEY where it asks for a certificate."
        )
        raise Unreachable(where, f"it refused the credentials ({error.reason})", remedy) from None
    return client


@asynccontextmanager
async def connected(settings: Settings) -> AsyncGenerator[Client]:
    """What `connect` gives, closed on the way out."""
    client = await connect(settings)
    try:
        yield client
    finally:
        await client.close()


async def _connected(client: Client) -> dict[str, Any]:
    """The server's INFO; one that is just starting is asked twice."""
    try:
        return await client.connect()
    except Unreachable:
        await asyncio.sleep(_PAUSE_S)
        return await client.connect()


async def _check_jetstream(where: str, client: Client) -> None:
    try:
        client.domain = str((await client.api("INFO")).get("domain", ""))
    except Forbidden:
        return  # credentials without this right may still append and read
    except (StoreUnavailable, ApiRefused, Unreachable) as error:
        if type(error.__cause__) is Forbidden:
            raise error.__cause__ from None  # of the inbox: no answer would ever come
        choosing = " In a cluster that is choosing the leader of its JetStream, try again in some seconds."
        raise Unreachable(
            f"JetStream on {where[0].lower()}{where[1:]}",
            f"it is not available ({error})",
            "Start the server with `-js`, or with a `jetstream { store_dir: … sync_interval: always }` block."
            + (choosing if len(client.endpoint.servers) > 1 else ""),
        ) from None


@dataclass(slots=True, eq=False)
class Listening:
    """One subscription, which outlives connections."""

    subject: str
    heard: Callable[[Frame], object]
    queue: str = ""
    sid: bytes = b""
    """Of the connection there is."""


class Client:
    """For any number of tasks of one loop. Every wait ends: by an answer, a violation, a lost connection or in time.

    Nothing is opened before it is first used. Between two connections, requests wait for the next one, for as long as
    they may take.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        """How long a request may take unless it sets a time of its own."""
        self.on_lost: list[Callable[[], object]] = []
        """Called when the connection is lost: what was known of the log may be of another past."""
        self.domain: str | None = None
        """The JetStream domain of what answers this account's API, as it has told; None where it was not asked.

        That may be another than the connected server's: a leaf node can have one of its own for other accounts alone.
        """
        self.answerers = Answerers()
        """Who else answers what this client publishes."""
        self.on_denied: list[Callable[[Forbidden], object]] = []
        """Called for what the server denies that nobody waits for: an answer, or a subscription."""
        self._connection: LoopConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._fault: Exception | None = None
        self._opened_at = 0.0
        """When the last connection was made, by the loop's clock."""
        self._listeners: list[Listening] = []
        self._closed = False
        self.guard = LoopGuard()

    async def connect(self) -> dict[str, Any]:
        """Connect at once; the server's INFO. Raises what `NatsConnection.open` raises."""
        self.guard.check()
        timeout_s = _CONNECT_TIMEOUT_S * (len(self.endpoint.servers) + len(self.endpoint.discovered))
        connection = await LoopConnection.open(self.endpoint, timeout_s, self._ended)
        self._connection = connection
        connection.on_denied = self._denied
        self._opened_at = asyncio.get_running_loop().time()
        for one in self._listeners:
            one.sid = connection.subscribe(one.subject, one.heard, one.queue)
        return connection.info

    def check_open(self) -> None:
        """Raise `ConnectionClosed` after `close`, and `UsageError` in another loop than that which connected."""
        self.guard.check()
        if self._closed:
            raise ConnectionClosed

    async def close(self) -> None:
        """End the connection and all that waits for it; any number of times."""
        self.guard.check()
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.close(ConnectionClosed())

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
        self.check_open()
        subjects = {subject, *(each[0] for each in before)} if before else (subject,)
        wait_s = timeout_s or self.timeout_s
        until = asyncio.get_running_loop().time() + wait_s
        connection = self._connection
        if connection is None or not connection.has_room:
            connection = await self._usable(subject, until)
        expected = self._expected(connection, stream, subject, 1 + len(before)) if stream else None
        exchange = connection.exchange(subjects, wait_s, until, expected and expected.accepts)
        try:
            for each in before:
                connection.publish(*each)
                if not connection.has_room:
                    await self._usable(subject, until)
            connection.publish(subject, payload, headers, exchange)
            frames = await exchange.came()
            frame = frames[0] if expected is None else await _answer_of_stream(exchange, expected, frames)
        except StoreUnavailable as error:
            if type(error) is not StoreUnavailable or expected is None or not expected.stranger:
                raise
            raise StoreUnavailable(error.what, f"{error.reason}; {expected.stranger} answered") from None
        finally:
            connection.forget(exchange)
        if nobody_listens(frame):
            raise NoResponders(subject)
        return frame

    def probe(self, stream: str, subject: str) -> None:
        """Ask who answers a publish there; nobody stores it, and `answerers` names who is not the stream.

        Waits for nothing, not even for the permission, without which nobody is asked.
        """
        connection = self._connection
        if connection is not None and connection.has_room:
            expected = self._expected(connection, stream, subject, 1)
            exchange = connection.exchange((subject,), self.timeout_s, accepts=expected.accepts)
            connection.publish(subject, b"", PROBE, exchange)
            connection.forget(exchange)

    def _expected(self, connection: LoopConnection, stream: str, subject: str, messages: int) -> ExpectedAnswer:
        domain = connection.domain if self.domain is None else self.domain
        return ExpectedAnswer(stream, subject, messages, domain, self.answerers)

    async def stream(self, request: Request[Any]) -> AsyncGenerator[list[Frame]]:
        """The parts of a long answer as they come, for as long as whoever asks wants more; raises as `request`."""
        self.check_open()
        connection = await self._usable(request.subject, asyncio.get_running_loop().time() + self.timeout_s)
        exchange = connection.exchange((request.subject,), self.timeout_s)
        try:
            connection.publish(request.subject, request.payload, request.headers, exchange)
            while True:
                frames = await exchange.came()
                if nobody_listens(frames[-1]):
                    raise NoResponders(request.subject)
                yield frames
        finally:
            connection.forget(exchange)

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

    async def listen(self, subject: str, heard: Callable[[bytes], object]) -> None:
        """Have `heard` called with each payload on a subject, from now on and over every later connection.

        Messages are lost while there is none, and a subscription that the server denies only stays silent.
        Raises `ConnectionClosed` after `close`.
        """
        await self.serve(subject, lambda frame: heard(frame[4]))

    async def serve(self, subject: str, heard: Callable[[Frame], object], queue: str = "") -> Listening:
        """As `listen`, with whole messages, and as a member of a queue group where one is named."""
        self.check_open()
        one = Listening(subject, heard, queue)
        self._listeners.append(one)
        if self._connection is not None and self._connection.usable:
            one.sid = self._connection.subscribe(subject, heard, queue)
        return one

    def publish(self, subject: str, payload: bytes, headers: bytes = b"") -> None:
        """Send one message and wait for nothing; it is lost where there is no connection."""
        if self._connection is not None and self._connection.usable:
            self._connection.publish(subject, payload, headers)

    def may_answer(self, reply: bytes) -> bool:
        """Whether an answer may go to the reply subject of a request, which whoever asks chooses freely: to an inbox of
        callers, never to this client's own, whose messages it believes to be the server's.

        A request from another account comes with a reply below `_R_.`, which the server makes and takes from no client.
        """
        if len(reply) > _INBOX_MAX or not _INBOX.fullmatch(reply):
            return False
        if self._connection is not None and self._connection.is_own_inbox(reply):
            return False
        return reply.startswith((b"_R_.", *(f"{prefix}.".encode() for prefix in self.endpoint.caller_inboxes)))

    async def unsubscribe(self, served: Collection[Listening]) -> None:
        """Hear nothing of these any more; returns when the server knows."""
        for one in served:
            self._listeners.remove(one)
            if self._connection is not None and self._connection.usable:
                self._connection.unsubscribe(one.sid)
        with suppress(StoreError, ApiRefused):
            await self.api("INFO")  # answered after what was sent before it

    # The connection.

    async def _usable(self, what: str, until: float) -> LoopConnection:
        """A connection that takes more; raises `StoreUnavailable` when there is none in time."""
        loop = asyncio.get_running_loop()
        look_s = min(LOOK_S, max(0.0, until - loop.time()) / 8)
        while not self._closed:
            connection = self._connection
            if connection is not None and connection.has_room:
                return connection
            is_full = connection is not None and connection.usable
            before = loop.time()
            if before >= until:
                reason = "the connection takes nothing" if is_full else "there is no connection"
                raise StoreUnavailable(what, f"{reason}{f' ({self._fault})' if self._fault else ''}")
            pause_s = _ROOM_PAUSE_S if is_full else min(look_s, until - before)
            if is_full:
                await asyncio.sleep(pause_s)
            else:
                # Not `wait_for`: whoever gives up must not end the opening, which others wait for too.
                await asyncio.wait({self._opened()}, timeout=pause_s)
            until += stood_still_s(before + pause_s)
        raise ConnectionClosed

    def _opened(self) -> asyncio.Task[None]:
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        return self._opening

    async def _open(self) -> None:
        """Connect, trying for as long as it takes, and not more often where the server ends each connection at once."""
        await asyncio.sleep(self._opened_at + _PAUSE_S - asyncio.get_running_loop().time())
        while True:
            try:
                await called(self.connect(), "What opens a connection")
                self._fault = None
                return
            except Exception as error:  # noqa: BLE001 - nobody else would open one again, whatever it is
                if not isinstance(error, (StoreError, Unreachable, UsageError)) and repr(error) != repr(self._fault):
                    logs.NO_CONNECTION.tell(_log, reason=reason_of(error), trace=f"\n{traceback_of(error)}")
                self._fault = error
                await asyncio.sleep(_PAUSE_S)

    def _denied(self, fault: Forbidden) -> None:
        for tell in self.on_denied:
            tell(fault)

    def _ended(self, connection: LoopConnection) -> None:
        self.endpoint = self.endpoint.with_discovered(connection.info.get("connect_urls") or ())
        if not self._closed:
            for forget in self.on_lost:
                forget()
            self._opened()


async def _answer_of_stream(exchange: OpenRequest, expected: ExpectedAnswer, frames: list[Frame]) -> Frame:
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
