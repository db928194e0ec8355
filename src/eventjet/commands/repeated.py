"""Commands that come again: what came of them the first time, one by one and in a transaction.

A transaction is one save, so the log holds what all of its commands recorded, or nothing of any. Whatever else is found
was not made by this transaction, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from eventjet.codec.commands import is_same_request
from eventjet.domain.committed import Committed
from eventjet.domain.history import FoldedState
from eventjet.errors import CommandReused, ConcurrencyConflict, Refused, UsageError
from eventjet.log.store import BATCH_MAX

if TYPE_CHECKING:
    from eventjet.commands.decisions import Planned

S = TypeVar("S")
E = TypeVar("E")

_REMEDY = "Nothing was stored now. Repeat a transaction with all of its members, or give it ids that are new."


@dataclass(frozen=True, slots=True)
class Repeated(Generic[S, E]):
    """A command that was recorded before."""

    done: Committed[S, E]
    """The answer it got, or would have got."""
    position: int
    """Of its first event."""
    batch: str | None
    """As `FirstOutcome.batch`."""


def check_ids(plans: Sequence[Planned[Any, Any]]) -> None:
    """Raise `UsageError` where only some members of a transaction have a command id."""
    bare = [plan for plan in plans if plan.command_id is None]
    if bare and len(bare) < len(plans):
        raise UsageError(
            f"A transaction has a member without a command id, {_shown(bare[0])}, and others with one, so what came of "
            "it could not be told when it is repeated. Give all of its members an id, or none."
        )


async def repeated(plan: Planned[S, E], held: FoldedState[S]) -> Repeated[S, E] | ConcurrencyConflict | None:
    """What came of a command that was recorded before; None for one that the state does not know.

    A conflict where the state is of another log. Raises `CommandReused` for another request, `SaveTorn` and what reads
    raise.
    """
    if plan.command_id is None:
        return None
    repository = plan.repository
    versions = await repository.histories.find_command(plan.aggregate_id, held, plan.command_id, plan.since)
    if versions is None:
        return None
    found = await repository.histories.outcome(plan.aggregate_id, *versions, plan.command_id)
    if found is None:
        return ConcurrencyConflict(repository.subject(plan.aggregate_id), held.position)
    if found.request is not None and plan.request is not None and not is_same_request(found.request, plan.request):
        raise CommandReused(plan.command_id, _shown(plan), versions[0], found.request, plan.request)
    done = repository.answer(found.after, tuple(cast("E", event.data) for event in found.events))
    return Repeated(done, found.position, found.batch)


async def all_repeated(
    plans: Sequence[Planned[Any, Any]], held: Sequence[FoldedState[Any]]
) -> tuple[Committed[Any, Any], ...] | ConcurrencyConflict | None:
    """What came of a transaction that was recorded before; None for one whose commands no state knows.

    A conflict where a state turns out not to be the newest. Raises `Refused` for commands of which only some were
    recorded, or not in one save; and what `repeated` raises.
    """
    found: list[Repeated[Any, Any] | None] = []
    for plan, known in zip(plans, held, strict=True):
        one = await repeated(plan, known)
        if isinstance(one, ConcurrencyConflict):
            return one
        found.append(one)
    first = next((one for one in found if one is not None), None)
    if first is None:
        return None
    for index, (plan, known) in enumerate(zip(plans, held, strict=True)):
        if found[index] is None:
            # It may be beyond the commands that are remembered, or in events that this state has not seen.
            one = await repeated(replace(plan, since=max(0, first.position - BATCH_MAX)), known)
            one = one or await plan.repository.outdated(plan.aggregate_id, known)
            if isinstance(one, ConcurrencyConflict):
                return one
            found[index] = one
    return _of_one_save(plans, found)


def _of_one_save(
    plans: Sequence[Planned[Any, Any]], found: Sequence[Repeated[Any, Any] | None]
) -> tuple[Committed[Any, Any], ...]:
    """The answers; raises `Refused` where they are not those of one save.

    A log that was restored does not tell its batches: there they are no further apart than one batch is long.
    """
    known = [(plan, one) for plan, one in zip(plans, found, strict=True) if one is not None]
    plan, first = known[0]
    for other, one in zip(plans, found, strict=True):
        if one is None:
            reason = f"{_told(plan, first)}, and {_shown(other)} never recorded its command {other.command_id!r}"
            raise Refused("A transaction", reason, _REMEDY)
        is_near = abs(one.position - first.position) < BATCH_MAX
        if one is not first and (one.batch is None or one.batch != first.batch or not is_near):
            reason = f"{_told(plan, first)}, and {_told(other, one)}, in another save"
            raise Refused("A transaction", reason, _REMEDY)
    return tuple(one.done for _, one in known)


def _told(plan: Planned[Any, Any], one: Repeated[Any, Any]) -> str:
    return f"{_shown(plan)} recorded its command {plan.command_id!r} at position {one.position}"


def _shown(plan: Planned[Any, Any]) -> str:
    return f"{plan.repository.info.name} {plan.aggregate_id!r}"
