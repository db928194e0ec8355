"""The three event handlers of reactions: for a reactor or an inbox, for a process, and for a publication.

A handler says what to do about an event and for which key; `CursorSession` decides when and how often. The module also
has what user code receives: `EventReaction` (commands that are carried out once) and `Deps` (`App(deps=…)`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, cast

from eventjet import failpoints
from eventjet.codec.catalog import Catalog
from eventjet.codec.cloud_events import message_of
from eventjet.codec.headers import event_id_of, is_imported
from eventjet.codec.reasons import reason_of
from eventjet.codec.subjects import entity_of
from eventjet.commands.execute import recorded_events
from eventjet.commands.repository import Repositories, Repository
from eventjet.domain.aggregate import AggregateType
from eventjet.domain.decision import Committed
from eventjet.domain.quarantined import AggregateKey
from eventjet.domain.reactor import Inbox, Incoming, Publication, Reactor, Retry
from eventjet.domain.recorded import Metadata, Recorded, own_event
from eventjet.domain.state import own_copy
from eventjet.domain.subscription import shown_name
from eventjet.errors import DepsUnusable, LogRolledBack, Unreachable
from eventjet.log.public_stream import PublicStream
from eventjet.log.timers import Due, JetStreamTimers
from eventjet.observability import logs, spans, tracing
from eventjet.projections.app_ref import Application
from eventjet.projections.fold import aggregate_key_of
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.declarations import Declaration, opened_deps
from eventjet.subscriptions.event_source import EventSource
from eventjet.subscriptions.process_steps import ProcessRunner
from eventjet.subscriptions.retry import Backoff, end

_log = logging.getLogger(__name__)


class Deps:
    """The opened `App(deps=…)`, opened and closed by one task of its own; opening is retried until it succeeds."""

    def __init__(self, app: Application, options: WorkerOptions, *, private: bool) -> None:
        """Start to open the deps. `private` keeps personal data out of the logged reasons."""
        self._app = app
        self._options = options
        self._backoff = Backoff(options.backoff_s)
        self._private = private
        self._first_try_ended, self._closing = asyncio.Event(), asyncio.Event()
        self._is_open = False
        self._value: Any = None
        self._variables: dict[ContextVar[Any], Any] = {}
        self._fault = self._unreachable("they are not open yet")
        self.task = asyncio.create_task(self._keep(), name=f"the deps of the app {app.name!r}")
        """The task that opens and closes the deps; it ends before `close` only with `DepsUnusable`."""

    async def opened(self) -> Any:
        """Return the value of the deps, and set the context variables of their opening; raises `Unreachable`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.lease_s):
                await self._first_try_ended.wait()
        if not self._is_open:
            raise self._fault
        for variable, value in self._variables.items():
            variable.set(value)
        return self._value

    async def close(self) -> None:
        """Close the deps, in half of `drain_s` at most, or cancel their opening; raises what closing raises."""
        self._closing.set()
        late_s = self._options.drain_s / 2 if self._is_open else 0.0
        await asyncio.wait({self.task}, timeout=late_s)
        if not self.task.done():
            if self._is_open:
                logs.GIVEN_UP.log(_log, name=self.task.get_name(), seconds=late_s)
            await end([self.task])
        elif not self.task.cancelled():
            self.task.result()

    async def _keep(self) -> None:
        before = copy_context()
        while not self._closing.is_set():
            limit = asyncio.timeout(self._options.deps_s)
            try:
                async with limit, opened_deps(self._app) as self._value:
                    limit.reschedule(None)
                    self._variables = {
                        variable: value
                        for variable, value in copy_context().items()
                        if variable not in before or before[variable] is not value
                    }
                    self._is_open = True
                    self._first_try_ended.set()
                    await self._closing.wait()
            except DepsUnusable:
                raise
            except Exception as error:
                if self._is_open:
                    raise
                is_late = isinstance(error, TimeoutError) and limit.expired()
                late = f"that took longer than {self._options.deps_s:g} s"
                reason = late if is_late else reason_of(error, private=self._private)
                self._fault = self._unreachable(f"they could not be opened ({reason})")
                if self._backoff.failed(reason):
                    logs.TRYING_AGAIN.log(_log, name="deps", reason=reason_of(self._fault), trace="")
                self._first_try_ended.set()
                await self._backoff.wait(self._closing)

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable(f"The deps of the app {self._app.name!r}", reason, "See what they need.")


