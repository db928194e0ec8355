"""Changes of cursors by `init` and operators: create, divide anew, pause, move, and resolve quarantined events.

Each change is one compare-and-set of the cursor, together with its changes in the quarantine. It fences the worker that
has the cursor: the worker begins another session and reads what was decided.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from eventjet.codec.headers import RawRecord, event_id_of
from eventjet.codec.subjects import cursor_name, declared_name
from eventjet.domain.position import PAUSED
from eventjet.domain.quarantined import BLOCKED, DROPPED, QUARANTINED, RETRY
from eventjet.domain.reactor import Start, partition_of
from eventjet.errors import CursorFenced, EventjetError, LogUnusable, StreamMissing, UsageError
from eventjet.jetstream.api import delete_consumer, message_at, stream_info
from eventjet.jetstream.client import Client
from eventjet.log.store import EventStore
from eventjet.projections.fold import is_of
from eventjet.sql.quarantine import DecisionOutcome, Listed, Shown
from eventjet.sql.revisions import Paused
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import CHANGES_MAX, CursorEntry, Cursors, QuarantinedEntry
from eventjet.subscriptions.declarations import Declaration, missing_stream

T = TypeVar("T")

_TRIES = 50
"""How often a change is tried when the owner writes the cursor first: the owner writes several times a second."""
RecordAt: TypeAlias = Callable[[int], Awaitable[RawRecord | None]]
"""Return the record at a position, or None."""


async def listed(cursors: Cursors, name: str, *, resolved: bool = False) -> list[Listed]:
    """Return the quarantined events of one cursor, each with the number of events that it blocks.

    `resolved` includes events that were retried or dropped before.
    """
    quarantine = await _read(cursors, name)
    return quarantine.listed([entry for entry in quarantine.heads if resolved or entry.is_open])


async def first_listed(cursors: Cursors, name: str, limit: int) -> tuple[list[Listed], bool]:
    """Return what `listed` returns, of at most `limit` entries, and whether there may be more entries."""
    quarantine = await _read(cursors, name, limit)
    return quarantine.listed([entry for entry in quarantine.heads if entry.is_open]), len(quarantine.entries) >= limit


async def shown(cursors: Cursors, name: str, position: int) -> Shown | None:
    """Return one event of a quarantine, without its body, which is in the log; None when it is not there."""
    quarantine = await _read(cursors, name)
    entry = next((candidate for candidate in quarantine.entries if candidate.position == position), None)
    if entry is None:
        return None
    (event,) = quarantine.listed([entry])
    first = quarantine.open_of(entry)[0].position if entry.event.resolution == BLOCKED else None
    return Shown(event, entry.event.traceback, None, first)


async def waiting(cursors: Cursors, head: Listed) -> list[Listed]:
    """Return the events that are blocked behind a quarantined event, in order."""
    quarantine = await _read(cursors, head.projection)
    key = (head.aggregate, head.aggregate_id)
    blocked = [entry for entry in quarantine.entries if entry.key == key and entry.event.resolution == BLOCKED]
    return quarantine.listed(blocked)


async def outcomes(cursors: Cursors, name: str, positions: Sequence[int]) -> list[DecisionOutcome]:
    """Return what became of resolved events, and which event blocks the aggregate of each of them now.

    An event that failed again blocks its aggregate itself.
    """
    quarantine = await _read(cursors, name)
    by_position = {entry.position: entry for entry in quarantine.entries}
    results: list[DecisionOutcome] = []
    for entry in filter(None, map(by_position.get, positions)):
        candidates = quarantine.open_of(entry)
        failed = [candidate for candidate in candidates if candidate.event.resolution != BLOCKED]
        blocker = (None, None, "")
        if head := next(iter([*failed, *candidates]), None):
            resolution = head.event.resolution
            # With no quarantined event before it, a worker is to try the blocked event.
            blocker = (head.position, RETRY if resolution == BLOCKED else resolution, head.event.reason)
        results.append(DecisionOutcome(entry.position, entry.event.resolution, entry.event.reason, *blocker))
    return results


@dataclass(frozen=True, slots=True)
class _Quarantine:
    """The quarantine of one cursor as it was read: entries by position."""

    cursor: Cursor
    entries: Sequence[QuarantinedEntry]

    @property
    def heads(self) -> list[QuarantinedEntry]:
        """The entries that do not only wait behind another one."""
        return [entry for entry in self.entries if entry.event.resolution != BLOCKED]

    def open_of(self, entry: QuarantinedEntry) -> list[QuarantinedEntry]:
        """Return the open entries of the same aggregate."""
        return [candidate for candidate in self.entries if candidate.key == entry.key and candidate.is_open]

    def listed(self, entries: Sequence[QuarantinedEntry]) -> list[Listed]:
        return [self._listed(entry) for entry in entries]

    def _listed(self, entry: QuarantinedEntry) -> Listed:
        event, candidates = entry.event, self.open_of(entry)
        is_first = bool(candidates) and candidates[0].position == entry.position
        return Listed(
            projection=self.cursor.name,
            revision=self.cursor.revision,
            position=event.position,
            aggregate=event.aggregate,
            aggregate_id=event.aggregate_id,
            event_id=event.event_id,
            event_type=event.event_type,
            resolution=event.resolution,
            reason=event.reason,
            quarantined_at=entry.quarantined_at,
            resolved_at=entry.resolved_at,
            blocked=sum(each.event.resolution == BLOCKED for each in candidates) if is_first else 0,
        )


async def _read(cursors: Cursors, name: str, limit: int | None = None) -> _Quarantine:
    """Read the quarantine of a cursor, resolved events included. Raises `CursorMissing`."""
    stored = await cursors.read(name)
    return _Quarantine(stored.cursor, await cursors.quarantined(name, resolved=True, limit=limit))


async def retry(cursors: Cursors, name: str, positions: Sequence[int] | None) -> list[int]:
    """Have quarantined events, all for None, tried again; return positions. Raises `UsageError` for another event."""
    return await _resolve(cursors, name, positions, RETRY)


async def drop(cursors: Cursors, name: str, positions: Sequence[int]) -> list[int]:
    """Give up quarantined events, so that those behind them are tried; return positions. Raises `UsageError`."""
    return await _resolve(cursors, name, positions, DROPPED)


async def pause(cursors: Cursors, names: Sequence[str]) -> list[Paused]:
    """Pause these cursors until `resume`; their workers stop at their next write of the cursor, within a lease."""
    return [await _apply(cursors, name, Cursor.paused) for name in names]


async def resume(cursors: Cursors, names: Sequence[str]) -> list[Paused]:
    """Resume these cursors; raises `UsageError` where no named partition of a reactor is paused."""
    stored = {name: (await cursors.read(name)).cursor for name in names}
    paused = {declared_name(name) for name, cursor in stored.items() if cursor.state == PAUSED}
    for name, cursor in stored.items():
        if declared_name(name) not in paused:
            raise UsageError(f"{cursor.kind} {name!r} is {cursor.state}, not paused. Nothing to resume.")
    return [await _apply(cursors, name, Cursor.resumed) for name in names]


async def give_up_lost(cursors: Cursors, name: str, log: str, record_at: RecordAt) -> list[int]:
    """Drop quarantined events that this log, another one or one restored, does not have; return positions."""

    async def give_up() -> list[int]:
        lost = [entry for entry in await cursors.quarantined(name) if await _is_lost(entry, log, record_at)]
        await _write_resolved(cursors, name, [entry.resolved(DROPPED) for entry in lost])
        return [entry.position for entry in lost]

    return await _retry_fenced(give_up)


async def set_position(cursors: Cursors, cursor: Cursor) -> None:
    """Move the stored cursor of this name to the log and position of `cursor`; its owner is fenced."""
    await _apply(cursors, cursor.name, lambda current: current.set_to(cursor.log, cursor.position, cursor.event_id))


async def _apply(cursors: Cursors, name: str, change: Callable[[Cursor], Cursor]) -> Paused:
    """Replace a cursor, whose owner is fenced."""

    async def write() -> Paused:
        stored = await cursors.read(name)
        before = stored.cursor
        after = change(before)
        await cursors.write(stored, after)
        return Paused(name, max(after.revision, 1), after.state, after.position, before.state != after.state)

    return await _retry_fenced(write)


async def _resolve(cursors: Cursors, name: str, positions: Sequence[int] | None, resolution: str) -> list[int]:
    await cursors.read(name)  # raises where `init` has not created the cursor

    async def decide() -> list[int]:
        heads = [head for head in await cursors.quarantined(name) if head.event.resolution in (QUARANTINED, RETRY)]
        chosen = _select(name, heads, positions)
        await _write_resolved(cursors, name, [entry.resolved(resolution) for entry in chosen])
        return [entry.position for entry in chosen]

    return await _retry_fenced(decide)


async def _retry_fenced(write: Callable[[], Awaitable[T]]) -> T:
    """Run a read and write again while the owner writes first; raises `CursorFenced` after `_TRIES` tries."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return await write()
        except CursorFenced:
            if not tries_left:
                raise
    raise AssertionError


