"""Tests of a reactor: its handler is called once with an event, and its commands and key are asserted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Concatenate, ParamSpec, TypeVar

from eventjet.codec.catalog import Catalog
from eventjet.commands.repository import Repository
from eventjet.domain.aggregate import AggregateType, aggregate_info
from eventjet.domain.process import Call
from eventjet.domain.reactor import Reactor
from eventjet.domain.recorded import Recorded, own_event
from eventjet.domain.subscription import folded_events
from eventjet.log.memory import MemoryStore
from eventjet.testing.scenarios import as_stored, check_taken

S = TypeVar("S")
E = TypeVar("E")
P = ParamSpec("P")

_APP = "tested"
_NOW = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass
class TestedReaction:
    """The reaction that a tested handler gets; it notes the commands that the handler executes."""

    deps: Any
    key: str
    attempt: int = 1
    calls: list[tuple[Any, str, Call]] = field(default_factory=list[tuple[Any, str, Call]])
    store: MemoryStore = field(default_factory=lambda: MemoryStore(_APP), repr=False)

    def named(self, name: str) -> TestedReaction:
        return TestedReaction(self.deps, f"{self.key}/{name}", self.attempt, self.calls, self.store)

    def repository(self, aggregate: AggregateType[S, E], /) -> _Noting:
        return _Noting(self, aggregate)


class _Noting:
    """A repository in memory that notes each command before it executes it."""

    def __init__(self, reaction: TestedReaction, aggregate: Any) -> None:
        self._reaction = reaction
        self._aggregate = aggregate
        self._repository = Repository[Any, Any](_APP, reaction.store, Catalog(folded_events(aggregate)), aggregate)

    async def execute(self, aggregate_id: str, decide: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._reaction.calls.append((self._aggregate, aggregate_id, Call.of(decide, args, kwargs)))
        return await self._repository.execute(aggregate_id, decide, *args, **kwargs)

    async def load(self, aggregate_id: str, /) -> Any:
        return await self._repository.load(aggregate_id)


@dataclass(frozen=True, slots=True)
class Handled:
    """A handler that has returned, with the commands that it executed."""

    key: str
    """The idempotency key of the reaction."""
    _calls: Sequence[tuple[Any, str, Call]]

    def executed(
        self,
        aggregate: AggregateType[S, E],
        aggregate_id: str,
        decide: Callable[Concatenate[S, P], E | Sequence[E] | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Handled:
        """Assert that the handler's next command was this decision, and return the remaining commands."""
        expected = (aggregate, aggregate_id, Call.of(decide, args, kwargs))
        if not self._calls or self._calls[0] != expected:
            actual = _call_text(self._calls[0]) if self._calls else "nothing"
            raise AssertionError(f"it executed {actual}\nexpected {_call_text(expected)}")
        return Handled(self.key, self._calls[1:])

    def nothing_more(self) -> None:
        """Assert that the handler executed no further command."""
        if self._calls:
            raise AssertionError(f"it executed {', '.join(map(_call_text, self._calls))} as well")


async def reacted(
    reactor: Reactor[E, Any], data: E, /, *, aggregate_id: str = "a-1", deps: Any = None, attempt: int = 1
) -> Handled:
    """Call a reactor's handler once with an event, without a server; raises what the handler raises.

    The commands that it executes are decided in memory, on aggregates that start empty. Raises `UsageError` for an
    event that the handler's annotation does not name.

    ```python
    @reactor("bonus")
    async def bonus(event: Recorded[Opened], reaction: Reaction) -> None:
        await reaction.repository(Account).execute(event.aggregate_id, Account.deposit, Decimal(5))

    handled = await reacted(bonus, Opened(owner="ada"), aggregate_id="a-1")
    handled.executed(Account, "a-1", Account.deposit, Decimal(5)).nothing_more()
    ```
    """
    check_taken(reactor.handle, 0, data)
    event = Recorded(as_stored([data])[0], aggregate_id, 1, 1, _NOW, event_id="00000000-0000-7000-8000-000000000001")
    reaction = TestedReaction(deps, f"{reactor.name}/{event.event_id}", attempt)
    handle: Callable[[Any, Any], Coroutine[Any, Any, None]] = reactor.handle
    await handle(own_event(event), reaction)
    return Handled(reaction.key, tuple(reaction.calls))


def _call_text(call: tuple[Any, str, Call]) -> str:
    aggregate, aggregate_id, decided = call
    return f"{aggregate_info(aggregate).name} {aggregate_id!r}: {decided.with_arguments()}"
