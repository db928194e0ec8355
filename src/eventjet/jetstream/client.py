"""`Client`: JetStream over the one connection of an application's loop; `connect` opens it and checks the server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from eventjet.codec.headers import RawRecord
from eventjet.codec.subjects import SERVER_MESSAGE_MAX
from eventjet.errors import (
    ApiRefused,
    Forbidden,
    NoResponders,
    SingleResponse,
    StoreError,
    StoreUnavailable,
    Unauthorized,
    Unreachable,
    UsageError,
)
from eventjet.jetstream.answers import PROBE, Answerers, ExpectedAnswer
from eventjet.jetstream.api import (
    CONFLICTS,
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
from eventjet.nats.client import LoopClient, Message, NatsClient, given_endpoint
from eventjet.nats.dial import login, tls_context
from eventjet.nats.endpoint import Endpoint, is_file
from eventjet.nats.exchange import Exchange
from eventjet.nats.protocol import Frame, nobody_listens
from eventjet.settings import Settings

T = TypeVar("T")

MINIMUM_SERVER = (2, 14, 4)
"""Atomic batches came with 2.12; distinct expectations in one batch are right from 2.14.4 on (nats-server #8376)."""
RECOMMENDED_SERVER = (2, 15, 1)
"""The version of the tests. From 2.15 on several replicas sync once for each entry of their Raft log (#8447)."""
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
_END_S, _END_AGAIN_S = 0.5, 2.0
"""How long the end of a page may take the first time, and each time that it is asked for again."""
_REFUSED_S = 0.25
"""How long an acknowledgement is waited for after an error that refuses a publish: no error says whose it is."""


async def connect(settings: Settings, nats: NatsClient | None = None) -> Client:
    """Return a connected client, by the settings or over an open client of nats-py, which stays its owner's.

    It checks the credentials, the server's version, the size of its messages, and that JetStream is on. Raises
    `Unreachable`, and `UsageError` for files that cannot be used, and for a client that is closed, draining or of
    another loop.
    """
    if nats is not None:
        client = Client(given_endpoint(nats, settings), settings.request_timeout_s, nats)
    else:
        check_settings(settings)
        client = Client(Endpoint.of(settings), settings.request_timeout_s)
    where = f"The NATS server at {', '.join(client.endpoint.servers)}"
    try:
        client.check_server(where, await client.connect())
        await _check_jetstream(where, client)
    except BaseException as error:
        await client.close()
        if not isinstance(error, Unauthorized):
            raise
        raise Unreachable(where, f"it refused the credentials ({error.reason})", _CREDENTIALS) from None
    return client


@asynccontextmanager
async def connected(settings: Settings) -> AsyncGenerator[Client]:
    """Connect, and close the client at the end of the block."""
    client = await connect(settings)
    try:
        yield client
    finally:
        await client.close()


def check_settings(settings: Settings) -> None:
    """Raise `Unreachable` or `UsageError` for files that are not there or cannot be used."""
    for name in ("credentials", "nkey", "tls_ca", "tls_cert", "tls_key"):
        path: Path | None = getattr(settings, name)
        if path is not None and not is_file(path):
            # The value is not shown: people put the seed itself where its file belongs.
            what = f"The file of EVENTJET_{name.upper()}"
            raise Unreachable(what, "it does not exist", "Give the path of a file that is there.")
    endpoint = Endpoint.of(settings)
    # Files of no use are a fault also where no server needs them.
    if endpoint.tls_ca or endpoint.tls_cert or endpoint.tls_key:
        tls_context(endpoint)
    if endpoint.signature_cb is None:
        login(endpoint, "")
    if endpoint.is_websocket and find_spec("aiohttp") is None:
        raise UsageError("A WebSocket takes aiohttp, which is not installed: pip install 'eventjet[websocket]'.")


async def _check_jetstream(where: str, client: Client) -> None:
    try:
        client.domain = str((await client.api("INFO")).get("domain", ""))
    except Forbidden:
        if client.unfit is not None:
            raise client.unfit from None  # no answer would ever come
        # Else credentials without this right may still append and read.
    except (StoreUnavailable, ApiRefused, Unreachable) as error:
        if client.unfit is not None:
            raise client.unfit from None
        choosing = " In a cluster that is choosing the leader of its JetStream, try again in some seconds."
        is_elsewhere = client.endpoint.is_elsewhere
        below = f" below {client.endpoint.jetstream_prefix}" if is_elsewhere else ""
        raise Unreachable(
            f"JetStream{below} on {where[0].lower()}{where[1:]}",
            f"it is not available ({error})",
            (_NO_DOMAIN if is_elsewhere else _NO_JETSTREAM) + (choosing if len(client.endpoint.servers) > 1 else ""),
        ) from None


class Client(LoopClient):
    """JetStream over one connection of a loop: a request raises what its answer means."""

    def __init__(self, endpoint: Endpoint, timeout_s: float, nats: NatsClient | None = None) -> None:
        super().__init__(endpoint, timeout_s, nats)
        self.domain: str | None = None
        """The JetStream domain of what answers this account's API; None where it was not asked.

        It may be another than the connected server's: a leaf node can have a JetStream of its own for other accounts.
        """
        self.answerers = Answerers()
        """Who else answers what this client publishes."""

    def check_server(self, where: str, greeting: Mapping[str, Any]) -> None:
        check_server(where, greeting)

    async def ask(self, request: Request[T], timeout_s: float | None = None) -> T:
        """Return the answer to a request; raises what it means, `StoreUnavailable`, and `Forbidden`."""
        frame = await self.request(request.subject, request.payload, request.headers, timeout_s, stream=request.stream)
        return request.parse(frame)

    async def api(self, subject: str, body: object = None) -> dict[str, Any]:
        """Make a JetStream request in JSON, `subject` without `$JS.API.`; raises `ApiRefused` for its `error`."""
        return await self.ask(call(subject, body))

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        headers: bytes = b"",
        timeout_s: float | None = None,
        before: Sequence[Message] = (),
        stream: str = "",
    ) -> Frame:
        """Publish, and wait for one answer; the messages of `before` go before it, and belong to the same batch.

        What is to be stored names its `stream`: answers of others are passed over, and one that may be another's counts
        as none, so it raises `StoreUnavailable` as well.
        """
        messages, expected = [*before, (subject, payload, headers)], None
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        if stream:
            if self.domain is None:
                await self.ready(subject, wait_s)
            expected = self._expected(stream, subject, len(messages))
        exchange = await self.begin(messages, wait_s, expected and expected.accepts)
        try:
            frames = await exchange.came()
            frame = frames[0] if expected is None else await _answer_of_stream(exchange, expected, frames)
        except StoreUnavailable as error:
            if type(error) is not StoreUnavailable or expected is None or not expected.other:
                raise
            raise StoreUnavailable(error.what, f"{error.reason}; {expected.other} answered") from None
        finally:
            self.forget(exchange)
        if nobody_listens(frame):
            raise NoResponders(self.endpoint.routed(subject))
        return frame

    def probe(self, stream: str, subject: str) -> None:
        """Ask who answers a publish to a subject; nobody stores it, and `answerers` names who is not the stream.

        It waits for nothing, not even for the permission, without which nobody is asked.
        """
        self.try_request((subject, b"", PROBE), self._expected(stream, subject, 1).accepts)

    async def stream(self, request: Request[Any]) -> AsyncGenerator[list[Frame]]:
        """Yield the parts of a long answer as they come, until the caller stops; raises as `request`."""
        received = 0
        exchange = await self.begin([(request.subject, request.payload, request.headers)], self.timeout_s)
        try:
            while True:
                frames = await exchange.came()
                if nobody_listens(frames[-1]):
                    raise NoResponders(self.endpoint.routed(request.subject))
                received += len(frames)
                yield frames
        except StoreUnavailable as late:
            if received == 1 and type(late) is StoreUnavailable:
                await self.check_pages(request)
            raise
        finally:
            self.forget(exchange)

    async def records(self, stream: str, subject: str, limit: int | None = None) -> list[RawRecord]:
        """Return all records whose subject matches: see `reading_records`."""
        return await self.run(reading_records(stream, subject, limit))

    async def values(self, bucket: str, keys: str, limit: int | None = None) -> list[RawRecord]:
        """Return the values of all keys of a bucket that match, in a few requests: see `reading_values`."""
        return await self.run(reading_values(bucket, keys, limit))

    async def run(self, conversation: Conversation[T], timeout_s: float | None = None) -> T:
        """Drive a conversation to its end and return what it returns."""
        answer: Any = None
        error: Exception | None = None
        try:
            while True:
                request = conversation.send(answer) if error is None else conversation.throw(error)
                answer = error = None
                try:
                    if request is None:
                        await asyncio.sleep(LAG_S)
                    else:
                        answer = await (self._page(request) if is_page(request) else self.ask(request, timeout_s))
                except StoreError as raised:
                    error = raised
        except StopIteration as ended:
            return ended.value

    async def _page(self, request: Request[Any]) -> list[Frame]:
        """Return all messages of a long answer, the last of which is the status that ends it."""
        page: list[Frame] = []
        async with aclosing(self.stream(request)) as parts:
            async for part in parts:
                page += part
                if is_status(part[-1]):
                    break
        return page

    async def check_pages(self, request: Request[Any]) -> None:
        """Raise `SingleResponse` where a page brings its first message and never its end, however often it is asked.

        Nothing is raised where nobody answers, or these credentials may not ask.
        """
        brief = shortened(request)
        for wait_s in (_END_S, *[_END_AGAIN_S] * 3):
            received: list[Frame] = []
            try:
                exchange = await self.begin([(brief.subject, brief.payload, brief.headers)], self.timeout_s)
                try:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            while len(received) < 2:
                                received += await exchange.came()
                finally:
                    self.forget(exchange)
            except (StoreUnavailable, Forbidden):
                return
            if len(received) != 1 or is_status(received[0]):
                return
        raise SingleResponse(self.endpoint.routed(brief.subject))

    def _expected(self, stream: str, subject: str, messages: int) -> ExpectedAnswer:
        domain = self.domain
        if domain is None and self.info.get("jetstream") and not self.endpoint.is_elsewhere:
            domain = str(self.info.get("domain", ""))
        return ExpectedAnswer(stream, subject, messages, domain, self.answerers)


