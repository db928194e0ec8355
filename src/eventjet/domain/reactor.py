"""Declarations of handlers that follow the log: `@reactor`, `@inbox` and `@publication`. PURE.

A reactor is an effect outside the log, at least once for each event and in order for each aggregate. An inbox turns
messages of another stream into commands. A publication translates chosen events to public events for other apps: the
events an app records are its private contract, the events it publishes are a public contract. A worker runs them all.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeAlias, cast
from zlib import crc32

from typing_extensions import TypeVar

from eventjet.domain.aggregate import AggregateType, check_name, event_info, is_count
from eventjet.domain.decision import Committed
from eventjet.domain.quarantined import AggregateKey
from eventjet.domain.recorded import Recorded
from eventjet.domain.subscription import (
    is_called_with,
    is_plain,
    recorded_events_of,
    resolved_hint,
    shown_name,
    union_members,
)
from eventjet.errors import DefinitionError

S = TypeVar("S")
E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)
D = TypeVar("D")
D_co = TypeVar("D_co", covariant=True, default=object)
D_contra = TypeVar("D_contra", contravariant=True, default=object)
P = ParamSpec("P")

Start: TypeAlias = Literal["new", "beginning"] | int
"""The start position of a handler: the end of the log ("new"), its first event ("beginning"), or after a position."""
PARTITIONS_MAX = 64
"""Limit of a reactor's partitions: each partition reads all events of the reactor and skips those of the others."""
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,200}")
_FOREIGN_STREAM = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")
"""What nats-server accepts as the name of a stream."""
_SUBJECT = re.compile(r"(?:(?!>\.)[^\s.]+\.)*[^\s.]+")
"""A subject to listen to: no blank, no empty token, and `>` only as the last one."""
_LISTS = (list, tuple, Sequence)


@dataclass(frozen=True, slots=True)
class Retry:
    """The retry policy of one event: how often it is tried before it is quarantined, and the pauses between.

    ```python
    assert [Retry(tries=4).pause_s(attempt) for attempt in (1, 2, 3)] == [0.2, 0.4, 0.8]
    ```
    """

    tries: int = 8
    first_s: float = 0.2
    """Pause after the first try; each further pause is twice the previous."""
    most_s: float = 30.0
    """The longest pause."""
    timeout_s: float = 60.0
    """How long one try may take; a try that takes longer is cancelled and counts."""
    passing: tuple[type[Exception], ...] = (OSError, TimeoutError)
    """Temporary errors: the event is retried for ever and never quarantined, as when the log does not answer."""
    never: tuple[type[Exception], ...] = ()
    """Permanent errors: the event is quarantined after the first try that raises one, as with `PermanentFailure`."""

    def pause_s(self, attempt: int) -> float:
        """Return the pause in seconds after `attempt` tries."""
        return min(self.most_s, self.first_s * 2.0 ** min(attempt - 1, 20))


class PermanentFailure(Exception):
    """An error to raise in a handler when another try would fail in the same way.

    The event is quarantined at once, with the text of this error as the reason; a reactor with `on_error="stop"` stops.
    Raised by a decision of a process's step or deadline, it quarantines the process instance at once.

    ```python
    @reactor("letters")
    async def letters(event: Recorded[Opened], reaction: Reaction) -> None:
        if not event.data.owner:
            raise PermanentFailure("a letter needs a name")
    ```
    """


