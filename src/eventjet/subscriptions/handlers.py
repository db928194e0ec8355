"""The four handlers of a reaction runner: a reactor, a process, an inbox and a publication.

A handler says what is to be done about an event and for which key; `ReactionRunner` decides when, and how often. Also
what user code is given: `EventReaction` (commands that are carried out once) and `Deps` (`App(deps=…)`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

from eventjet import failpoints
from eventjet.codec.catalog import Catalog
from eventjet.codec.cloud_events import message_of
from eventjet.codec.headers import is_imported
from eventjet.codec.reasons import reason_of
from eventjet.codec.subjects import entity_of
from eventjet.commands.execute import recorded_events
from eventjet.commands.repository import Repositories, Repository
from eventjet.domain.aggregate import AggregateType
from eventjet.domain.decision import Committed
from eventjet.domain.parked import AggregateKey
from eventjet.domain.reactor import Inbox, Incoming, Publication, Reactor, Retry
from eventjet.domain.recorded import Metadata, Recorded, own_event
from eventjet.domain.state import own_copy
from eventjet.errors import DepsUnusable, Unreachable
from eventjet.log.public_stream import PublicStream
from eventjet.log.timers import Due, JetStreamTimers
from eventjet.observability import logs, spans, tracing
from eventjet.projections.app_ref import Application
from eventjet.projections.fold import aggregate_key_of
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.declarations import Declaration, opened_deps
from eventjet.subscriptions.event_source import EventSource
from eventjet.subscriptions.process_steps import ProcessRunner
from eventjet.subscriptions.retry import Backoff, end, pause

_log = logging.getLogger(__name__)


class Deps:
    """`App(deps=…)`, opened by a task of its own and closed by the same one; opened anew until that succeeds."""

    def __init__(self, app: Application, options: WorkerOptions, *, private: bool) -> None:
        """Begins to open them. `private` where something personal is at hand."""
        self._app = app
        self._options = options
        self._pace = Backoff(options.backoff_s)
        self._private = private
        self._tried, self._closing = asyncio.Event(), asyncio.Event()
        self._is_open = False
        self._value: Any = None
        self._variables: dict[ContextVar[Any], Any] = {}
        self._fault = self._closed("they are not open yet")
        self.task = asyncio.create_task(self._keep(), name=f"the deps of the app {app.name!r}")
        """Ends before `close` only where nothing could open them: with the `DepsUnusable` that says so."""

    async def opened(self) -> Any:
        """What they gave, once they are open; the context variables that they set are set for the caller then.

        Raises `Unreachable` while they cannot be opened, or when the first try takes longer than a lease.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.lease_s):
                await self._tried.wait()
        if not self._is_open:
            raise self._fault
        for variable, value in self._variables.items():
            variable.set(value)
        return self._value

    async def close(self) -> None:
        """Close them, or end the opening; raises what closing raises. What hangs there is named, and given up."""
        self._closing.set()
        late_s = self._options.drain_s / 2 if self._is_open else 0.0
        await asyncio.wait({self.task}, timeout=late_s)
        if not self.task.done():
            if self._is_open:
                logs.GIVEN_UP.tell(_log, name=self.task.get_name(), seconds=late_s)
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
                    self._tried.set()
                    await self._closing.wait()
            except DepsUnusable:
                raise
            except Exception as error:
                if self._is_open:
                    raise
                is_late = isinstance(error, TimeoutError) and limit.expired()
                late = f"that took longer than {self._options.deps_s:g} s"
                reason = late if is_late else reason_of(error, private=self._private)
                self._fault = self._closed(f"they could not be opened ({reason})")
                if self._pace.failed_term(reason):
                    logs.TRYING_AGAIN.tell(_log, name="deps", reason=reason_of(self._fault), trace="")
                self._tried.set()
                await pause(self._closing, self._pace.pause_s)
                self._pace.paused()

    def _closed(self, reason: str) -> Unreachable:
        return Unreachable(f"The deps of the app {self._app.name!r}", reason, "See what they need.")


