"""What a handler of a reactor is given: commands that are carried out once, and an idempotency key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from eventjet import failpoints
from eventjet.codec.request import request_of
from eventjet.domain.aggregate import AggregateType
from eventjet.domain.committed import Committed
from eventjet.domain.recorded import Metadata, Recorded
from eventjet.repository.repositories import Repositories
from eventjet.repository.repository import Repository

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")


class EventReaction:
    """See `reactor.Reaction`; made for one try of one event, and used by one task."""

    def __init__(
        self, repositories: Repositories, deps: Any, reactor: str, event: Recorded[Any], attempt: int, *, name: str = ""
    ) -> None:
        self.deps = deps
        self.attempt = attempt
        self.key = f"{reactor}/{event.event_id}" + (f"/{name}" if name else "")
        self._repositories = repositories
        self._reactor = reactor
        self._event = event
        self._count = 0

    def named(self, name: str) -> EventReaction:
        return EventReaction(self._repositories, self.deps, self._reactor, self._event, self.attempt, name=name)

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
        event = self._event
        metadata = Metadata(
            causation=event.event_id,
            correlation=event.metadata.correlation or event.event_id,
            actor=f"reactor:{self._reactor}",
            traceparent=event.metadata.traceparent,
        )
        plan = replace(
            repository.decide(aggregate_id, decide, *args, **kwargs),
            command_id=f"{self.key}/{self._count}",
            metadata=metadata,
            request=request_of(decide, args, kwargs),
            since=event.position,
        )
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
