"""What of an app follows the log by a cursor."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from eventjet.calls import exceptions_only
from eventjet.codec.subjects import cursor_name, declared_name, probes
from eventjet.domain.parked import AggregateKey
from eventjet.domain.process import ProcessInfo
from eventjet.domain.reactor import Reactor, Start, partition_of
from eventjet.domain.subscription import folded_events
from eventjet.domain.unique import CLAIMS
from eventjet.errors import DepsUnusable, LogUnusable
from eventjet.projections.app_ref import Application
from eventjet.subscriptions.cursor import PROCESS

REACTOR, PUBLICATION, INBOX = "reactor", "publication", "inbox"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What follows the log by one cursor, as far as it can be told without a connection."""

    name: str
    """Of its cursor: as it is declared, or as `receipts-1-of-4` where it is one of several partitions."""
    kind: str
    revision: int
    start: Start
    events: tuple[type, ...]
    """What it is told of; nothing of this log for an inbox."""
    stream: str = ""
    """The stream that it follows, where that is another than the log; empty for the log."""
    subject: str = ""
    """Of that stream, what it takes."""
    partitions: int = 1
    partition: int = 0

    @property
    def declared_as(self) -> str:
        """The name that the app gives it."""
        return declared_name(self.name)

    def has(self, key: AggregateKey) -> bool:
        """Whether an aggregate is of its partition."""
        return self.partitions == 1 or partition_of(key, self.partitions) == self.partition


def declarations_of(app: Application) -> dict[str, Declaration]:
    """All that an app has, by name."""
    found = [
        *(part for one in app.reactors.values() for part in _partitions(one)),
        *(Declaration(one.name, PROCESS, one.revision, "new", heard_by(one)) for one in app.processes.values()),
        *(Declaration(one.name, PUBLICATION, 1, one.start, one.events) for one in app.publications.values()),
        *(
            Declaration(one.name, INBOX, one.revision, one.start, (), one.stream, one.subject)
            for one in app.inboxes.values()
        ),
    ]
    return {one.name: one for one in found}


def has_timers(app: Application) -> bool:
    """Whether something of it waits for a time."""
    return any(info.has_deadlines for info in app.processes.values())


def probes_of(app: Application) -> list[tuple[str, str]]:
    """(stream, subject) of each kind of message that the app stores, for who asks who else answers there."""
    types = [info.name for info in (*app.aggregates.values(), *app.processes.values())]
    published = [(one.stream, one.name) for one in app.publications.values()]
    needs = {"cursors": bool(declarations_of(app)), "timers": has_timers(app)}
    return probes(app.name, dict.fromkeys([*types, CLAIMS]), published, **needs)


def _partitions(one: Reactor[Any, Any]) -> list[Declaration]:
    return [
        Declaration(
            cursor_name(one.name, number, one.partitions),
            REACTOR,
            one.revision,
            one.start,
            one.events,
            partitions=one.partitions,
            partition=number,
        )
        for number in range(one.partitions)
    ]


@asynccontextmanager
async def opened_deps(app: Application) -> AsyncGenerator[Any]:
    """Within the block what reactors need, as `App(deps=…)` opens it; None where the app names nothing.

    Raises `DepsUnusable` for what is no async context manager.
    """
    made: Any = nullcontext() if app.deps is None else app.deps()
    if not isinstance(made, AbstractAsyncContextManager):
        raise DepsUnusable(app.name, type(made).__name__)
    with exceptions_only(f"The deps of the app {app.name!r}"):
        async with cast("AbstractAsyncContextManager[Any]", made) as opened:
            yield opened


def missing_stream(inbox: str, stream: str) -> LogUnusable:
    """The error for an inbox whose stream is not there."""
    return LogUnusable(
        f"The stream {stream!r} of the inbox {inbox!r}", "it does not exist", "Create it first, or name another."
    )


def heard_by(info: ProcessInfo) -> tuple[type, ...]:
    """A process's own events, and those it listens to."""
    return tuple(dict.fromkeys([*info.events, *(event for one in info.listeners for event in one.events)]))


def filters_of(app: Application, events: Sequence[type]) -> list[str]:
    """The subjects of all aggregates that one of the events belongs to."""
    wanted = set(events)
    return [f"{app.name}.{info.name}.*" for cls, info in app.aggregates.items() if wanted & set(folded_events(cls))]
