"""What a handler of a reactor is given: commands that are carried out once, and an idempotency key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from eventjet import failpoints
from eventjet.commands.repository import Repositories, Repository
from eventjet.domain.aggregate import AggregateType
from eventjet.domain.committed import Committed
from eventjet.domain.inbox import Incoming
from eventjet.domain.recorded import Metadata, Recorded

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
