"""`ProcessRunner`: lets a process instance hear events, take steps, and come due.

Each of these is one append, which the sequence of the instance's own subject fences. A step is what the state says is
next: the decisions of the other aggregate and of the process are made on the newest states and recorded together, or
not at all. So a step cannot be done twice, whoever tries, without an outbox and without ids to match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from eventjet import failpoints
from eventjet.codec.headers import recorded_at
from eventjet.commands.execute import Conflict, Decision, Executor, Planned, append, retry
from eventjet.commands.repository import Repositories, Repository
from eventjet.domain.decision import Committed
from eventjet.domain.history import FoldedState
from eventjet.domain.process import (
    Call,
    Deadline,
    Listener,
    Outcome,
    ProcessInfo,
    Step,
    deadlines_of,
    heard_prefix,
    step_of,
)
from eventjet.domain.recorded import Metadata, Recorded, own_event
from eventjet.domain.state import own_copy
from eventjet.errors import EventjetError, NotUnique, UsageError
from eventjet.observability import spans, tracing

STEPS_MAX = 200
"""Most steps without rest: more than this counts as a circle."""


@dataclass(frozen=True, slots=True)
class NextDeadline:
    """The earliest deadline of a state."""

    at: datetime
    deadline: Deadline[Any, Any]


class _Moved(Exception):
    pass


class ProcessRunner:
    """Runs the instances of one process type over one connection, one task at a time for each instance."""

    def __init__(self, repositories: Repositories, cls: Any, info: ProcessInfo) -> None:
        self.info = info
        self.name = info.name
        self._repositories = repositories
        self._repository: Repository[Any, Any] = repositories.of(cls)
        self._own_executor: Executor[Any, Any] = self._repository.executor
        self.store = repositories.store
        """The event store that holds the process instances."""
        self.steps = 0
        """Number of steps that this runner has taken."""

    async def state(self, process_id: str) -> FoldedState[Any]:
        """Return the newest state of a process instance."""
        return await self._own_executor.newest(process_id)

    def cache_first(self, event: Recorded[Any]) -> None:
        """Cache the state after the first event of an instance, so that its first step needs no read of it."""
        self._own_executor.cache_first(event)

    async def advance(self, process_id: str, *, position: int = 0) -> FoldedState[Any]:
        """Take steps until the instance rests, from a state that contains `position`; return the last state.

        Raises `UsageError` for steps that record nothing, that concern the process itself or that never end, what a
        decision raises that its step does not name, and what `EventStore` raises.
        """
        for _ in range(STEPS_MAX):
            folded = await self._own_executor.reaching(process_id, position=position)
            step = step_of(folded.state)
            if step is None:
                return folded
            position = max(position, await self._take(process_id, folded, step))
        raise UsageError(
            f"{self._instance_name(process_id)} took {STEPS_MAX} steps without rest. Let it come to an end."
        )

    async def hear(self, process_id: str, listener: Listener, event: Recorded[Any], *, is_late: bool = False) -> None:
        """Record what the listener decides about an event, once.

        An event at or before the last one that the instance recorded something for comes again, after a crash, and is
        passed over. One that was quarantined (`is_late`) comes after later events, and is heard nevertheless.
        """
        plan = Planned(
            self._own_executor,
            process_id,
            lambda state: listener.handler(state, own_event(event)),
            called=listener.handler,
            command_id=f"{heard_prefix(self.name)}{event.position}",
            metadata=self._metadata(process_id, event.event_id, event.metadata.correlation),
            since=event.position,
        )
        while True:
            folded = await self._own_executor.reaching(process_id)
            if not is_late and await self._heard_until(process_id, folded, event.position) >= event.position:
                return
            committed = await self._repository.run(replace(plan, only_at=folded.position))
            if committed.events or committed.position == folded.position:
                return  # otherwise another worker, or a command, had moved the instance on

    async def come_due(self, process_id: str, version: int, now: datetime) -> None:
        """Record the decision of the earliest deadline if it is due, on a state of at least `version`.

        Nothing is due when the state has moved meanwhile: the newer event sets its own timer.
        """
        folded = await self._own_executor.reaching(process_id, version=version)
        next_deadline = await self.next_deadline(process_id, folded)
        if next_deadline is None or next_deadline.at > now:
            return

        def decide(state: Any) -> Any:
            events = next_deadline.deadline.call.on(state)
            if not events:
                raise self._records_nothing(process_id, f"The deadline {next_deadline.deadline.call}")
            return events

        failpoints.reach("due.before")
        command_id = f"{self._step_id(process_id, folded)}/due"
        metadata = self._metadata(process_id, folded.event_id)
        await self._repository.run(
            Planned(
                self._own_executor,
                process_id,
                decide,
                command_id,
                metadata,
                since=folded.position,
                called=next_deadline.deadline.call.decide,
                only_at=folded.position,
            )
        )
        failpoints.reach("due.stored")

    async def next_deadline(self, process_id: str, folded: FoldedState[Any]) -> NextDeadline | None:
        """Return the earliest deadline of a state; None without any, or when the leader knows a newer state."""
        deadlines = deadlines_of(folded.state)
        if not deadlines:
            return None
        newest = await self.store.tail(self.name, process_id)
        if newest is None or newest[0] != folded.position:
            return None
        last = recorded_at(newest)
        return min(
            (NextDeadline(deadline.due_at(last), deadline) for deadline in deadlines),
            key=lambda candidate: candidate.at,
        )

    async def _take(self, process_id: str, folded: FoldedState[Any], step: Step[Any, Any]) -> int:
        """Take one step unless the instance has moved; return the position that the next state must contain."""
        request = step.request
        target = self._repositories.of(request.aggregate).executor
        places = [
            (executor.subject(aggregate_id), executor.cache, aggregate_id)
            for executor, aggregate_id in ((self._own_executor, process_id), (target, request.aggregate_id))
        ]
        if places[0][0] == places[1][0]:
            raise UsageError(
                f"{self._instance_name(process_id)} asks itself for {request.call}. Put both into one decision "
                "of its own."
            )
        labels = {"eventjet.name": self.name}
        with tracing.span(spans.STEP, self.name, labels, {"eventjet.decision": request.call.name}) as attributes:
            try:
                return await retry(
                    lambda races_lost: self._attempt(process_id, folded, step, races_lost, attributes),
                    places,
                    self.store.save_timeout_s,
                )
            except _Moved:
                return folded.position

    async def _attempt(
        self,
        process_id: str,
        folded: FoldedState[Any],
        step: Step[Any, Any],
        races_lost: int,
        attributes: dict[str, Any],
    ) -> int | Conflict:
        current = await self._own_executor.load(process_id, races_lost > 0)
        if (current.position, current.event_id) != (folded.position, folded.event_id):
            raise _Moved
        request = step.request
        target = self._repositories.of(request.aggregate).executor
        metadata = self._metadata(process_id, folded.event_id)
        command_id = self._step_id(process_id, folded)
        target_plan = Planned(target, request.aggregate_id, request.call.on, command_id, metadata)
        decisions: list[Decision[Any, Any]] = []
        try:
            decision = await target.decide(target_plan, await target.load(request.aggregate_id, races_lost > 0))
        except EventjetError:
            raise
        except Exception as error:
            # `decide` has made sure that the decision raised this on the newest state.
            refusal = step.after_refusal(error)
            if refusal is None:
                raise
            own_plan = self._planned(process_id, command_id, metadata, refusal, error)
        else:
            if isinstance(decision, Conflict):
                return decision
            if decision.append is not None:
                decisions.append(decision)
            own_plan = self._planned(process_id, command_id, metadata, step.done, *_outcome_of(step, decision))
        try:
            result = await self._record(decisions, own_plan, current, f"The step {request}", attributes)
        except NotUnique as error:
            refusal = step.after_refusal(error)
            if refusal is None:
                raise
            own_plan = self._planned(process_id, command_id, metadata, refusal, error)
            result = await self._record([], own_plan, current, f"The step {request}", attributes)
        if isinstance(result, Conflict):
            return result
        failpoints.reach("step.stored")
        self.steps += 1
        return result.position

    async def _record(
        self,
        decisions: Sequence[Decision[Any, Any]],
        own_plan: Planned[Any, Any],
        current: FoldedState[Any],
        action: str,
        attributes: dict[str, Any] | None = None,
    ) -> Committed[Any, Any] | Conflict:
        """Record the process's own decision together with the decisions of others; return what was committed."""
        decision = await self._own_executor.decide(own_plan, current)
        if isinstance(decision, Conflict):
            return decision
        if decision.append is None:
            raise self._records_nothing(own_plan.aggregate_id, action)
        failpoints.reach("step.decided")
        result = await append(self.store, [*decisions, decision], attributes)
        return result if isinstance(result, Conflict) else result[-1]

    def _planned(
        self, process_id: str, command_id: str, metadata: Metadata, call: Call, *first: Any
    ) -> Planned[Any, Any]:
        def decide(state: Any) -> Any:
            return call.on(state, *first)

        return Planned(self._own_executor, process_id, decide, command_id, metadata)

    async def _heard_until(self, process_id: str, folded: FoldedState[Any], position: int) -> int:
        """Return the position of the last event that the instance heard and recorded something for; 0 for none."""
        prefix = heard_prefix(self.name)
        if folded.commands.complete:
            ids = [
                command_id for command_id in folded.commands.as_mapping(folded.version) if command_id.startswith(prefix)
            ]
        else:
            # An instance records its answer to an event after that event.
            since = await self._own_executor.histories.commands_since(
                process_id, folded, position, lambda quoted_id: unquote(quoted_id).startswith(prefix)
            )
            ids = [unquote(quoted_id) for quoted_id in since]
        heard = [command_id.removeprefix(prefix) for command_id in ids]
        return max((int(position) for position in heard if position.isdecimal()), default=0)

    def _step_id(self, process_id: str, folded: FoldedState[Any]) -> str:
        return f"{self.name}/{process_id}/{folded.version}"

    def _metadata(self, process_id: str, causation: str, correlation: str | None = None) -> Metadata:
        return Metadata(
            correlation=correlation or f"{self.name}:{process_id}", causation=causation, actor=f"process:{self.name}"
        )

    def _records_nothing(self, process_id: str, action: str) -> UsageError:
        return UsageError(
            f"{action} of {self._instance_name(process_id)} recorded nothing of its own, so it would be done for ever. "
            "Have its decision return an event."
        )

    def _instance_name(self, process_id: str) -> str:
        return f"{self.name} {process_id!r}"


def _outcome_of(step: Step[Any, Any], decision: Decision[Any, Any]) -> tuple[Outcome[Any, Any], ...]:
    """Return the outcome to pass to the process's decision first, if the step asks for it."""
    if not step.takes_outcome:
        return ()
    events = () if decision.append is None else tuple(own_copy(new.encoded.event) for new in decision.append.events)
    return (Outcome(own_copy(decision.state), events),)
