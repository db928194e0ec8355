"""`ProcessRunner`: what a process does: it hears, takes steps, and comes due. Each is one append that its own sequence
fences.

A step is what the state says is next: the other aggregate's decision and the process's own are made on the newest
states and recorded together, or not at all. So a step cannot be done twice, whoever tries: no outbox, no ids to match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from eventjet import failpoints
from eventjet.codec.headers import recorded_at
from eventjet.commands.execute import Conflict, Decision, Executor, Planned, append, retry
from eventjet.commands.repository import Repositories, Repository
from eventjet.domain.decision import Committed
from eventjet.domain.history import FoldedState
from eventjet.domain.process import Call, Deadline, Listener, Outcome, ProcessInfo, Step, deadlines_of
from eventjet.domain.recorded import Metadata, Recorded, own_event
from eventjet.domain.state import own_copy
from eventjet.errors import EventjetError, NotUnique, UsageError
from eventjet.log.store import EventStore
from eventjet.observability import spans, tracing

STEPS_MAX = 200
"""Steps without rest: more are a circle."""


@dataclass(frozen=True, slots=True)
class NextDeadline:
    """The earliest deadline of a state."""

    at: datetime
    deadline: Deadline[Any, Any]


class _Moved(Exception):
    pass


class ProcessRunner:
    """One process type over one connection, for any number of tasks; one task at a time for each process."""

    def __init__(self, repositories: Repositories, cls: Any, info: ProcessInfo) -> None:
        self.info = info
        self.name = info.name
        self._repositories = repositories
        self._repository: Repository[Any, Any] = repositories.of(cls)
        self._own: Executor[Any, Any] = self._repository.executor
        self._store = repositories.store
        self.steps = 0
        """Taken by this runner."""

    @property
    def store(self) -> EventStore:
        """The log that its processes are in."""
        return self._store

    async def state(self, process_id: str) -> FoldedState[Any]:
        """The state of a process now."""
        return await self._own.newest(process_id)

    async def advance(self, process_id: str, *, position: int = 0) -> FoldedState[Any]:
        """Step after step, on a state that contains `position`, until the process rests; its state then.

        Raises `UsageError` for steps that record nothing, that concern the process itself or that never end, what a
        decision raises that its step does not name, and what `EventStore` raises.
        """
        for _ in range(STEPS_MAX):
            folded = await self._own.reaching(process_id, position=position)
            step: Step[Any, Any] | None = own_copy(folded.state).step()
            if step is None:
                return folded
            position = max(position, await self._take(process_id, folded, step))
        raise UsageError(f"{self._shown(process_id)} took {STEPS_MAX} steps without rest. Let it come to an end.")

    async def hear(self, process_id: str, listener: Listener, event: Recorded[Any]) -> None:
        """Make the listening decision, once, and after all that was heard before."""
        folded = await self._own.reaching(process_id)
        if await self._heard_until(process_id, folded, event.position) >= event.position:
            return
        await self._repository.run(
            Planned(
                self._own,
                process_id,
                lambda state: listener.handler(state, own_event(event)),
                called=listener.handler,
                command_id=f"{self._heard}{event.position}",
                metadata=self._metadata(process_id, event.event_id, event.metadata.correlation),
                since=event.position,
            )
        )

    async def come_due(self, process_id: str, version: int, now: datetime) -> None:
        """Make the decision of the earliest deadline if it is due, on a state that knows at least `version`.

        On a state that has moved meanwhile nothing is due: its own event sets its own timer.
        """
        folded = await self._own.reaching(process_id, version=version)
        found = await self.next_deadline(process_id, folded)
        if found is None or found.at > now:
            return

        def decide(state: Any) -> Any:
            events = found.deadline.call.on(state)
            if not events:
                raise self._records_nothing(process_id, f"The deadline {found.deadline.call}")
            return events

        failpoints.reach("due.before")
        command_id = f"{self._step_id(process_id, folded)}/due"
        metadata = self._metadata(process_id, folded.event_id)
        await self._repository.run(
            Planned(
                self._own,
                process_id,
                decide,
                command_id,
                metadata,
                since=folded.position,
                called=found.deadline.call.decide,
                only_at=folded.position,
            )
        )
        failpoints.reach("due.stored")

    async def next_deadline(self, process_id: str, folded: FoldedState[Any]) -> NextDeadline | None:
        """The earliest deadline of a state; None also when the leader knows a newer one, which has its own."""
        deadlines = deadlines_of(folded.state)
        if not deadlines:
            return None
        newest = await self._store.tail(self.name, process_id)
        if newest is None or newest[0] != folded.position:
            return None
        last = recorded_at(newest)
        return min((NextDeadline(one.due_at(last), one) for one in deadlines), key=lambda one: one.at)

    async def _take(self, process_id: str, folded: FoldedState[Any], step: Step[Any, Any]) -> int:
        """Take one step, or find that the process has moved; the position up to which it is known then."""
        asked = step.asked
        target = self._repositories.of(asked.aggregate).executor
        places = [
            (executor.subject(aggregate_id), executor.cache, aggregate_id)
            for executor, aggregate_id in ((self._own, process_id), (target, asked.aggregate_id))
        ]
        if places[0][0] == places[1][0]:
            raise UsageError(
                f"{self._shown(process_id)} asks itself for {asked.call}. Put both into one decision of its own."
            )
        labels = {"eventjet.name": self.name}
        with tracing.span(spans.STEP, self.name, labels, {"eventjet.decision": asked.call.name}) as told:
            try:
                return await retry(lambda lost: self._attempt(process_id, folded, step, lost, told), places)
            except _Moved:
                return folded.position

    async def _attempt(
        self, process_id: str, folded: FoldedState[Any], step: Step[Any, Any], lost: int, told: dict[str, Any]
    ) -> int | Conflict:
        known = await self._own.load(process_id, lost > 0)
        if (known.position, known.event_id) != (folded.position, folded.event_id):
            raise _Moved
        asked = step.asked
        target = self._repositories.of(asked.aggregate).executor
        metadata = self._metadata(process_id, folded.event_id)
        command_id = self._step_id(process_id, folded)
        other = Planned(target, asked.aggregate_id, asked.call.on, command_id, metadata)
        decided: list[Decision[Any, Any]] = []
        try:
            taken = await target.decide(other, await target.load(asked.aggregate_id, lost > 0))
        except EventjetError:
            raise
        except Exception as error:
            # `decide` has made sure that it was raised on the newest state.
            refusal = step.after_refusal(error)
            if refusal is None:
                raise
            own = self._planned(process_id, command_id, metadata, refusal, error)
        else:
            if isinstance(taken, Conflict):
                return taken
            if taken.append is not None:
                decided.append(taken)
            own = self._planned(process_id, command_id, metadata, step.done, *_told(step, taken))
        try:
            saved = await self._recorded(decided, own, known, f"The step {asked}", told)
        except NotUnique as error:
            refusal = step.after_refusal(error)
            if refusal is None:
                raise
            own = self._planned(process_id, command_id, metadata, refusal, error)
            saved = await self._recorded([], own, known, f"The step {asked}", told)
        if isinstance(saved, Conflict):
            return saved
        failpoints.reach("step.stored")
        self.steps += 1
        return saved.position

    async def _recorded(
        self,
        others: Sequence[Decision[Any, Any]],
        own: Planned[Any, Any],
        known: FoldedState[Any],
        what: str,
        told: dict[str, Any] | None = None,
    ) -> Committed[Any, Any] | Conflict:
        """What came of the process's own decision, recorded with those of others."""
        mine = await self._own.decide(own, known)
        if isinstance(mine, Conflict):
            return mine
        if mine.append is None:
            raise self._records_nothing(own.aggregate_id, what)
        failpoints.reach("step.decided")
        saved = await append(self._store, [*others, mine], told)
        return saved if isinstance(saved, Conflict) else saved[-1]

    def _planned(
        self, process_id: str, command_id: str, metadata: Metadata, call: Call, *first: Any
    ) -> Planned[Any, Any]:
        def decide(state: Any) -> Any:
            return call.on(state, *first)

        return Planned(self._own, process_id, decide, command_id, metadata)

    async def _heard_until(self, process_id: str, folded: FoldedState[Any], position: int) -> int:
        """The last position that the process recorded something for; of what it passed over nothing is known."""
        prefix = self._heard
        if folded.commands.complete:
            ids = [one for one in folded.commands.as_mapping(folded.version) if one.startswith(prefix)]
        else:
            # What it recorded for an event came after that event.
            since = await self._own.histories.commands_since(
                process_id, folded, position, lambda told: unquote(told).startswith(prefix)
            )
            ids = [unquote(told) for told in since]
        return max((int(one[len(prefix) :]) for one in ids), default=0)

    @property
    def _heard(self) -> str:
        return f"{self.name}.heard."

    def _step_id(self, process_id: str, folded: FoldedState[Any]) -> str:
        return f"{self.name}/{process_id}/{folded.version}"

    def _metadata(self, process_id: str, causation: str, correlation: str | None = None) -> Metadata:
        return Metadata(
            correlation=correlation or f"{self.name}:{process_id}", causation=causation, actor=f"process:{self.name}"
        )

    def _records_nothing(self, process_id: str, what: str) -> UsageError:
        return UsageError(
            f"{what} of {self._shown(process_id)} recorded nothing of its own, so it would be done for ever. "
            "Have its decision return an event."
        )

    def _shown(self, process_id: str) -> str:
        return f"{self.name} {process_id!r}"


def _told(step: Step[Any, Any], taken: Decision[Any, Any]) -> tuple[Outcome[Any, Any], ...]:
    """What the process's decision is given first, where it wants to know."""
    if not step.tells:
        return ()
    events = () if taken.append is None else tuple(own_copy(new.encoded.event) for new in taken.append.events)
    return (Outcome(own_copy(taken.state), events),)