S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Cause:
    """What a handler is called for."""

    key: str
    """The same on every try."""
    metadata: Metadata
    since: int
    """A position of the log that no command of it can have been recorded before; 0 where none is known."""

    @classmethod
    def of_event(cls, reactor: str, event: Recorded[Any]) -> Cause:
        metadata = Metadata(
            causation=event.event_id,
            correlation=event.metadata.correlation or event.event_id,
            actor=f"reactor:{reactor}",
            traceparent=event.metadata.traceparent,
        )
        return cls(f"{reactor}/{event.event_id}", metadata, event.position)

    @classmethod
    def of_message(cls, inbox: str, message: Incoming[Any]) -> Cause:
        """A message of another stream has no place in this log."""
        name = f"{message.source}/{message.id}" if message.source else message.id
        metadata = Metadata(causation=name[:500], correlation=name[:500], actor=f"inbox:{inbox}")
        return cls(f"{inbox}/{name}", metadata, 0)


class EventReaction:
    """See `eventjet.Reaction`; made for one try of one event or message, and used by one task."""

    def __init__(self, repositories: Repositories, deps: Any, cause: Cause, attempt: int, *, name: str = "") -> None:
        self.deps = deps
        self.attempt = attempt
        self.key = cause.key + (f"/{name}" if name else "")
        self._repositories = repositories
        self._cause = cause
        self._count = 0

    def named(self, name: str) -> EventReaction:
        return EventReaction(self._repositories, self.deps, self._cause, self.attempt, name=name)

    def repository(self, aggregate: AggregateType[S, E], /) -> CommandsOnce[S, E]:
        return CommandsOnce(self, self._repositories.of(aggregate))

    async def execute(
        self,
        repository: Repository[S, E],
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Committed[S, E]:
        """Under the next id. A command can only have been recorded after its cause: so far back its id is looked for,
        and no farther, wherever the newest ids do not tell."""
        self._count += 1
        command = repository.command(f"{self.key}/{self._count}", metadata=self._cause.metadata)
        plan = replace(command.decide(aggregate_id, decide, *args, **kwargs), since=self._cause.since)
        failpoints.reach("reaction.before")
        done = await repository.run(plan)
        failpoints.reach("reaction.stored")
        return done


class CommandsOnce(Generic[S, E]):
    """See `reactor.Reacted`."""

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
        return await self._reaction.execute(self._repository, aggregate_id, decide, *args, **kwargs)

    async def load(self, aggregate_id: str, /) -> S:
        return await self._repository.load(aggregate_id)


_RESTED_MAX = 10_000
"""Processes that are remembered to rest."""
_INSTANCES = 500
"""Processes that are remembered to be looked at, about."""

Try: TypeAlias = Callable[[int], Awaitable[None]]
"""One try; the argument is its number, from 1 on."""


class EventHandler:
    """One declaration over one connection."""

    def __init__(self, declaration: Declaration, source: EventSource, retry: Retry, *, quarantines: bool) -> None:
        self.declaration = declaration
        self.source = source
        self.retry = retry
        self.takes_imported = False
        """Whether imported events concern it: nothing follows from what happened elsewhere, but it may be told."""
        self.quarantines = quarantines
        """Whether what cannot be taken is parked; else it stops the follower."""

    @property
    def durable(self) -> str:
        """Name of its consumer."""
        return self.declaration.name

    async def check(self) -> None:
        """Raise where something is missing without which no event could be dealt with."""

    def work(self, event: Any) -> tuple[AggregateKey, Try] | None:
        """What to do about an event, or a message, and in whose lane; None for nothing."""
        raise NotImplementedError

    def handling(self, attempt: int, event: Recorded[Any] | None = None) -> AbstractContextManager[dict[str, Any]]:
        """A span of one try, in the trace of the event's command."""
        labels = {"eventjet.name": self.declaration.name, "eventjet.kind": self.declaration.kind}
        parent = None if event is None else event.metadata.traceparent
        more: dict[str, Any] = {"eventjet.attempt": attempt}
        if event is not None:
            more["eventjet.position"] = event.position
        return tracing.span(spans.HANDLE, self.declaration.name, labels, more, parent=parent)

    async def instances(self, after: int, until: int) -> tuple[dict[str, int], int]:
        """Some processes with events after a position, each with its last one of those; and how far that reaches.

        That is `until` where there are no more up to there, and `after` where a replica lags behind.
        """
        del after
        return {}, until

    async def look_at(self, process_id: str, position: int) -> None:
        """Wake a process whose last event is at that position; one that has gone on is woken by what it recorded.

        Not where that was imported: nothing follows from it.
        """

    async def newest_fired(self) -> int:
        """The sequence of the newest timer that has fired, of any process type; 0 for none."""
        return 0

    async def fired(self, after: int) -> Sequence[Due]:
        """Timers that have fired, after a sequence."""
        del after
        return ()

    async def come_due(self, due: Due) -> None:
        """What a timer that has fired leads to, and that it is over then."""
        raise NotImplementedError


class ReactorHandler(EventHandler):
    """A handler, called with each event of its subscription."""

    def __init__(
        self,
        declaration: Declaration,
        source: EventSource,
        reactor: Reactor[Any, Any],
        repositories: Repositories,
        deps: Deps,
    ) -> None:
        super().__init__(declaration, source, reactor.retry, quarantines=reactor.on_error == "quarantine")
        self._reactor = reactor
        self._repositories = repositories
        self._deps = deps

    async def check(self) -> None:
        await self._deps.opened()

    def work(self, event: Recorded[Any]) -> tuple[AggregateKey, Try]:
        reactor = self._reactor

        async def handle(attempt: int) -> None:
            cause = Cause.of_event(reactor.name, event)
            deps = await self._deps.opened()
            with self.handling(attempt, event):
                await reactor.handle(own_event(event), EventReaction(self._repositories, deps, cause, attempt))

        return (event.aggregate, event.aggregate_id), handle


class ProcessHandler(EventHandler):
    """A process: its own events and its timers wake it, and it listens to those of others."""

    def __init__(
        self, declaration: Declaration, source: EventSource, runner: ProcessRunner, timers: JetStreamTimers
    ) -> None:
        super().__init__(declaration, source, Retry(), quarantines=True)
        self._runner = runner
        self._timers = timers
        self._rested: dict[str, int] = {}
        """Of processes that rest, by id, the position of the state that they rest on; the oldest first."""

    def work(self, event: Recorded[Any]) -> tuple[AggregateKey, Try] | None:
        info = self._runner.info
        if event.aggregate == info.name:

            async def woken(attempt: int) -> None:
                if self._rested.get(event.aggregate_id, -1) >= event.position:
                    return  # the process took its steps on a state that contains this event, which a step recorded
                with self.handling(attempt, event):
                    await self.wake(event.aggregate_id, event.position)

            return (info.name, event.aggregate_id), woken
        listener = info.listener_to(event.data.__class__)
        process_id = None if listener is None else listener.by(own_event(event))
        if listener is None or process_id is None:
            return None

        async def hear(attempt: int) -> None:
            with self.handling(attempt, event):
                await self._runner.hear(process_id, listener, event)
                await self.wake(process_id)

        return (info.name, process_id), hear

    async def instances(self, after: int, until: int) -> tuple[dict[str, int], int]:
        name, store = self._runner.name, self._runner.store
        found: dict[str, int] = {}
        reached = after
        async for page in store.pages_of(name, after=after):
            for record in page:
                if record[0] > until:
                    return found, until
                reached = record[0]
                with suppress(ValueError):  # of a subject that names none
                    found[entity_of(record[2])[1]] = reached
            if len(found) >= _INSTANCES:
                return found, reached
        return found, until if reached >= min(until, (await store.ends(name))[1]) else reached

    async def look_at(self, process_id: str, position: int) -> None:
        newest = await self._runner.store.tail(self._runner.name, process_id)
        if newest is not None and newest[0] == position and not is_imported(newest[3]):
            with self.handling(1):
                await self.wake(process_id, position)

    async def check(self) -> None:
        self._rested.clear()  # each session finds out for itself
        await self.fired(0)  # whether their stream is there

    async def wake(self, process_id: str, position: int = 0, fired: int = 0) -> None:
        self._rested.pop(process_id, None)
        rested_at = await wake(self._runner, self._timers, process_id, position, fired)
        self._rested[process_id] = rested_at
        if len(self._rested) > _RESTED_MAX:
            del self._rested[next(iter(self._rested))]

    async def newest_fired(self) -> int:
        return await self._timers.newest_fired() if self._runner.info.has_deadlines else 0

    async def fired(self, after: int) -> Sequence[Due]:
        if not self._runner.info.has_deadlines:
            return ()
        return await self._timers.due(self.declaration.name, after)

    async def come_due(self, due: Due) -> None:
        with self.handling(1):
            await self._runner.come_due(due.process_id, due.version, due.at)
            await self.wake(due.process_id, fired=due.sequence)
        await self._timers.clear(self.declaration.name, due)


class InboxHandler(EventHandler):
    """A handler, called with each message of another stream."""

    def __init__(
        self,
        declaration: Declaration,
        source: EventSource,
        inbox: Inbox[Any, Any],
        repositories: Repositories,
        deps: Deps,
    ) -> None:
        super().__init__(declaration, source, inbox.retry, quarantines=inbox.on_error == "quarantine")
        self.takes_imported = True
        self._inbox = inbox
        self._repositories = repositories
        self._deps = deps

    async def check(self) -> None:
        await self._deps.opened()

    @property
    def durable(self) -> str:
        """Beside those of others in a stream that is not this app's alone."""
        return f"{self._repositories.app.name}-{self._inbox.name}"

    def work(self, event: Incoming[Any]) -> tuple[AggregateKey, Try]:
        async def handle(attempt: int) -> None:
            cause = Cause.of_message(self._inbox.name, event)
            own = replace(event, data=own_copy(event.data))
            deps = await self._deps.opened()
            with self.handling(attempt):
                await self._inbox.handle(own, EventReaction(self._repositories, deps, cause, attempt))

        return aggregate_key_of(event.subject.encode()), handle


class PublicationHandler(EventHandler):
    """Events told in another stream, one after the other; what cannot be told stops it, since order is its promise."""

    def __init__(
        self, declaration: Declaration, source: EventSource, one: Publication[Any], stream: PublicStream
    ) -> None:
        super().__init__(declaration, source, Retry(tries=1), quarantines=False)
        self.takes_imported = True
        self._publication = one
        self._public = Catalog(one.public)
        self._stream = stream

    async def check(self) -> None:
        await self._stream.check()

    def work(self, event: Recorded[Any]) -> tuple[AggregateKey, Try]:
        one = self._publication

        async def tell(attempt: int) -> None:
            with self.handling(attempt, event):
                await told()

        async def told() -> None:
            if await self._stream.published_until() >= event.position:
                return
            encoded = [self._public.encode(each) for each in recorded_events(one.translate(own_event(event)))]
            messages = [
                message_of(self._stream.prefix, one.source, event, index, each) for index, each in enumerate(encoded)
            ]
            if messages:
                failpoints.reach("publication.before")
                await self._stream.publish(messages, event.position)
                failpoints.reach("publication.told")

        return (one.name, ""), tell


async def wake(
    runner: ProcessRunner, timers: JetStreamTimers, process_id: str, position: int = 0, fired: int = 0
) -> int:
    """Step after step until the process rests, on a state that contains `position`; then set its timer.

    `fired` is the sequence of a timer that has fired and is being dealt with. Return the position of the state.
    """
    folded = await runner.advance(process_id, position=position)
    if not runner.info.has_deadlines:
        return folded.position
    found = await runner.next_deadline(process_id, folded)
    if found is None:
        await timers.cancel(runner.name, process_id, folded.version)
    else:
        await timers.set(runner.name, process_id, folded.version, found.at, fired)
    return folded.position
