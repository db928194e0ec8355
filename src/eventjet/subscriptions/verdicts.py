"""What people decide about reactors and processes: verdicts on parked events, pauses, another position.

Each is one compare-and-set of the cursor, together with what it changes in the quarantine. It fences whoever works on
it: that one begins another term, and finds what was decided.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from eventjet.codec.headers import RawRecord
from eventjet.codec.subjects import declared_name
from eventjet.domain.parked import BLOCKED, DROPPED, PARKED, RETRY
from eventjet.errors import CursorFenced, UsageError
from eventjet.quarantine.fold import is_of
from eventjet.quarantine.rows import Listed, Shown, VerdictOutcome
from eventjet.subscriptions.cursor import PAUSED, Cursor
from eventjet.subscriptions.cursor_store import CHANGES_MAX, Cursors, ParkedEntry

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
    held = await cursors.read(name)
    entries = await cursors.parked(name, resolved=resolved)
    return [_listed(held.cursor, entry, entries) for entry in entries if entry.parked.resolution != BLOCKED]


async def first_listed(cursors: Cursors, name: str, limit: int) -> tuple[list[Listed], bool]:
    """As `listed`, of so many entries at the most; and whether there may be others."""
    held = await cursors.read(name)
    entries = await cursors.parked(name, resolved=True, limit=limit)
    still = [entry for entry in entries if entry.is_open]
    heads = [_listed(held.cursor, entry, still) for entry in still if entry.parked.resolution != BLOCKED]
    return heads, len(entries) >= limit


async def shown(cursors: Cursors, name: str, position: int) -> Shown | None:
    """One event of a quarantine, whole but for its body, which is in the log; None when it is not there."""
    held = await cursors.read(name)
    entries = await cursors.parked(name, resolved=True)
    entry = next((one for one in entries if one.position == position), None)
    if entry is None:
        return None
    blocked_by = _head(entry, entries) if entry.parked.resolution == BLOCKED else None
    return Shown(_listed(held.cursor, entry, entries), entry.parked.traceback, None, blocked_by)


async def waiting(cursors: Cursors, head: Listed) -> list[Listed]:
    """The events that wait behind a parked one, in order."""
    held, entries = await cursors.read(head.projection), await cursors.parked(head.projection)
    behind = [one for one in entries if one.key == (head.aggregate, head.aggregate_id)]
    return [_listed(held.cursor, one, entries) for one in behind if one.parked.resolution == BLOCKED]


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
        told = (None, None, "")
        if (head := _blocking(entry, entries)) is not None:
            resolution = head.parked.resolution
            # With nothing parked before it, a worker is to try what was blocked.
            told = (head.position, RETRY if resolution == BLOCKED else resolution, head.parked.reason)
        found.append(VerdictOutcome(position, entry.parked.resolution, entry.parked.reason, *told))
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
    held = {name: (await cursors.read(name)).cursor for name in names}
    paused = {declared_name(name) for name, cursor in held.items() if cursor.state == PAUSED}
    for name, cursor in held.items():
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
        held = await cursors.read(name)
        await cursors.write(held, change(held.cursor))
        return held.cursor

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
    held = await cursors.read(name)
    for start in range(0, len(entries), CHANGES_MAX):
        await cursors.decide(held, held.cursor.decided(), entries[start : start + CHANGES_MAX])


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