S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Cause:
    """The event or message that a handler is called for."""

    key: str
    """Prefix of the command ids, the same on every try."""
    metadata: Metadata
    since: int
    """Position of the log before which no command of this cause can have been recorded; 0 when unknown."""
    causations: tuple[str, ...] = ()
    """What commands of this cause record as causation; empty where their ids say it all."""
    former_key: str | None = None
    """The prefix under which earlier releases recorded commands of this cause, if it was another."""

    @classmethod
    def of_event(cls, reactor: str, event: Recorded[Any]) -> Cause:
        """Return the cause for an event of this log."""
        metadata = Metadata(
            causation=event.event_id,
            correlation=event.metadata.correlation or event.event_id,
            actor=f"reactor:{reactor}",
            traceparent=event.metadata.traceparent,
        )
        return cls(f"{reactor}/{event.event_id}", metadata, event.position)

    @classmethod
    def of_message(cls, inbox: str, message: Incoming[Any]) -> Cause:
        """Return the cause for a message of another stream, which has no position in this log.

        Its key is `inbox/source/id`. Sources are URLs, so an id ends at the last `/` of the key: one that contains `/`,
        or the `%` of the escape, is escaped, and no two CloudEvents have one key. Commands of such a message that an
        earlier release recorded are known by the former key, with the id as it is.

        Other keys stay as they were, since external systems know them, and commands are recorded under them. They could
        be equal to a former key, to one with a name (`Reaction.named`), and to that of a message without a source. So
        the recorded causation is compared: it has a blank between source and id, which no URL contains, where earlier
        releases wrote `/`.
        """
        if not message.source:
            metadata = Metadata(causation=message.id[:500], correlation=message.id[:500], actor=f"inbox:{inbox}")
            return cls(f"{inbox}/{message.id}", metadata, 0, (message.id[:500],))
        former = f"{message.source}/{message.id}"
        name = f"{message.source}/{message.id.replace('%', '%25').replace('/', '%2F')}"
        causation = _shortened(f"{message.source.replace(' ', '%20')} {message.id}")
        metadata = Metadata(causation=causation, correlation=former[:500], actor=f"inbox:{inbox}")
        former_key = None if name == former else f"{inbox}/{former}"
        return cls(f"{inbox}/{name}", metadata, 0, (causation, former[:500]), former_key)


def _shortened(text: str) -> str:
    """Return a text of at most 500 characters, which is another one for another text."""
    return text if len(text) <= 500 else f"{text[:460]}…{sha256(text.encode()).hexdigest()[:32]}"


class EventReaction:
    """The implementation of `eventjet.Reaction`, for one try of one event or message and used by one task."""

    def __init__(self, repositories: Repositories, deps: Any, cause: Cause, attempt: int, *, name: str = "") -> None:
        self.deps = deps
        self.attempt = attempt
        suffix = f"/{name}" if name else ""
        self.key = cause.key + suffix
        self.cause = cause
        self._former_key = None if cause.former_key is None else cause.former_key + suffix
        self._repositories = repositories
        self._count = 0

    def named(self, name: str) -> EventReaction:
        return EventReaction(self._repositories, self.deps, self.cause, self.attempt, name=name)

    def repository(self, aggregate: AggregateType[S, E], /) -> CommandsOnce[S, E]:
        return CommandsOnce(self, self._repositories.of(aggregate))

    def next_command_ids(self) -> tuple[str, str | None]:
        """Return the next command id, which numbers the commands of this reaction, and its former id if it has one."""
        self._count += 1
        former = None if self._former_key is None else f"{self._former_key}/{self._count}"
        return f"{self.key}/{self._count}", former