async def _write_resolved(cursors: Cursors, name: str, entries: Sequence[QuarantinedEntry]) -> None:
    """Write resolved entries with their cursor, read after them: its owner writes before many entries are read."""
    if not entries:
        return
    stored = await cursors.read(name)
    for start in range(0, len(entries), CHANGES_MAX):
        await cursors.decide(stored, stored.cursor.decided(), entries[start : start + CHANGES_MAX])


def _select(name: str, heads: Sequence[QuarantinedEntry], positions: Sequence[int] | None) -> list[QuarantinedEntry]:
    if positions is None:
        return list(heads)
    by_position = {head.position: head for head in heads}
    for position in positions:
        if position not in by_position:
            raise UsageError(
                f"The event at position {position} is not quarantined by {name!r}: it may wait behind another one. "
                f"Look at `eventjet quarantine list {name}`."
            )
    return [by_position[position] for position in dict.fromkeys(positions)]


_SILENT_S = 5.0
"""A worker writes its cursors more often than this, in seconds."""
_MOVES_MAX = CHANGES_MAX // 2 - 64
"""Quarantined events that fit into one write with the cursors: each takes two messages, one to add, one to remove."""


async def create_missing_cursors(
    cursors: Cursors, store: EventStore, client: Client, declared: Iterable[Declaration]
) -> tuple[list[tuple[str, int]], list[LogUnusable]]:
    """Create the missing cursors at the start positions of their declarations.

    Returns the names and positions of the new cursors, and an error for each inbox whose stream does not exist: it gets
    no cursor yet. `init` does this once: if the first worker did it, the start position "new" would depend on when that
    worker comes up. Raises `UsageError` where a reactor has another number of partitions than it has cursors and the
    cursors cannot be divided anew; the cursors of all other declarations exist by then.
    """
    by_name: defaultdict[str, list[Declaration]] = defaultdict(list)
    for declaration in declared:
        by_name[declaration.declared_as].append(declaration)
    created: list[tuple[str, int]] = []
    unusable: list[LogUnusable] = []
    first_error: UsageError | None = None
    for name, parts in by_name.items():
        existing = await cursors.of(name)
        if {cursor_entry.name for cursor_entry in existing} == {part.name for part in parts}:
            continue
        try:
            if existing:
                target = _common_cursor(parts, [(await cursors.read(entry.name)).cursor for entry in existing])
                await _divide_anew(cursors, client, existing, parts, target)
            else:
                target = await cursor_at(store, client, parts[0], parts[0].start)
                if not await _create_cursors(cursors, parts, target):
                    continue
            created += [(part.name, target.position) for part in parts]
        except LogUnusable as error:
            if not parts[0].stream or existing:
                raise
            unusable.append(error)
        except UsageError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    return created, unusable


