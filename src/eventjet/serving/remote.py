"""`RemoteApp`: call served decisions over NATS with their types, without the stream and without a database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import orjson

from eventjet.codec.commands import arguments_of
from eventjet.codec.headers import TRACEPARENT, context_headers, header, header_block, number_of
from eventjet.codec.reasons import faults_of
from eventjet.domain.aggregate import AggregateType, aggregate_info
from eventjet.domain.decision import Served
from eventjet.domain.identity import encode_id
from eventjet.domain.recorded import NO_METADATA, Metadata, current_metadata, merge
from eventjet.domain.subscription import shown_name
from eventjet.errors import (
    CommandFailed,
    CommandReused,
    NobodyServes,
    NoResponders,
    NotUnique,
    StoreUnavailable,
    UsageError,
)
from eventjet.jetstream.client import Client
from eventjet.nats.client import NatsClient, given_endpoint
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import Frame, nobody_listens
from eventjet.observability import spans, tracing
from eventjet.observability.tracing import current_traceparent
from eventjet.serving.service import (
    DOMAIN,
    ERROR,
    ERROR_CODE,
    INTERNAL,
    REUSED,
    TAKEN,
    UNAVAILABLE,
    UNKNOWN,
    command_subject,
)
from eventjet.settings import Settings

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")

_TRIES = 4
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Done:
    """The answer of a service to a command that was executed."""

    position: int
    version: int
    token: str
    """Give it to `Jet.caught_up` before reading a read model, so that it includes the recorded events."""
    events: int
    """Number of recorded events."""


class Remote(Generic[S, E]):
    """The served decisions of one aggregate type, called over NATS with the types of the decisions themselves."""

    def __init__(
        self,
        client: Client,
        app: str,
        aggregate: Any,
        served: Sequence[Served],
        command_id: str | None = None,
        metadata: Metadata = NO_METADATA,
    ) -> None:
        self._client = client
        self._app = app
        self._aggregate = aggregate
        self._served = served
        self._command_id = command_id
        self._metadata = metadata

    def command(self, command_id: str, /, *, metadata: Metadata = NO_METADATA) -> Remote[S, E]:
        """Return an idempotent command: a request without an answer is sent again under the same id, and executed once.

        Raises `UsageError` without an id.
        """
        if command_id is None:  # pyright: ignore[reportUnnecessaryComparison]  asked again, it would be done twice
            raise UsageError("A command over the wire has no id. Give it one, or call the repository's own `execute`.")
        context_headers(command_id, metadata)  # an invalid id or metadata is refused before the command is sent
        return Remote(self._client, self._app, self._aggregate, self._served, command_id, metadata)

    async def execute(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Done:
        """Execute a decision in a service of the app, as `Repository.execute` does in this process.

        Raises the domain errors that the decision is served with; `CommandReused` for an id of another request;
        `NotUnique`, without the holder, for a value that another aggregate has; `CommandFailed` for any other error
        that the service answers; `NobodyServes` if no service listens; `StoreUnavailable` if none answers, after which
        only a command with an id may be sent again; and `UsageError` for a decision that is not served, or arguments
        that do not fit.
        """
        self._client.check_open()
        served = next(
            (served for served in self._served if (served.aggregate, served.decide) == (self._aggregate, decide)), None
        )
        if served is None:
            raise UsageError(f"{shown_name(decide)} is not served. List it in App(served=[…]).")
        try:
            body = arguments_of(served.decide).encode(args, kwargs)
        except (TypeError, ValueError) as error:
            raise UsageError(f"These arguments do not fit {served.name}: {faults_of(error)}") from None
        name = aggregate_info(served.aggregate).name
        subject = command_subject(self._app, name, served.name, encode_id(aggregate_id))
        try:
            labels = {"eventjet.aggregate": name, "eventjet.decision": served.name}
            with tracing.span(spans.REQUEST, f"{name}.{served.name}", labels):
                status, kind, answer = await self._request(subject, body)
        except NoResponders:
            raise NobodyServes(subject, self._app, f"{name}.{served.name}") from None
        if not status:
            return Done(answer["position"], answer["version"], answer["token"], answer["events"])
        detail = str(answer.get("detail", ""))
        error_type = next(
            (error_type for error_type in served.errors if status == DOMAIN and error_type.__name__ == kind), None
        )
        if error_type is not None:
            raise error_type(detail)
        if kind == NotUnique.__name__ and answer.keys() >= set(TAKEN):
            raise NotUnique(**{fact: answer[fact] for fact in TAKEN}, holder=None)
        if kind == CommandReused.__name__ and answer.keys() >= set(REUSED):
            facts = {fact: answer[fact] for fact in REUSED}
            raise CommandReused(
                **facts, arguments=answer.get("arguments", ())
            )  # a service of an earlier release has none
        raise CommandFailed(kind, status, detail)

    async def _request(self, subject: str, body: bytes) -> tuple[int, str, dict[str, Any]]:
        """Send a request, up to `_TRIES` times if it has a command id; return status, type of the error and answer."""
        tries = _TRIES if self._command_id is not None else 1
        pairs = context_headers(self._command_id, merge(current_metadata(), self._metadata))
        traceparent = current_traceparent()
        if traceparent is not None:
            pairs = [*(pair for pair in pairs if pair[0] != TRACEPARENT), (TRACEPARENT, traceparent)]
        headers = header_block(pairs) if pairs else b""
        others: list[bytes] = []

        def accepts(frame: Frame) -> bool:
            is_answer = nobody_listens(frame) or _is_answer(frame)
            if not is_answer:
                others.append(frame[4][:80])
            return is_answer

        for remaining in reversed(range(tries)):
            try:
                frame = await self._client.request(subject, body, headers, accepts=accepts)
            except StoreUnavailable as error:
                if not remaining and others and type(error) is StoreUnavailable:
                    raise StoreUnavailable(error.what, f"{error.reason}; only {others[0]!r} answered") from None
                if not remaining:
                    raise
            else:
                status = 0
                if header(frame[3], ERROR_CODE) is not None:
                    status = number_of(frame[3], ERROR_CODE) or INTERNAL
                if not remaining or status not in (UNAVAILABLE, UNKNOWN):
                    return status, header(frame[3], ERROR) or "", _object_in(frame[4])
            await asyncio.sleep(_PAUSE_S)
        raise AssertionError


def _is_answer(frame: Frame) -> bool:
    """Return whether a message is a service's answer: others hear requests, too, and a stream acknowledges them."""
    if header(frame[3], ERROR_CODE) is not None:
        return True
    return _object_in(frame[4]).keys() >= {"position", "version", "token", "events"}


