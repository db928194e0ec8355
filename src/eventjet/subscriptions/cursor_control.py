"""What `init` and operators change of cursors: make, divide anew, pause, move, and resolve parked events.

Each change is one compare-and-set of the cursor, together with what it changes in the quarantine. It fences the worker
that has the cursor: that one begins another session, and finds what was decided.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from eventjet.codec.headers import MSG_ID, RawRecord, header
from eventjet.codec.subjects import cursor_name, declared_name
from eventjet.domain.parked import BLOCKED, DROPPED, PARKED, RETRY
from eventjet.domain.reactor import Start, partition_of
from eventjet.errors import CursorFenced, EventjetError, LogUnusable, StreamMissing, UsageError
from eventjet.jetstream.api import delete_consumer, message_at, stream_info
from eventjet.jetstream.client import Client
from eventjet.log.store import EventStore
from eventjet.projections.fold import is_of
from eventjet.sql.quarantine import Listed, Shown, VerdictOutcome
from eventjet.subscriptions.cursor import PAUSED, Cursor
from eventjet.subscriptions.cursor_store import CHANGES_MAX, CursorEntry, Cursors, ParkedEntry
from eventjet.subscriptions.declarations import Declaration, missing_stream

T = TypeVar("T")

_TRIES = 50
"""Writes that its owner was quicker than: it writes some times a second."""
RecordAt: TypeAlias = Callable[[int], Awaitable[RawRecord | None]]
"""The record at a position; None for none."""
_Change: TypeAlias = Callable[[Cursor], Cursor]


@dataclass(frozen=True, slots=True)
class PausedCursor:
    """What came of pausing or resuming one reactor or process."""

    name: str
    revision: int
    state: str
    position: int
    changed: bool
    """False where it was so already."""


async def listed(cursors: Cursors, name: str, *, resolved: bool = False) -> list[Listed]:
    """The parked events of one quarantine with how many each blocks; also what was decided before, if asked for."""
    stored = await cursors.read(name)
    entries = await cursors.parked(name, resolved=resolved)
    return [_listed(stored.cursor, entry, entries) for entry in entries if entry.parked.resolution != BLOCKED]


async def first_listed(cursors: Cursors, name: str, limit: int) -> tuple[list[Listed], bool]:
    """As `listed`, of so many entries at the most; and whether there may be others."""
    stored = await cursors.read(name)
    entries = await cursors.parked(name, resolved=True, limit=limit)
    still = [entry for entry in entries if entry.is_open]
    heads = [_listed(stored.cursor, entry, still) for entry in still if entry.parked.resolution != BLOCKED]
    return heads, len(entries) >= limit


async def shown(cursors: Cursors, name: str, position: int) -> Shown | None:
    """One event of a quarantine, whole but for its body, which is in the log; None when it is not there."""
    stored = await cursors.read(name)
    entries = await cursors.parked(name, resolved=True)
    entry = next((one for one in entries if one.position == position), None)
    if entry is None:
        return None
    blocked_by = _head(entry, entries) if entry.parked.resolution == BLOCKED else None
    return Shown(_listed(stored.cursor, entry, entries), entry.parked.traceback, None, blocked_by)


async def waiting(cursors: Cursors, head: Listed) -> list[Listed]:
    """The events that wait behind a parked one, in order."""
    stored, entries = await cursors.read(head.projection), await cursors.parked(head.projection)
    behind = [one for one in entries if one.key == (head.aggregate, head.aggregate_id)]
    return [_listed(stored.cursor, one, entries) for one in behind if one.parked.resolution == BLOCKED]


async def retry(cursors: Cursors, name: str, positions: Sequence[int] | None) -> list[int]:
    """Have parked events tried again, all of them where none is named; raises `UsageError` for what is not parked."""
    return await _decide(cursors, name, positions, RETRY)


async def drop(cursors: Cursors, name: str, positions: Sequence[int]) -> list[int]:
    """Give parked events up; what they block is tried. Raises `UsageError` for what is not parked."""
    return await _decide(cursors, name, positions, DROPPED)


async def outcomes(cursors: Cursors, name: str, positions: Sequence[int]) -> list[VerdictOutcome]:
    """What has become of verdicts, and what blocks the aggregate of each now: one that failed again does itself."""
    entries = await cursors.parked(name, resolved=True)
    by_position = {entry.position: entry for entry in entries}
    found: list[VerdictOutcome] = []
    for position in positions:
        entry = by_position.get(position)
        if entry is None:
            continue
        mismatch = (None, None, "")
        if (head := _blocking(entry, entries)) is not None:
            resolution = head.parked.resolution
            # With nothing parked before it, a worker is to try what was blocked.
            mismatch = (head.position, RETRY if resolution == BLOCKED else resolution, head.parked.reason)
        found.append(VerdictOutcome(position, entry.parked.resolution, entry.parked.reason, *mismatch))
    return found


def _blocking(entry: ParkedEntry, entries: Sequence[ParkedEntry]) -> ParkedEntry | None:
    """What the others of its aggregate wait for now, which may be the entry itself; None where nothing waits."""
    same = [one for one in entries if one.key == entry.key and one.is_open]
    return next((one for one in same if one.parked.resolution != BLOCKED), same[0] if same else None)


async def pause(cursors: Cursors, names: Sequence[str]) -> list[PausedCursor]:
    """Let them stand still until `resume`; their workers stop when they write their cursors next, within a lease."""
    return [await _changed(cursors, name, Cursor.paused) for name in names]


async def resume(cursors: Cursors, names: Sequence[str]) -> list[PausedCursor]:
    """Let them go on; raises `UsageError` for one that is not paused, where no other partition of it is, either."""
    stored = {name: (await cursors.read(name)).cursor for name in names}
    paused = {declared_name(name) for name, cursor in stored.items() if cursor.state == PAUSED}
    for name, cursor in stored.items():
        if declared_name(name) not in paused:
            raise UsageError(f"{cursor.kind} {name!r} is {cursor.state}, not paused. Nothing to resume.")
    return [await _changed(cursors, name, Cursor.resumed) for name in names]


async def give_up_lost(cursors: Cursors, name: str, log: str, record_at: RecordAt) -> list[int]:
    """Drop what is parked of events that this log does not have: it is another, or was restored. Their positions."""

    async def give_up() -> list[int]:
        lost = [
            one
            for one in await cursors.parked(name)
            if one.log != log or not is_of(one.parked.event_id, await record_at(one.position))
        ]
        await _decided(cursors, name, [one.resolved(DROPPED) for one in lost])
        return [one.position for one in lost]

    return await _unfenced(give_up)


async def set_position(cursors: Cursors, cursor: Cursor) -> None:
    """Put a cursor where this one stands, whoever works on it."""
    await _written(cursors, cursor.name, lambda found: found.set_to(cursor.log, cursor.position, cursor.event_id))


async def _changed(cursors: Cursors, name: str, change: _Change) -> PausedCursor:
    before = (await cursors.read(name)).cursor
    after = await _written(cursors, name, change)
    return PausedCursor(name, max(after.revision, 1), after.state, after.position, before.state != after.state)


async def _written(cursors: Cursors, name: str, change: _Change) -> Cursor:
    async def write() -> Cursor:
        stored = await cursors.read(name)
        await cursors.write(stored, change(stored.cursor))
        return stored.cursor

    return await _unfenced(write)


async def _decide(cursors: Cursors, name: str, positions: Sequence[int] | None, resolution: str) -> list[int]:
    await cursors.read(name)  # which is not there where `init` has not made it

    async def decide() -> list[int]:
        heads = [one for one in await cursors.parked(name) if one.parked.resolution in (PARKED, RETRY)]
        chosen = _chosen(name, heads, positions)
        await _decided(cursors, name, [one.resolved(resolution) for one in chosen])
        return [one.position for one in chosen]

    return await _unfenced(decide)


async def _unfenced(write: Callable[[], Awaitable[T]]) -> T:
    """Read and write, again where its owner was quicker; raises `CursorFenced` where that does not end."""
    for left in reversed(range(_TRIES)):
        try:
            return await write()
        except CursorFenced:
            if not left:
                raise
    raise AssertionError


async def _decided(cursors: Cursors, name: str, entries: Sequence[ParkedEntry]) -> None:
    """Write them, on the cursor as it is now: between its reading and its writing its owner must not have moved it.

    So it is not read before many entries are, which takes longer than its owner leaves it alone.
    """
    if not entries:
        return
    stored = await cursors.read(name)
    for start in range(0, len(entries), CHANGES_MAX):
        await cursors.decide(stored, stored.cursor.decided(), entries[start : start + CHANGES_MAX])


def _chosen(name: str, heads: Sequence[ParkedEntry], positions: Sequence[int] | None) -> list[ParkedEntry]:
    if positions is None:
        return list(heads)
    known = {one.position: one for one in heads}
    for position in positions:
        if position not in known:
            raise UsageError(
                f"The event at position {position} is not parked by {name!r}: it may wait behind another one. "
                f"Look at `eventjet quarantine list {name}`."
            )
    return [known[position] for position in dict.fromkeys(positions)]


def _head(entry: ParkedEntry, entries: Sequence[ParkedEntry]) -> int | None:
    return next((one.position for one in entries if one.key == entry.key and one.is_open), None)


def _listed(cursor: Cursor, entry: ParkedEntry, entries: Sequence[ParkedEntry]) -> Listed:
    parked = entry.parked
    behind = [one for one in entries if one.key == entry.key and one.parked.resolution == BLOCKED]
    is_head = entry.is_open and _head(entry, entries) == entry.position
    return Listed(
        projection=cursor.name,
        revision=cursor.revision,
        position=parked.position,
        aggregate=parked.aggregate,
        aggregate_id=parked.aggregate_id,
        event_id=parked.event_id,
        event_type=parked.event_type,
        resolution=parked.resolution,
        reason=parked.reason,
        parked_at=entry.parked_at,
        resolved_at=entry.resolved_at,
        blocked=len(behind) if is_head else 0,
    )


_SILENT_S = 5.0
"""A worker writes its cursors more often than this."""
_MOVES_MAX = CHANGES_MAX // 2 - 64
"""Parked events that fit into one write with the cursors: each is put in one place and taken from another."""


async def begin(
    cursors: Cursors, store: EventStore, client: Client, declared: Iterable[Declaration]
) -> tuple[list[tuple[str, int]], list[LogUnusable]]:
    """Make the cursors that are missing, where their declarations start; names and positions.

    Here and once: if the first worker did it, what is new would depend on when that one comes up. An inbox whose stream
    does not exist has none yet, and is among the errors returned. Raises `UsageError` where a reactor has another
    number of partitions than its cursors, and they cannot be divided anew; all others have theirs then.
    """
    wanted: defaultdict[str, list[Declaration]] = defaultdict(list)
    for one in declared:
        wanted[one.declared_as].append(one)
    made: list[tuple[str, int]] = []
    unusable: list[LogUnusable] = []
    refused: UsageError | None = None
    for name, parts in wanted.items():
        had = await cursors.of(name)
        if {found.name for found in had} == {one.name for one in parts}:
            continue
        try:
            if had:
                at = _where_they_stand(parts, [(await cursors.read(found.name)).cursor for found in had])
                fresh = await _divide_anew(cursors, client, had, parts, at)
            else:
                try:
                    at = await cursor_at(store, client, parts[0], parts[0].start)
                except LogUnusable as error:
                    if not parts[0].stream:
                        raise
                    unusable.append(error)
                    continue
                fresh = await _make(cursors, parts, at)
        except UsageError as error:
            refused = refused or error
        else:
            made += [(one.name, one.position) for one in fresh]
    if refused is not None:
        raise refused
    return made, unusable


async def cursor_at(store: EventStore, client: Client, one: Declaration, start: Start) -> Cursor:
    """A cursor where something is to go on; raises `UsageError` for a position that is not there.

    Raises `LogUnusable` for an inbox whose stream does not exist.
    """
    if one.stream:
        try:
            foreign = await client.ask(stream_info(one.stream))
        except StreamMissing:
            raise missing_stream(one.name, one.stream) from None
        log, last, record = foreign.created, foreign.last, None
        position = _position(start, last)
    else:
        state = await store.state()
        log, last = state.identity, state.last
        position = _position(start, last)
        record = await store.at(position) if position else None
    if position > last or (position and record is None and not one.stream):
        raise UsageError(
            f"{one.name!r} cannot stand at position {position}: the log ends at {last}. Give one that is in it."
        )
    event_id = "" if record is None else header(record[3], MSG_ID) or ""
    return Cursor(one.name, one.kind, log, position, event_id, began=position)


async def where(cursors: Cursors, parts: Sequence[Declaration]) -> tuple[int, int] | None:
    """Where the partitions of something stand that is furthest behind, and furthest ahead; None for no cursor."""
    names = {one.name for one in parts}
    had = await cursors.of(parts[0].declared_as)
    own = [found.cursor for found in had if found.name in names] or [found.cursor for found in had]
    positions = [cursor.position for cursor in own if cursor is not None]
    return (min(positions), max(positions)) if positions else None


async def put(
    cursors: Cursors, client: Client, parts: Sequence[Declaration], at: Cursor, record_at: RecordAt
) -> list[int]:
    """Have something go on there, all of its partitions or some, whoever works on them.

    What is parked of events that `record_at` does not find is dropped: their log is another, or was restored; the
    positions. Raises `UsageError` where all have to be put there, and where they are divided anew and a worker is at
    one of them.
    """
    name, names = parts[0].declared_as, {one.name for one in parts}
    had = await cursors.of(name)
    intact = {found.name for found in had if found.cursor is not None}
    if names <= intact:
        lost = [position for one in names for position in await give_up_lost(cursors, one, at.log, record_at)]
        for one in names:
            await set_position(cursors, replace(at, name=one))
        return sorted(lost)
    if len(parts) < parts[0].partitions:
        raise UsageError(
            f"Some cursors of {name!r} are not there, or cannot be read. Run `eventjet init`, or put all of them "
            f"somewhere (`eventjet cursor set {name} POSITION`)."
        )
    if not had:
        await _make(cursors, parts, at)
        return []
    return await _divide_at(cursors, client, had, parts, at, record_at)


def records_of(store: EventStore, client: Client, one: Declaration) -> RecordAt:
    """What finds a record of the stream that something follows."""

    async def record_at(position: int) -> RawRecord | None:
        return await (client.ask(message_at(one.stream, position)) if one.stream else store.at(position))

    return record_at


async def _make(cursors: Cursors, parts: Sequence[Declaration], at: Cursor) -> list[Cursor]:
    """Those that are missing, all of them or none; none where another was quicker."""
    fresh = [replace(at, name=one.name) for one in parts]
    try:
        await cursors.divide((), fresh, ())
    except CursorFenced:
        return []
    return fresh


async def _divide_at(
    cursors: Cursors,
    client: Client,
    had: Sequence[CursorEntry],
    parts: Sequence[Declaration],
    at: Cursor,
    record_at: RecordAt,
) -> list[int]:
    """Divide anew at a position that somebody names; the positions of what is parked of events that are lost."""
    lost: list[int] = []

    async def judged(entry: ParkedEntry) -> ParkedEntry:
        if entry.log == at.log and is_of(entry.parked.event_id, await record_at(entry.position)):
            return entry
        lost.append(entry.position)
        return entry.resolved(DROPPED)

    parked = [(found.name, await judged(one)) for found in had for one in await cursors.parked(found.name)]
    await _divide_anew(cursors, client, had, parts, at, parked)
    return sorted(lost)


async def _divide_anew(
    cursors: Cursors,
    client: Client,
    had: Sequence[CursorEntry],
    parts: Sequence[Declaration],
    at: Cursor,
    parked: Sequence[tuple[str, ParkedEntry]] | None = None,
) -> list[Cursor]:
    """The cursors of another number of partitions, in the place of those that are there, at one position."""
    mismatch = _mismatch(parts, len(had))
    await _check_silent(cursors, mismatch, had)
    if parked is None:
        parked = [(found.name, entry) for found in had for entry in await cursors.parked(found.name)]
    if len(parked) > _MOVES_MAX:
        raise UsageError(
            f"{mismatch} With them {len(parked)} parked events would move, and {_MOVES_MAX} can at once. Have them "
            "tried again, or drop them, with the release before, then try again."
        )
    moved = [(old, _partition_for(entry, parts), entry) for old, entry in parked]
    before = [found.cursor for found in had if found.cursor is not None]
    paused = any(one.state == PAUSED for one in before)
    revision = max((one.revision for one in before), default=0)
    fresh = [at.divided(one.name, revision, paused=paused) for one in parts]
    try:
        await cursors.divide(had, fresh, moved)
    except CursorFenced:
        raise UsageError(
            f"{mismatch} Somebody wrote one of them just now: a worker, which has to be ended, or another `eventjet`. "
            "Look at `eventjet status`, then try again."
        ) from None
    for found in had:
        with suppress(EventjetError):  # a durable that stays costs next to nothing
            await client.ask(delete_consumer(parts[0].stream or cursors.app, found.name))
    return fresh


def _partition_for(entry: ParkedEntry, parts: Sequence[Declaration]) -> str:
    return cursor_name(parts[0].declared_as, partition_of(entry.key, len(parts)), len(parts))


def _mismatch(parts: Sequence[Declaration], had: int) -> str:
    return f"The app divides {parts[0].declared_as!r} into {len(parts)} and it has {had} cursors."


async def _check_silent(cursors: Cursors, mismatch: str, had: Sequence[CursorEntry]) -> None:
    """Raise `UsageError` where a worker has one of them and writes it; one that was killed has only left its name."""
    if all(found.cursor is None or found.cursor.owner is None for found in had):
        return
    await asyncio.sleep(_SILENT_S)
    for found in had:
        if await cursors.sequence(found.name) != found.sequence:
            raise UsageError(f"{mismatch} A worker is at it: stop those of the release before, then try again.")


def _where_they_stand(parts: Sequence[Declaration], before: Sequence[Cursor]) -> Cursor:
    positions = sorted({one.position for one in before})
    if len(positions) > 1 or any(one.done for one in before):
        raise UsageError(
            f"{_mismatch(parts, len(before))} They stand at {', '.join(map(str, positions))}, and have to stand at one "
            "position to be divided anew. Let the workers of the release before come to the end of the log, then try "
            f"again. Or run `eventjet cursor set {parts[0].declared_as} {positions[0]}`: what comes after that is done "
            "again."
        )
    return before[0]


def _position(start: Start, last: int) -> int:
    return start if isinstance(start, int) else last if start == "new" else 0