async def cursor_at(store: EventStore, client: Client, declaration: Declaration, start: Start) -> Cursor:
    """Return a cursor at a start position of the declaration's stream, without writing it.

    Raises `UsageError` for a position that the stream does not have, and `LogUnusable` for an inbox whose stream does
    not exist.
    """
    if declaration.stream:
        try:
            stream_state = await client.ask(stream_info(declaration.stream))
        except StreamMissing:
            raise missing_stream(declaration.name, declaration.stream) from None
        log, last = stream_state.created, stream_state.last
    else:
        state = await store.state()
        log, last = state.identity, state.last
    position = start if isinstance(start, int) else last if start == "new" else 0
    record = await store.at(position) if position and not declaration.stream else None
    if position > last or (position and record is None and not declaration.stream):
        raise UsageError(
            f"{declaration.name!r} cannot stand at position {position}: the log ends at {last}. Give one that is in it."
        )
    event_id = "" if record is None else event_id_of(record)
    return Cursor(declaration.name, declaration.kind, log, position, event_id, began=position)


async def position_range(cursors: Cursors, parts: Sequence[Declaration]) -> tuple[int, int] | None:
    """Return the lowest and the highest position among the cursors of these partitions; None without any cursor."""
    names = {part.name for part in parts}
    existing = await cursors.of(parts[0].declared_as)
    selected = [cursor_entry.cursor for cursor_entry in existing if cursor_entry.name in names] or [
        cursor_entry.cursor for cursor_entry in existing
    ]
    positions = [cursor.position for cursor in selected if cursor is not None]
    return (min(positions), max(positions)) if positions else None


async def move_cursors(
    cursors: Cursors, client: Client, parts: Sequence[Declaration], target: Cursor, record_at: RecordAt
) -> list[int]:
    """Move some or all partitions of a subscription to the position of `target`; workers that have them are fenced.

    Quarantined events that `record_at` does not find are dropped, since they are of another log or the log was
    restored; returns their positions. Raises `UsageError` when cursors are missing or unreadable and `parts` are not
    all partitions, and when the cursors have to be divided anew while a worker has one of them.
    """
    name, names = parts[0].declared_as, {part.name for part in parts}
    existing = await cursors.of(name)
    intact = {cursor_entry.name for cursor_entry in existing if cursor_entry.cursor is not None}
    if names <= intact:
        lost = [
            position
            for part_name in names
            for position in await give_up_lost(cursors, part_name, target.log, record_at)
        ]
        for part_name in names:
            await set_position(cursors, replace(target, name=part_name))
        return sorted(lost)
    if len(parts) < parts[0].partitions:
        raise UsageError(
            f"Some cursors of {name!r} are not there, or cannot be read. Run `eventjet init`, or put all of them "
            f"somewhere (`eventjet cursor set {name} POSITION`)."
        )
    if not existing:
        await _create_cursors(cursors, parts, target)
        return []
    return await _divide_anew(cursors, client, existing, parts, target, record_at)