async def _answer_of_stream(exchange: Exchange, expected: ExpectedAnswer, frames: list[Frame]) -> Frame:
    """Return an acknowledgement if one comes, else an error; raises `StoreUnavailable` for what may be another's."""
    frame, answer = expected.best(frames)
    # A conflict is compared with the log anyway, whoever reports it; where two answer, both are heard.
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


# What eventjet needs of a server, by its own greeting. PURE.


def version_of(info: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of a server's version, of 2.15.0-RC.1 those of 2.15.0; empty where it names none."""
    return tuple(map(int, re.findall(r"\d+", str(info.get("version", "")).partition("-")[0])))


def shown_version(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def check_server(where: str, info: Mapping[str, Any]) -> None:
    """Raise `Unreachable` for a server that is too old, or takes too small messages."""
    check_version(where, info)
    if info.get("max_payload", 0) < SERVER_MESSAGE_MAX:
        raise Unreachable(
            where,
            f"it takes messages of {info.get('max_payload', 0):,} bytes, and events may have {SERVER_MESSAGE_MAX:,}",
            "Set `max_payload: 1MB` in its configuration.",
        )


def check_version(where: str, info: Mapping[str, Any]) -> None:
    """Raise `Unreachable` for a server that is too old."""
    if version_of(info) < MINIMUM_SERVER:
        needed = shown_version(MINIMUM_SERVER)
        raise Unreachable(
            where,
            f"it is version {info.get('version', '')}, and eventjet needs {needed}: older ones reject or misjudge "
            "atomic batches",
            f"Upgrade nats-server to {needed} or newer.",
        )