class CommandsOnce(Generic[S, E]):
    """The implementation of `reactor.Reacted`: a repository whose commands are carried out once."""

    def __init__(self, reaction: EventReaction, repository: Repository[S, E]) -> None:
        self._reaction = reaction
        self._repository = repository

    async def execute(
        self,
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Committed[S, E]:
        """Execute a command once, under the next command id of the reaction.

        Where the newest command ids do not say whether it was recorded before, the log is searched back to the position
        of the cause: a command cannot have been recorded before its cause.
        """
        cause = self._reaction.cause
        command_id, former_id = self._reaction.next_command_ids()
        command = self._repository.command(command_id, metadata=cause.metadata)
        plan = command.decide(aggregate_id, decide, *args, **kwargs)
        plan = replace(plan, since=cause.since, causations=cause.causations)
        if former_id is not None:
            former = self._repository.command(former_id).decide(aggregate_id, decide, *args, **kwargs)
            plan = replace(plan, former=replace(former, since=cause.since, causations=cause.causations[1:]))
        failpoints.reach("reaction.before")
        committed = await self._repository.run(plan)
        failpoints.reach("reaction.stored")
        return committed

    async def load(self, aggregate_id: str, /) -> S:
        return await self._repository.load(aggregate_id)


_RESTED_MAX = 10_000
"""Process instances whose resting state is remembered, at most."""
_INSTANCES = 500
"""About how many process instances one call of `instances` returns."""

Try: TypeAlias = Callable[[int], Awaitable[None]]
"""One try to handle an event; the argument is the number of the try, from 1 on."""


class EventHandler:
    """The handler of one declaration's events over one connection."""

    def __init__(self, declaration: Declaration, source: EventSource, retry: Retry, *, quarantines: bool) -> None:
        self.declaration = declaration
        self.source = source
        self.retry = retry
        self.takes_imported = False
        """Whether imported events are handled: they must not cause new work, but they may be published."""
        self.quarantines = quarantines
        """Whether an event that cannot be handled is quarantined; otherwise it stops the subscription."""
        self.label = declaration.name
        """The name of the subscription, and of its function if it has one alone."""

    @property
    def durable(self) -> str:
        """The name of the durable consumer."""
        return self.declaration.name

    async def check(self) -> None:
        """Raise when something is missing without which no event could be handled."""

    def work(self, event: Any) -> tuple[AggregateKey, Try] | None:
        """Return the key to queue an event or a message under and the try to run; None when there is nothing to do."""
        raise NotImplementedError

    def late_work(self, event: Any) -> tuple[AggregateKey, Try] | None:
        """Return what `work` does, for an event of the quarantine: later ones may have been handled before it."""
        return self.work(event)

    def handling(self, attempt: int, event: Recorded[Any] | None = None) -> AbstractContextManager[dict[str, Any]]:
        """Return the span of one try, in the trace of the event's command."""
        labels = {"eventjet.name": self.declaration.name, "eventjet.kind": self.declaration.kind}
        parent = None if event is None else event.metadata.traceparent
        attributes: dict[str, Any] = {"eventjet.attempt": attempt}
        if event is not None:
            attributes["eventjet.position"] = event.position
        return tracing.span(spans.HANDLE, self.declaration.name, labels, attributes, parent=parent)


class ReactorHandler(EventHandler):
    """Calls a reactor's function with each event of its subscription, or an inbox's with each message of its stream."""

    def __init__(
        self,
        declaration: Declaration,
        source: EventSource,
        reactor: Reactor[Any, Any] | Inbox[Any, Any],
        repositories: Repositories,
        deps: Deps,
    ) -> None:
        super().__init__(declaration, source, reactor.retry, quarantines=reactor.on_error == "quarantine")
        self.takes_imported = isinstance(reactor, Inbox)
        self.label = f"{shown_name(reactor.handle)}, the handler of {declaration.name!r},"
        self._reactor = reactor
        self._repositories = repositories
        self._deps = deps

    async def check(self) -> None:
        await self._deps.opened()

    @property
    def durable(self) -> str:
        """The name of the durable consumer; an inbox's has the app's name, since its stream may serve other apps."""
        name = self._reactor.name
        return f"{self._repositories.app.name}-{name}" if isinstance(self._reactor, Inbox) else self.declaration.name

    def work(self, event: Any) -> tuple[AggregateKey, Try]:
        reactor = self._reactor
        if isinstance(reactor, Inbox):
            message: Incoming[Any] = event
            cause, of_log = Cause.of_message(reactor.name, message), None
            key = aggregate_key_of(message.subject.encode())
        else:
            cause, of_log = Cause.of_event(reactor.name, event), cast("Recorded[Any]", event)
            key = (event.aggregate, event.aggregate_id)

        async def handle(attempt: int) -> None:
            own: Any = replace(event, data=own_copy(event.data)) if of_log is None else own_event(of_log)
            reaction = EventReaction(self._repositories, await self._deps.opened(), cause, attempt)
            with self.handling(attempt, of_log):
                await reactor.handle(own, reaction)

        return key, handle


class ProcessHandler(EventHandler):
    """Runs a process: its own events and its timers wake an instance, and it listens to events of other aggregates."""

    def __init__(
        self, declaration: Declaration, source: EventSource, runner: ProcessRunner, timers: JetStreamTimers
    ) -> None:
        super().__init__(declaration, source, Retry(), quarantines=True)
        self._runner = runner
        self._timers = timers
        self._resting_positions: dict[str, int] = {}
        """The position of the state on which each resting instance rests, by id, oldest first."""

    def work(self, event: Recorded[Any], *, is_late: bool = False) -> tuple[AggregateKey, Try] | None:
        info = self._runner.info
        if event.aggregate == info.name:

            async def woken(attempt: int) -> None:
                if self._resting_positions.get(event.aggregate_id, -1) >= event.position:
                    return  # the process took its steps on a state that contains this event, which a step recorded
                self._runner.cache_first(event)
                with self.handling(attempt, event):
                    await self.wake(event.aggregate_id, event.position)

            return (info.name, event.aggregate_id), woken
        listener = info.listener_to(event.data.__class__)
        process_id = None if listener is None else listener.by(own_event(event))
        if listener is None or process_id is None:
            return None

        async def hear(attempt: int) -> None:
            with self.handling(attempt, event):
                await self._runner.hear(process_id, listener, event, is_late=is_late)
                await self.wake(process_id)

        return (info.name, process_id), hear

    def late_work(self, event: Recorded[Any]) -> tuple[AggregateKey, Try] | None:
        return self.work(event, is_late=True)

    async def instances(self, after: int, until: int) -> tuple[dict[str, int], int]:
        """Return some process instances with events after `after`, and the position up to which they are complete.

        Each instance comes with the position of its last event in that range. The second value is `until` when no
        further events are in the range, and `after` when a replica lags behind.
        """
        name, store = self._runner.name, self._runner.store
        positions: dict[str, int] = {}
        reached = after
        async for page in store.pages_of(name, after=after):
            for record in page:
                if record[0] > until:
                    return positions, until
                reached = record[0]
                with suppress(ValueError):  # a subject that names no instance
                    positions[entity_of(record[2])[1]] = reached
            if len(positions) >= _INSTANCES:
                return positions, reached
        return positions, until if reached >= min(until, (await store.ends(name))[1]) else reached

    async def look_at(self, process_id: str, position: int) -> None:
        """Wake an instance whose last event, not imported, is at that position; a newer one wakes it by itself."""
        newest = await self._runner.store.tail(self._runner.name, process_id)
        if newest is not None and newest[0] == position and not is_imported(newest[3]):
            with self.handling(1):
                await self.wake(process_id, position)

    async def check(self) -> None:
        self._resting_positions.clear()  # each session checks for itself which instances rest
        await self.fired(0)  # raises when the stream of the timers is missing

    async def wake(self, process_id: str, position: int = 0, fired: int = 0) -> None:
        self._resting_positions.pop(process_id, None)
        rested_at = await wake(self._runner, self._timers, process_id, position, fired)
        self._resting_positions[process_id] = rested_at
        if len(self._resting_positions) > _RESTED_MAX:
            del self._resting_positions[next(iter(self._resting_positions))]

    async def newest_fired(self) -> int:
        """Return the sequence of the newest timer of any process type that has fired; 0 for none."""
        return await self._timers.newest_fired() if self._runner.info.has_deadlines else 0

    async def fired(self, after: int) -> Sequence[Due]:
        """Return timers that have fired, after a sequence."""
        if not self._runner.info.has_deadlines:
            return ()
        return await self._timers.due(self.declaration.name, after)

    async def set_late_again(self) -> int:
        """Set timers again that the server did not fire at their time; return how many."""
        if not self._runner.info.has_deadlines:
            return 0
        return await self._timers.set_late_again(self.declaration.name)

    async def come_due(self, due: Due) -> None:
        """Handle a timer that has fired, then clear it."""
        with self.handling(1):
            await self._runner.come_due(due.process_id, due.version, due.at)
            await self.wake(due.process_id, fired=due.sequence)
        await self._timers.clear(self.declaration.name, due)


class PublicationHandler(EventHandler):
    """Publishes events to another stream in order; one that cannot be published stops the subscription."""

    def __init__(
        self, declaration: Declaration, source: EventSource, publication: Publication[Any], stream: PublicStream
    ) -> None:
        super().__init__(declaration, source, Retry(tries=1), quarantines=False)
        self.takes_imported = True
        self._publication = publication
        self._public = Catalog(publication.public)
        self._stream = stream

    async def check(self) -> None:
        """Raise where the last message was published from another log, or from events that this log lost.

        Events up to its position would count as published, though they are others.
        """
        await self._stream.check()
        position, message_id = await self._stream.last_published()
        record = await self.source.at(position) if position else None
        if position and (record is None or not message_id.startswith(f"{event_id_of(record)}.")):
            stream, prefix = self._publication.stream, self._stream.prefix
            event_id = "no event" if record is None else f"the event {event_id_of(record)}"
            raise LogRolledBack(
                self._publication.name,
                position,
                f"the last message in its stream {stream!r} is {message_id}, and the log has {event_id} there",
                "events of this log up to there would count as published. Remove the messages of the log before "
                f"(`nats stream purge {stream} --subject='{prefix}.>'`), or declare another stream",
            )

    def work(self, event: Recorded[Any]) -> tuple[AggregateKey, Try]:
        publication = self._publication

        async def publish(attempt: int) -> None:
            with self.handling(attempt, event):
                if await self._stream.published_until() >= event.position:
                    return
                public_events = recorded_events(publication.translate(own_event(event)))
                encoded = [self._public.encode(public_event) for public_event in public_events]
                messages = [
                    message_of(publication.stream, publication.name, publication.source, event, index, encoded_event)
                    for index, encoded_event in enumerate(encoded)
                ]
                if messages:
                    failpoints.reach("publication.before")
                    await self._stream.publish(messages, event.position)
                    failpoints.reach("publication.stored")

        return (publication.name, ""), publish


async def wake(
    runner: ProcessRunner, timers: JetStreamTimers, process_id: str, position: int = 0, fired: int = 0
) -> int:
    """Take steps until the process instance rests on a state that contains `position`, then set or cancel its timer.

    `fired` is the sequence of a timer that has fired and is being handled. Returns the position of the state.
    """
    folded = await runner.advance(process_id, position=position)
    if not runner.info.has_deadlines:
        return folded.position
    next_deadline = await runner.next_deadline(process_id, folded)
    if next_deadline is None:
        await timers.cancel(runner.name, process_id, folded.version)
    else:
        await timers.set(runner.name, process_id, folded.version, next_deadline.at, fired)
    return folded.position