def _object_in(body: bytes) -> dict[str, Any]:
    """Return the JSON object in an answer; empty for anything else, as other libraries answer errors."""
    try:
        answer: Any = orjson.loads(body)
    except ValueError:
        return {}
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}


class RemoteApp:
    """A connection to the services of one app; made by `App.client`."""

    def __init__(self, client: Client, app: str, served: Sequence[Served]) -> None:
        self._client = client
        self._app = app
        self._served = served

    def repository(self, aggregate: AggregateType[S, E], /) -> Remote[S, E]:
        """Return the caller of one aggregate type's served decisions."""
        return Remote(self._client, self._app, aggregate, self._served)


@asynccontextmanager
async def open_remote(
    app: str, served: Sequence[Served], settings: Settings, nats: NatsClient | None = None
) -> AsyncGenerator[RemoteApp]:
    """Connect to the NATS server, without a look at the stream, or use an open client.

    Raises `Unreachable` and `UsageError`, also for an inbox to which no service answers.
    """
    endpoint = Endpoint.of(settings).with_name("eventjet client") if nats is None else given_endpoint(nats, settings)
    if not f"{endpoint.inbox_prefix}.".startswith(tuple(f"{prefix}." for prefix in endpoint.caller_inboxes)):
        raise UsageError(
            f"Answers would come in below {endpoint.inbox_prefix}, where no service sends them. Set "
            f"EVENTJET_INBOX_PREFIX to {endpoint.caller_inboxes[-1]}, or name the prefix in EVENTJET_CALLER_INBOXES "
            "here and where the service runs."
        )
    client = Client(endpoint, settings.request_timeout_s, nats)
    try:
        await client.connect()
        yield RemoteApp(client, app, served)
    finally:
        await client.close()