class Reacted(Protocol[S, E]):
    """A repository whose command ids are derived from the reactor, the event and a number; see `Repository`."""

    async def execute(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Committed[S, E]:
        """Execute a decision, exactly once over all tries of the event; raises what `Repository.execute` does."""
        ...

    async def load(self, aggregate_id: str, /) -> S:
        """Return the current state."""
        ...


class Reaction(Protocol[D_co]):
    """The second argument of the handler of a `reactor` or an `inbox`, beside its event or message."""

    @property
    def deps(self) -> D_co:
        """The dependencies that `App(deps=…)` opened, such as clients and mailers."""
        ...

    @property
    def key(self) -> str:
        """The idempotency key for external systems, the same on every try of this event."""
        ...

    @property
    def attempt(self) -> int:
        """The number of this try, 1 for the first try of this lease session."""
        ...

    def repository(self, aggregate: AggregateType[S, E], /) -> Reacted[S, E]:
        """Return the repository of an aggregate type, whose commands run exactly once over all tries of the event."""
        ...

    def named(self, name: str) -> Reaction[D_co]:
        """Return a reaction with `name` in its command ids and key, for calls whose order depends on data read."""
        ...


@dataclass(frozen=True, slots=True)
class Reactor(Generic[E_contra, D_contra]):
    """The declaration that `@reactor` makes of a handler."""

    name: str
    handle: Callable[[Recorded[E_contra], Reaction[D_contra]], Coroutine[Any, Any, None]]
    start: Start = "new"
    retry: Retry = field(default_factory=Retry)
    on_error: Literal["quarantine", "stop"] = "quarantine"
    revision: int = 1
    partitions: int = 1
    """The number of cursors among which the aggregates are divided; different workers may lease them."""

    @property
    def events(self) -> tuple[type, ...]:
        """The event classes of its subscription; raises `DefinitionError` if the handler is not annotated with them."""
        return recorded_events_of(self.handle)

    def faults(self, is_known: Callable[[type], bool]) -> list[str]:
        """Return the faults of this declaration in an app that folds the known events, each as a sentence."""
        handle = self.handle
        faults = _handler_faults(self, "event")
        if not is_count(self.revision):
            faults.append(f"its revision is {self.revision!r}; give a whole number, 1 or more")
        if not is_count(self.partitions) or self.partitions > PARTITIONS_MAX:
            faults.append(f"it has {self.partitions!r} partitions; give a whole number, 1 to {PARTITIONS_MAX}")
        try:
            faults += [
                f"{shown_name(handle)} takes {shown_name(event)}, which no aggregate of the app folds; list its "
                "aggregate in `aggregates`"
                for event in self.events
                if not is_known(event)
            ]
        except DefinitionError as error:
            faults += error.faults
        return faults


def _handler_faults(declared: Any, argument: str) -> list[str]:
    """Return the faults of a reactor or an inbox, whose handler takes `argument` and a reaction."""
    handle = declared.handle
    faults = [*start_faults(declared.start), *retry_faults(declared.retry, declared.on_error)]
    if not inspect.iscoroutinefunction(handle):
        faults.append(
            f"{shown_name(handle)} is not an `async def`; call code that blocks in it with `asyncio.to_thread`"
        )
    if not is_called_with(handle, 2):
        faults.append(f"{shown_name(handle)} does not take ({argument}, reaction); take these two, by position")
    return faults


def start_faults(start: Any) -> list[str]:
    """Return the faults of a start position."""
    if isinstance(start, int) and not isinstance(start, bool):
        return [] if start >= 0 else [f"it starts after position {start}; give 0 or more"]
    return [] if start in ("new", "beginning") else [f'it starts at {start!r}; give "new", "beginning" or a position']


def retry_faults(retry: Retry, on_error: Any) -> list[str]:
    """Return the faults of a retry policy and of `on_error`."""
    if not isinstance(retry, Retry):  # pyright: ignore[reportUnnecessaryIsInstance]  who has no checker
        return [f"its retry is {retry!r}; give a Retry(…)"]
    faults: list[str] = []
    if not is_count(retry.tries) or not all(map(_is_span, (retry.first_s, retry.most_s, retry.timeout_s))):
        faults.append(f"its retry is {retry}; give at least one try, and finite seconds above 0")
    for field_name in ("passing", "never"):
        kinds: Any = getattr(retry, field_name)
        if not isinstance(kinds, tuple) or not all(
            isinstance(kind, type) and issubclass(kind, Exception) for kind in cast("tuple[Any, ...]", kinds)
        ):
            faults.append(f"`{field_name}` of its retry is {kinds!r}; give a tuple of exception classes")
    if on_error not in ("quarantine", "stop"):
        faults.append(f'its on_error is {on_error!r}; give "quarantine" or "stop"')
    return faults


def _is_span(seconds: Any) -> bool:
    """Return whether the value is a finite number of seconds above 0."""
    try:
        return isinstance(seconds, int | float) and 0 < float(seconds) < math.inf
    except OverflowError:
        return False


def partition_of(key: AggregateKey, partitions: int) -> int:
    """Return the partition of an aggregate, from 0 on; it is the same in every process and release."""
    return crc32(f"{key[0]}.{key[1]}".encode("utf-8", "surrogatepass")) % partitions


class Reacting(Protocol):
    """A decorator that declares a reactor."""

    def __call__(self, handle: Callable[[Recorded[E], Reaction[D]], Coroutine[Any, Any, None]], /) -> Reactor[E, D]: ...


def reactor(
    name: str,
    /,
    *,
    start: Start = "new",
    retry: Retry | None = None,
    on_error: Literal["quarantine", "stop"] = "quarantine",
    revision: int = 1,
    partitions: int = 1,
) -> Reacting:
    """Declare an async handler of one event, `(event, reaction)`; the event's annotation is its subscription.

    Each event is handled at least once, events of one aggregate in order, and never by a rebuild. An event whose
    handler raises is retried, then quarantined, and later events of its aggregate are blocked behind it;
    `on_error="stop"` stops the reactor instead. `start` is read when `eventjet init` creates the cursor. Raise
    `revision` when older code must not handle another event. `partitions` is the number of cursors among which the
    aggregates are divided; running workers share the cursors. Raises `DefinitionError` without a name.

    ```python
    @reactor("letters")
    async def letters(event: Recorded[Opened], reaction: Reaction[list[str]]) -> None:
        reaction.deps.append(f"welcome {event.data.owner}, {reaction.key}")

    sent: list[str] = []
    handled = await reacted(letters, Opened(owner="ada"), deps=sent)
    assert sent == [f"welcome ada, {handled.key}"]
    ```
    """

    check_name(name, "reactor", "letters")

    def declare(handle: Any, /) -> Reactor[Any, Any]:
        return Reactor(name, handle, start, retry or Retry(), on_error, revision, partitions)

    return declare


@dataclass(frozen=True, slots=True)
class Source:
    """A stream from which the stream of an `inbox` is gathered; by default one of the same account and domain.

    ```python
    assert Source("port", domain="hub").config == {
        "name": "port",
        "external": {"api": "$JS.hub.API", "deliver": ""},
    }
    ```
    """

    stream: str
    subject: str = ""
    """The subject that is gathered from it; empty for everything."""
    domain: str = ""
    """The JetStream domain that has the stream; empty for the inbox's own."""
    api: str = ""
    """For a stream of another account, the prefix under which that account's `$JS.API` is imported."""
    deliver: str = ""
    """For a stream of another account, the prefix of the subjects that are imported to deliver its messages."""

    @property
    def prefix(self) -> str:
        """The prefix of the JetStream API that has the stream; empty for the inbox's own."""
        return f"$JS.{self.domain}.API" if self.domain else self.api

    @property
    def config(self) -> dict[str, Any]:
        """The source as the JetStream API takes it."""
        external = {"external": {"api": self.prefix, "deliver": self.deliver}} if self.prefix else {}
        return {"name": self.stream, **({"filter_subject": self.subject} if self.subject else {}), **external}


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a gathered message was published, as the server notes it in `Nats-Stream-Source`.

    ```python
    @inbox("payments", stream="paid", subject="paid.>", sources=["shop", "market"])
    async def payments(message: Incoming[Deposited], reaction: Reaction) -> None:
        if message.origin is not None and message.origin.stream == "market":
            await reaction.repository(Account).execute(message.id, Account.deposit, message.data.amount)
    ```
    """

    stream: str
    """The stream from which the inbox's stream has the message."""
    position: int
    """The sequence of the message in that stream."""
    made: str
    """A short text that changes when that stream is made again; empty from servers before 2.15."""
    api: str = ""
    """The prefix of the JetStream API that has the stream, as in `$JS.hub.API`; empty for the inbox's own."""


@dataclass(frozen=True, slots=True)
class Incoming(Generic[T_co]):
    """A validated message of another stream, the first argument of the handler of an `inbox`."""

    data: T_co
    id: str
    """The id of the CloudEvent; for other messages the stream's time of creation and the sequence.

    For other messages of a gathered stream: the origin's stream, when it was made, and the sequence there.
    """
    source: str
    """The source of the CloudEvent; empty for other messages."""
    subject: str
    """The NATS subject on which the message was published."""
    position: int
    """The sequence of the message in that stream."""
    recorded_at: datetime
    """When that stream stored the message, by its server's clock."""
    origin: Origin | None = None
    """Where the message was published, in a stream that is gathered from others; None in any other stream."""


@dataclass(frozen=True, slots=True)
class Inbox(Generic[T_contra, D_contra]):
    """The declaration that `@inbox` makes of a handler."""

    name: str
    handle: Callable[[Incoming[T_contra], Reaction[D_contra]], Coroutine[Any, Any, None]]
    stream: str
    subject: str
    start: Start = "new"
    retry: Retry = field(default_factory=Retry)
    on_error: Literal["quarantine", "stop"] = "quarantine"
    revision: int = 1
    sources: tuple[Source, ...] = ()
    """The streams from which its stream is gathered; empty for a stream that somebody else makes."""

    @property
    def type(self) -> Any:
        """The type its messages are validated as; raises `DefinitionError` if the handler is not annotated with it."""
        parameter = next(iter(inspect.signature(self.handle).parameters), "message")
        hint = resolved_hint(self.handle, parameter, include_extras=True)
        if typing.get_origin(hint) is not Incoming:
            raise DefinitionError(
                [f"{shown_name(self.handle)}: write what it takes, as in `message: Incoming[PaymentCaptured]`"]
            )
        return typing.get_args(hint)[0]

    def faults(self, app: str) -> list[str]:
        """Return the faults of this declaration in the app of this name, each as a sentence."""
        faults = _handler_faults(self, "message")
        if not _is_match(_FOREIGN_STREAM, self.stream):
            faults.append(f"its stream {self.stream!r} is not a stream's name")
        if app in (self.stream, *(source.stream for source in self.sources if not source.prefix)):
            faults.append(
                f"the stream {app!r} is the app's own log; declare a reactor for its events, or name another stream"
            )
        if not _is_match(_SUBJECT, self.subject):
            faults.append(f"its subject {self.subject!r} is not one; write it as in payments.captured.*")
        faults += _source_faults(self.stream, self.sources)
        try:
            _ = self.type
        except DefinitionError as error:
            faults += error.faults
        return faults


def _is_match(form: re.Pattern[str], text: Any) -> bool:
    return isinstance(text, str) and form.fullmatch(text) is not None


def _source_faults(stream: str, sources: Sequence[Source]) -> list[str]:
    """Return the faults of the sources of an inbox's stream."""
    faults: list[str] = []
    for source in sources:
        if not _is_match(_FOREIGN_STREAM, source.stream):
            faults.append(f"its source {source.stream!r} is not a stream's name")
        if source.domain and source.api:
            faults.append(f"its source {source.stream!r} has a domain and an api; give one of them")
        if source.stream == stream and not source.prefix:
            faults.append(f"its stream {stream!r} cannot be gathered from itself")
    places = [(source.stream, source.prefix) for source in sources]
    faults += [
        f"its source {name!r} is named twice: a message on both subjects would come twice"
        for name, prefix in dict.fromkeys(places)
        if places.count((name, prefix)) > 1
    ]
    return faults


class Receiving(Protocol):
    """A decorator that declares an inbox."""

    def __call__(self, handle: Callable[[Incoming[T], Reaction[D]], Coroutine[Any, Any, None]], /) -> Inbox[T, D]: ...


def inbox(
    name: str,
    /,
    *,
    stream: str,
    subject: str,
    start: Start = "new",
    retry: Retry | None = None,
    on_error: Literal["quarantine", "stop"] = "quarantine",
    sources: Sequence[str | Source] = (),
) -> Receiving:
    """Declare an async handler of another stream's messages, `(message, reaction)`.

    A message is JSON, optionally a CloudEvent in structured mode, and is validated as the type in the handler's
    annotation. Each message is handled at least once, messages of one subject in order; commands are recorded once.
    With `sources`, `eventjet init` makes the stream, and the server gathers the messages of those streams into it;
    `message.origin` says which stream each is from.

    ```python
    @inbox("payments", stream="payments", subject="payments.captured.*")
    async def payments(message: Incoming[Deposited], reaction: Reaction) -> None:
        await reaction.repository(Account).execute(message.id, Account.deposit, message.data.amount)

    assert App("bank", aggregates=[Account], reactors=[payments], upcasters=[withdrawn_has_a_reason]).inboxes
    ```
    """

    def declare(handle: Any, /) -> Inbox[Any, Any]:
        gathered = tuple(Source(source) if isinstance(source, str) else source for source in sources)
        return Inbox(name, handle, stream, subject, start, retry or Retry(), on_error, sources=gathered)

    return declare


@dataclass(frozen=True, slots=True)
class Publication(Generic[E_contra]):
    """The declaration that `@publication` makes of a translation."""

    name: str
    translate: Callable[[Recorded[E_contra]], Any]
    """The translation; it returns one public event, several, or None for an event that is not published."""
    stream: str
    """The stream that is published into; an operator creates it."""
    source: str
    """The `source` of its CloudEvents: a URI."""
    start: Start = "new"

    @property
    def events(self) -> tuple[type, ...]:
        """The event classes of its subscription; raises `DefinitionError` if the translation is not annotated so."""
        return recorded_events_of(self.translate)

    @property
    def public(self) -> tuple[type, ...]:
        """The event classes that it may publish; raises `DefinitionError` if the return annotation is missing."""
        events: dict[type, None] = {}
        for member in union_members(resolved_hint(self.translate, "return")):
            origin = typing.get_origin(member)
            members = union_members(typing.get_args(member)[0]) if origin in _LISTS else (member,)
            events |= dict.fromkeys(event for event in members if event is not Ellipsis)
        return tuple(events)

    def faults(self, app: str, is_known: Callable[[type], bool]) -> list[str]:
        """Return the faults of this declaration in the app of this name, which folds the known events, as sentences."""
        translate = self.translate
        faults = start_faults(self.start)
        if not is_plain(translate):
            faults.append(f"{shown_name(translate)} is async or a generator; return the public events")
        if not _is_match(_STREAM, self.stream):
            faults.append(f"its stream {self.stream!r} is not a stream's name; use letters, digits, - and _")
        if self.stream == app:
            faults.append(
                f"the stream {app!r} is the app's own log, which public events are not for; name another stream"
            )
        if not self.source:
            faults.append("its source is empty; name a URI, as CloudEvents want it")
        try:
            unknown = [event for event in self.events if not is_known(event)]
            faults += [
                f"{shown_name(translate)} takes {shown_name(event)}, which no aggregate of the app folds; list its "
                "aggregate in `aggregates`"
                for event in unknown
            ]
            for event in self.public:
                event_info(event)
        except DefinitionError as error:
            faults += error.faults
        return faults


class Publishing(Protocol):
    """A decorator that declares a publication."""

    def __call__(self, translate: Callable[[Recorded[E]], object], /) -> Publication[E]: ...


def publication(name: str, /, *, stream: str, source: str, start: Start = "new") -> Publishing:
    """Declare the translation of recorded events to public events, a pure function of one recorded event.

    Public events go to `<stream>.<name>.<id>` as CloudEvents 1.0 in JSON, exactly once and in the order of the log.
    `stream` is an existing stream that an operator created, and `source` is the URI in the CloudEvents.

    ```python
    @event("bank.customer-joined")
    class Joined:
        name: str

    @publication("customers", stream="public", source="https://bank.example/customers")
    def customers(event: Recorded[Opened]) -> Joined:
        return Joined(name=event.data.owner)

    (opened,) = on("a-1", Opened(owner="ada"))
    assert customers.translate(opened) == Joined(name="ada")
    ```
    """

    def declare(translate: Any, /) -> Publication[Any]:
        return Publication(name, translate, stream, source, start)

    return declare
