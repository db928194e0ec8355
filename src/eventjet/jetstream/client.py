"""`Client`: JetStream over the connection of an application's event loop; `connect` opens it and checks the server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

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
from eventjet.jetstream.api import CONFLICTS, LAG_S, Conversation, Request, call, is_page, is_status, shortened
from eventjet.nats.client import LoopClient, Message, NatsClient, given_endpoint
from eventjet.nats.endpoint import Endpoint, is_file
from eventjet.nats.exchange import Exchange
from eventjet.nats.login import login, login_remedy, tls_context
from eventjet.nats.protocol import Frame, nobody_listens
from eventjet.settings import Settings

T = TypeVar("T")

MINIMUM_SERVER = (2, 14, 4)
"""The oldest usable server version.

Atomic batches came with 2.12; distinct expectations in one batch are checked correctly from 2.14.4 on (nats-server
#8376).
"""
BEFORE_2_15 = (2, 14, 7)
"""The oldest version from which a cluster should go to 2.15, which records moves in another way (ADR-62)."""
RECOMMENDED_SERVER = (2, 15, 1)
"""The version that the tests use. From 2.15 on several replicas sync once for each entry of their Raft log (#8447)."""
_NO_JETSTREAM = (
    "If the log is in the JetStream of another domain, such as that of the hub of a leaf node, set "
    "EVENTJET_JETSTREAM_DOMAIN to its name. Else start the server with `-js`, or with a "
    "`jetstream { store_dir: … sync_interval: always }` block."
)
_NO_DOMAIN = (
    "Set EVENTJET_JETSTREAM_DOMAIN to the `domain` of the JetStream that has the log, or EVENTJET_JETSTREAM_PREFIX to "
    "what this account imports its API as, and see whether the link to its server is up."
)
_NO_DOMAIN_OF_MIRROR = (
    "Set EVENTJET_READ_FROM to the `domain` of the JetStream that has the mirror, or to the URLs of its servers, and "
    "see whether the link to its server is up."
)
_NO_JETSTREAM_OF_MIRROR = "Set EVENTJET_READ_FROM to servers with JetStream, or start that server with `-js`."
_NO_LEADER = (
    "The servers of a cluster choose the leader of their JetStream once all of them run, and after their first start "
    "once more than half do. Start those that do not run, and try again in some seconds."
)
_ELECTION_POLL_S = 0.2
_END_S, _END_AGAIN_S = 0.5, 2.0
"""How long the end of a page may take at the first request, and at each further one."""
_REFUSED_S = 0.25
"""How long an acknowledgement may still follow an error that refuses a publish: an error may be another stream's."""


async def connect(settings: Settings, nats: NatsClient | None = None) -> Client:
    """Return a connected client.

    It connects by the settings, or uses `nats`, an open client of nats-py, which its owner closes. The credentials, the
    server's version and message size, and that JetStream is on are checked. Raises `Unreachable`, and `UsageError` for
    files that cannot be used, and for a `nats` that is closed, draining or of another loop.
    """
    if nats is not None:
        client = Client(given_endpoint(nats, settings), settings.request_timeout_s, nats)
    else:
        check_settings(settings)
        client = Client(Endpoint.of(settings), settings.request_timeout_s)
    where = f"The NATS server at {', '.join(client.endpoint.servers)}"
    try:
        client.check_server(where, await client.connect())
        await check_jetstream(where, client)
    except BaseException as error:
        await client.close()
        if not isinstance(error, Unauthorized):
            raise
        remedy = error.remedy or login_remedy(client.endpoint)
        raise Unreachable(where, f"it refused the credentials ({error.reason})", remedy) from None
    return client


@asynccontextmanager
async def connected(settings: Settings) -> AsyncGenerator[Client]:
    """Connect by the settings, and close the client at the end of the block; raises as `connect`."""
    client = await connect(settings)
    try:
        yield client
    finally:
        await client.close()


def check_settings(settings: Settings) -> None:
    """Raise `Unreachable` if a file of the settings does not exist, `UsageError` if the settings cannot be used."""
    for name in ("credentials", "nkey", "tls_ca", "tls_cert", "tls_key"):
        path: Path | None = getattr(settings, name)
        if path is not None and not is_file(path):
            # The value is not shown: people put the seed itself where its file belongs.
            what = f"The file of EVENTJET_{name.upper()}"
            raise Unreachable(what, "it does not exist", "Give the path of a file that is there.")
    endpoint = Endpoint.of(settings)
    # Unusable files are an error even where no server asks for them.
    if endpoint.tls_ca or endpoint.tls_cert or endpoint.tls_key:
        tls_context(endpoint)
    if endpoint.signature_cb is None:
        login(endpoint, "")
    if endpoint.is_websocket and find_spec("aiohttp") is None:
        raise UsageError("A WebSocket takes aiohttp, which is not installed: pip install 'eventjet[websocket]'.")


async def check_jetstream(where: str, client: Client, election_s: float = 0.0) -> None:
    """Learn the domain of the JetStream; raises `Unreachable` if that is not available.

    A cluster gets `election_s` to choose the leader of its JetStream, which takes it some seconds when it starts.
    """
    began, endpoint = time.monotonic(), client.endpoint
    while True:
        try:
            await client.learn_domain()
        except Forbidden:
            if client.unfit is not None:
                raise client.unfit from None  # no answer would ever come
            # Otherwise credentials without this right may still append and read.
        except (StoreUnavailable, ApiRefused, Unreachable) as error:
            if client.unfit is not None:
                raise client.unfit from None
            may_elect = isinstance(error, StoreUnavailable) and not isinstance(error, NoResponders)
            may_elect = may_elect and bool(endpoint.is_elsewhere or client.info.get("cluster"))
            if may_elect and time.monotonic() - began < election_s:
                await asyncio.sleep(_ELECTION_POLL_S)
                continue
            remedy = _NO_DOMAIN if endpoint.is_elsewhere else _NO_JETSTREAM
            if endpoint.is_of_mirror:
                remedy = _NO_DOMAIN_OF_MIRROR if endpoint.is_elsewhere else _NO_JETSTREAM_OF_MIRROR
            if may_elect:
                remedy = _NO_LEADER + (f" {remedy}" if endpoint.is_elsewhere else "")
            prefix_text = f" below {endpoint.jetstream_prefix}" if endpoint.is_elsewhere else ""
            raise Unreachable(
                f"JetStream{prefix_text} on {where[0].lower()}{where[1:]}", f"it is not available ({error})", remedy
            ) from None
        return


class Client(LoopClient):
    """A JetStream client over one connection of an event loop; a request raises the error that its answer means."""

    def __init__(self, endpoint: Endpoint, timeout_s: float, nats: NatsClient | None = None) -> None:
        super().__init__(endpoint, timeout_s, nats)
        self.domain: str | None = None
        """The domain of the JetStream that answers this account's API; None until `learn_domain`.

        It may be another than the connected server's: a leaf node can have a JetStream of its own for other accounts.
        """
        self.answerers = Answerers()
        """The streams and subscribers that answer this client's publishes, besides the streams that are meant."""

    def check_server(self, where: str, greeting: Mapping[str, Any]) -> None:
        check_server(where, greeting)

    def _check_again(self) -> None:
        super()._check_again()
        # Another server may have a JetStream of another domain, such as that of a mirror that was promoted.
        self._learning = asyncio.ensure_future(self._learn_domain_again())

    async def _learn_domain_again(self) -> None:
        with suppress(StoreError, Unreachable):
            await self.learn_domain()

    async def ask(self, request: Request[T], timeout_s: float | None = None) -> T:
        """Return the answer to a request; raises the error that it means, `StoreUnavailable`, and `Forbidden`."""
        frame = await self.request(request.subject, request.payload, request.headers, timeout_s, stream=request.stream)
        return request.parse(frame)

    async def api(self, subject: str, body: object = None) -> dict[str, Any]:
        """Return the JSON answer to a request on `$JS.API.<subject>`; raises `ApiRefused` for an error in it."""
        return await self.ask(call(subject, body))

    async def learn_domain(self) -> None:
        """Set `domain` from what the API says; raises as `api`."""
        self.domain = str((await self.api("INFO")).get("domain", ""))

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        headers: bytes = b"",
        timeout_s: float | None = None,
        earlier_messages: Sequence[Message] = (),
        stream: str = "",
        batch_size: int | None = None,
        accepts: Callable[[Frame], bool] | None = None,
    ) -> Frame:
        """Publish a message after `earlier_messages`, in one batch with them, and return the one answer to it.

        A message that is to be stored names its `stream`. Then answers of others are ignored, and an answer that may be
        another stream's counts as no answer, so it raises `StoreUnavailable` as well. `batch_size` is how many messages
        the batch has if more of them were sent before. For other messages, `accepts` may tell which answers count.
        """
        messages, expected = [*earlier_messages, (subject, payload, headers)], None
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        if stream:
            if self.domain is None:
                await self.wait_for_room(subject, wait_s)
            expected = self.expected_answer(stream, subject, batch_size or len(messages))
        exchange = await self.begin(messages, wait_s, expected.accepts if expected is not None else accepts)
        try:
            frames = await exchange.next_frames()
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
        """Publish, without waiting, what no stream stores, so that `answerers` learns who answers besides `stream`."""
        self.try_request((subject, b"", PROBE), self.expected_answer(stream, subject).accepts)

    async def stream(self, request: Request[Any], timeout_s: float | None = None) -> AsyncGenerator[list[Frame]]:
        """Yield the parts of an answer of many messages as they arrive, until the caller stops; raises as `request`."""
        received, wait_s = 0, self.timeout_s if timeout_s is None else timeout_s
        exchange = await self.begin([(request.subject, request.payload, request.headers)], wait_s)
        try:
            while True:
                frames = await exchange.next_frames()
                if nobody_listens(frames[-1]):
                    raise NoResponders(self.endpoint.routed(request.subject))
                received += len(frames)
                yield frames
        except StoreUnavailable as error:
            if received == 1 and type(error) is StoreUnavailable:
                await self.check_pages(request)
            raise
        finally:
            self.forget(exchange)

    async def run(self, conversation: Conversation[T], timeout_s: float | None = None) -> T:
        """Send the requests of a conversation and return its result."""
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
                except StoreError as store_error:
                    error = store_error
        except StopIteration as stop:
            return stop.value

    async def _page(self, request: Request[Any]) -> list[Frame]:
        """Return all messages of a page; the last of them is the status that ends the page."""
        page: list[Frame] = []
        async with aclosing(self.stream(request)) as parts:
            async for part in parts:
                page += part
                if is_status(part[-1]):
                    break
        return page

    async def check_pages(self, request: Request[Any]) -> None:
        """Raise `SingleResponse` if each of four requests for a page brings its first message and never its end."""
        short_request = shortened(request)
        for wait_s in (_END_S, *[_END_AGAIN_S] * 3):
            frames: list[Frame] = []
            try:
                exchange = await self.begin(
                    [(short_request.subject, short_request.payload, short_request.headers)], self.timeout_s
                )
                try:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            while len(frames) < 2:
                                frames += await exchange.next_frames()
                finally:
                    self.forget(exchange)
            except (StoreUnavailable, Forbidden):
                return
            if len(frames) != 1 or is_status(frames[0]):
                return
        raise SingleResponse(self.endpoint.routed(short_request.subject))

    def expected_answer(self, stream: str, subject: str, messages: int = 1) -> ExpectedAnswer:
        """Return the answer that a publish to a stream expects."""
        domain = self.domain
        if domain is None and self.info.get("jetstream") and not self.endpoint.is_elsewhere:
            domain = str(self.info.get("domain", ""))
        return ExpectedAnswer(stream, subject, messages, domain, self.answerers)


async def _answer_of_stream(exchange: Exchange, expected: ExpectedAnswer, frames: list[Frame]) -> Frame:
    """Return an acknowledgement, else an error; raises `StoreUnavailable` if it may be another stream's."""
    frame, answer = expected.best(frames)
    # A conflict is compared with the log anyway, whoever reports it; if two streams answer, both are waited for.
    if answer is not None and answer.is_error and (answer.error not in CONFLICTS or expected.doubt(answer)):
        with suppress(TimeoutError):
            async with asyncio.timeout(_REFUSED_S):
                while answer is not None and answer.is_error and len(frames) < 2:
                    frames = [*frames, *await exchange.next_frames()]
                    frame, answer = expected.best(frames)
    doubt = "" if answer is None else expected.doubt(answer)
    if doubt:
        raise StoreUnavailable(expected.subject, doubt)
    return frame


# What eventjet needs of a server, checked by the server's INFO. PURE.


def version_of(info: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the version of a server as numbers, without a suffix such as `-RC.1`; empty if its INFO names none."""
    return tuple(map(int, re.findall(r"\d+", str(info.get("version", "")).partition("-")[0])))


def shown_version(numbers: tuple[int, ...]) -> str:
    """Return a version as text, such as `2.14.4`."""
    return ".".join(map(str, numbers))


def check_server(where: str, info: Mapping[str, Any]) -> None:
    """Raise `Unreachable` for a server that is too old, or whose limit for messages is too small."""
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
        minimum = shown_version(MINIMUM_SERVER)
        raise Unreachable(
            where,
            f"it is version {info.get('version', '')}, and eventjet needs {minimum}: older ones reject or misjudge "
            "atomic batches",
            f"Upgrade nats-server to {minimum} or newer.",
        )