def records_of(store: EventStore, client: Client, declaration: Declaration) -> RecordAt:
    """Return the function that reads a record of the stream that the declaration follows."""

    async def record_at(position: int) -> RawRecord | None:
        return await (
            client.ask(message_at(declaration.stream, position)) if declaration.stream else store.at(position)
        )

    return record_at


async def _create_cursors(cursors: Cursors, parts: Sequence[Declaration], target: Cursor) -> bool:
    """Create the cursors of all partitions or none; False when somebody else created one first."""
    try:
        await cursors.divide((), [replace(target, name=part.name) for part in parts], ())
    except CursorFenced:
        return False
    return True


async def _divide_anew(
    cursors: Cursors,
    client: Client,
    existing: Sequence[CursorEntry],
    parts: Sequence[Declaration],
    target: Cursor,
    record_at: RecordAt | None = None,
) -> list[int]:
    """Replace the cursors that exist with those of another number of partitions, all at one position.

    Drops the quarantined events that `record_at` does not find, if it is given, and returns their positions.
    """
    mismatch = _mismatch(parts, len(existing))
    await _check_silent(cursors, mismatch, existing)
    lost: list[int] = []
    moved: list[tuple[str, str, QuarantinedEntry]] = []
    for cursor_entry in existing:
        for entry in await cursors.quarantined(cursor_entry.name):
            new_name = cursor_name(parts[0].declared_as, partition_of(entry.key, len(parts)), len(parts))
            if record_at is not None and await _is_lost(entry, target.log, record_at):
                lost.append(entry.position)
                entry = entry.resolved(DROPPED)
            moved.append((cursor_entry.name, new_name, entry))
    if len(moved) > _MOVES_MAX:
        raise UsageError(
            f"{mismatch} With them {len(moved)} quarantined events would move, and {_MOVES_MAX} can at once. Have them "
            "tried again, or drop them, with the release before, then try again."
        )
    previous = [cursor_entry.cursor for cursor_entry in existing if cursor_entry.cursor is not None]
    paused = any(cursor.state == PAUSED for cursor in previous)
    revision = max((cursor.revision for cursor in previous), default=0)
    try:
        await cursors.divide(existing, [target.divided(part.name, revision, paused=paused) for part in parts], moved)
    except CursorFenced:
        raise UsageError(
            f"{mismatch} Somebody wrote one of them just now: a worker, which has to be ended, or another `eventjet`. "
            "Look at `eventjet status`, then try again."
        ) from None
    for cursor_entry in existing:
        with suppress(EventjetError):  # a durable that is left behind costs next to nothing
            await client.ask(delete_consumer(parts[0].stream or cursors.app, cursor_entry.name))
    return sorted(lost)


async def _is_lost(entry: QuarantinedEntry, log: str, record_at: RecordAt) -> bool:
    """Return whether this log does not have the event, since it is another log or was restored."""
    return entry.log != log or not is_of(entry.event.event_id, await record_at(entry.position))


def _mismatch(parts: Sequence[Declaration], existing_count: int) -> str:
    return f"The app divides {parts[0].declared_as!r} into {len(parts)} and it has {existing_count} cursors."


async def _check_silent(cursors: Cursors, mismatch: str, existing: Sequence[CursorEntry]) -> None:
    """Raise `UsageError` when a live worker writes one of the cursors; a killed worker only left its name there."""
    if all(cursor_entry.cursor is None or cursor_entry.cursor.owner is None for cursor_entry in existing):
        return
    await asyncio.sleep(_SILENT_S)
    for cursor_entry in existing:
        if await cursors.sequence(cursor_entry.name) != cursor_entry.sequence:
            raise UsageError(f"{mismatch} A worker is at it: stop those of the release before, then try again.")


def _common_cursor(parts: Sequence[Declaration], cursors: Sequence[Cursor]) -> Cursor:
    positions = sorted({cursor.position for cursor in cursors})
    if len(positions) > 1 or any(cursor.done for cursor in cursors):
        raise UsageError(
            f"{_mismatch(parts, len(cursors))} They stand at {', '.join(map(str, positions))}, and have to stand at "
            "one position to be divided anew. Let the workers of the release before come to the end of the log, "
            f"then try again. Or run `eventjet cursor set {parts[0].declared_as} {positions[0]}`: what comes after "
            "that is done again."
        )
    return cursors[0]
