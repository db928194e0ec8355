"""Where what follows the log begins: its cursors are made by `init`, and divided anew when the app says so."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from eventjet.codec.envelope import MSG_ID, RawRecord, header
from eventjet.cursors.cursor import PAUSED, Cursor
from eventjet.cursors.kv import CHANGES_MAX, Cursors, HeldCursor, ParkedEntry
from eventjet.domain.reactor import Start, partition_of
from eventjet.errors import CursorDamaged, CursorFenced, LogUnusable, StreamMissing, UsageError
from eventjet.nats.api import message_at, stream_info
from eventjet.nats.client import Client
from eventjet.reactions.following import Declaration, cursor_name
from eventjet.reactions.verdicts import RecordAt, give_up_lost, set_position
from eventjet.store.store import EventStore

_SILENT_S = 5.0
"""A worker writes its cursors more often than this."""
_AT_IT = " A worker is at it: stop those of the release before, then try again."
_MOVES_MAX = CHANGES_MAX // 2 - 64
"""Parked events that fit into one write with the cursors: each is put in one place and taken from another."""


async def begin(
    cursors: Cursors, store: EventStore, client: Client, declared: Iterable[Declaration]
) -> list[tuple[str, int]]:
    """Make the cursors that are missing, where their declarations start; names and positions.

    Here and once: if the first worker did it, what is new would depend on when that one comes up. Raises `UsageError`
    where a reactor has another number of partitions than its cursors, and they cannot be divided anew.
    """
    wanted: defaultdict[str, list[Declaration]] = defaultdict(list)
    for one in declared:
        wanted[one.declared_as].append(one)
    made: list[tuple[str, int]] = []
    for name, parts in wanted.items():
        had = await _cursors_of(cursors, name)
        if _named(had) == _names(parts):
            continue
        if had:
            fresh = await _divide_anew(cursors, name, had, parts)
        else:
            first = await cursor_at(store, client, parts[0], parts[0].start)
            fresh = [replace(first, name=one.name) for one in parts]
            try:
                await cursors.divide((), fresh, ())
            except CursorFenced:
                continue  # another `init` was quicker
        made += [(one.name, one.position) for one in fresh]
    return made


async def cursor_at(store: EventStore, client: Client, one: Declaration, start: Start) -> Cursor:
    """A cursor where something is to go on; raises `UsageError` for a position that is not there.

    Raises `LogUnusable` for an inbox whose stream does not exist.
    """
    if one.stream:
        try:
            foreign = await client.ask(stream_info(one.stream))
        except StreamMissing:
            what = f"The stream {one.stream!r} of the inbox {one.name!r}"
            raise LogUnusable(what, "it does not exist", "Create it first, or name another.") from None
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
    return Cursor(one.name, one.kind, log, position, event_id, partitions=one.partitions)


async def where(cursors: Cursors, parts: Sequence[Declaration]) -> int | None:
    """Where the furthest behind of something's partitions stands; None where it has no cursor that can be read."""
    try:
        had = await _cursors_of(cursors, parts[0].declared_as)
    except CursorDamaged:
        return None
    names = _names(parts) & _named(had) or _named(had)
    return min((held.cursor.position for held in had if held.cursor.name in names), default=None)


async def put(cursors: Cursors, parts: Sequence[Declaration], at: Cursor, record_at: RecordAt) -> list[int]:
    """Have all partitions of something go on there, whoever works on them.

    What is parked of events that `record_at` does not find is dropped: their log is another, or was restored; the
    positions. Raises `UsageError` where the app divides it anew and a worker still has it.
    """
    name = parts[0].declared_as
    try:
        had = await _cursors_of(cursors, name)
    except CursorDamaged:
        had = []
    is_divided = any(held.cursor.partitions != parts[0].partitions for held in had)
    if is_divided and len(parts) < parts[0].partitions:
        raise UsageError(f"The app divides {name!r} anew. Name {name!r} itself, and not one of its partitions.")
    lost: list[int] = []
    for old in sorted(_named(had) if is_divided else _named(had) & _names(parts)):
        lost += await give_up_lost(cursors, old, at.log, record_at)
    if is_divided:
        await _divide_anew(cursors, name, await _cursors_of(cursors, name), parts, at)
    else:
        for one in parts:
            await _put_one(cursors, replace(at, name=one.name))
    return lost


def records_of(store: EventStore, client: Client, one: Declaration) -> RecordAt:
    """What finds a record of the stream that something follows."""

    async def record_at(position: int) -> RawRecord | None:
        return await (client.ask(message_at(one.stream, position)) if one.stream else store.at(position))

    return record_at


async def _put_one(cursors: Cursors, at: Cursor) -> None:
    try:
        held = await cursors.find(at.name)
    except CursorDamaged:
        held = None
    if held is None:
        await cursors.write(HeldCursor(at, await cursors.sequence(at.name)), at)
    else:
        await set_position(cursors, at)


def _named(had: Sequence[HeldCursor]) -> set[str]:
    return {held.cursor.name for held in had}


def _names(parts: Sequence[Declaration]) -> set[str]:
    return {one.name for one in parts}


async def _cursors_of(cursors: Cursors, name: str) -> list[HeldCursor]:
    """Those that something of this name has, however many it was divided among."""
    found = [await cursors.find(name), first := await cursors.find(cursor_name(name, 0, 2))]
    partitions = 1 if first is None else first.cursor.partitions
    found += [await cursors.find(cursor_name(name, number, partitions)) for number in range(1, partitions)]
    return [held for held in found if held is not None]


async def _divide_anew(
    cursors: Cursors, name: str, had: Sequence[HeldCursor], parts: Sequence[Declaration], at: Cursor | None = None
) -> list[Cursor]:
    """The cursors of another number of partitions, in the place of those that are there, at one position."""
    told = f"The app divides {name!r} into {len(parts)} and it has {len(had)} cursors."
    await _check_silent(cursors, told, had)
    if at is None:
        at = _where_they_stand(told, name, [held.cursor for held in had])
    moved: list[tuple[str, str, ParkedEntry]] = []
    for old in sorted(_named(had)):
        for entry in await cursors.parked(old):
            new = cursor_name(name, partition_of(entry.key, len(parts)), len(parts))
            if new != old:
                moved.append((old, new, entry))
    if len(moved) > _MOVES_MAX:
        raise UsageError(
            f"{told} With them {len(moved)} parked events would move, and {_MOVES_MAX} can at once. Have them tried "
            "again, or drop them, with the release before, then try again."
        )
    paused = any(held.cursor.state == PAUSED for held in had)
    fresh = [at.divided(one.name, one.partitions, paused=paused) for one in parts]
    try:
        await cursors.divide(had, fresh, moved)
    except CursorFenced:
        raise UsageError(told + _AT_IT) from None
    return fresh


async def _check_silent(cursors: Cursors, told: str, had: Sequence[HeldCursor]) -> None:
    """Raise `UsageError` where a worker has one of them and writes it; one that was killed has only left its name."""
    if all(held.cursor.owner is None for held in had):
        return
    await asyncio.sleep(_SILENT_S)
    for held in had:
        if await cursors.sequence(held.cursor.name) != held.sequence:
            raise UsageError(told + _AT_IT)


def _where_they_stand(told: str, name: str, before: Sequence[Cursor]) -> Cursor:
    positions = sorted({one.position for one in before})
    if len(positions) > 1 or any(one.done for one in before):
        raise UsageError(
            f"{told} They stand at {', '.join(map(str, positions))}, and have to stand at one position to be divided "
            "anew. Let the workers of the release before come to the end of the log, then try again. Or run `eventjet "
            f"cursor set {name} {positions[0]}`: what comes after that is done again."
        )
    return max(before, key=lambda one: one.revision)


def _position(start: Start, last: int) -> int:
    return start if isinstance(start, int) else last if start == "new" else 0
