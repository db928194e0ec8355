"""What an aggregate was at a version: folded by its own `evolve`, with states kept along the way so that the next look
is quick; never more than a page can wait for.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eventjet.codec.headers import MSG_ID, RawRecord, header
from eventjet.codec.json import read_json
from eventjet.codec.records import Decoder
from eventjet.codec.subjects import snapshot_bucket
from eventjet.commands.histories import fold_records
from eventjet.commands.repository import Repositories
from eventjet.commands.timeline import version_in
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.history import FoldedState
from eventjet.domain.personal import masked
from eventjet.errors import CodecError, DefinitionError, HistoryBroken, StoreError, Unreachable
from eventjet.jetstream.client import Client
from eventjet.log.snapshot import SnapshotCodec
from eventjet.log.snapshot_store import KeyValueSnapshots
from eventjet.operations.differences import Beside, compared
from eventjet.operations.processes import plain

EVENTS_MAX = 20_000
"""Events that are folded for one look."""
FOLD_S = 1.5
"""How long one look folds."""
_EVERY = 500
"""Events between two states that are kept."""
_KEPT_MAX = 64
"""States of one aggregate."""
_AGGREGATES_MAX = 16


@dataclass(frozen=True, slots=True)
class Folded:
    """What a look came to."""

    held: FoldedState[Any]
    """As far as it came."""
    wanted: int
    """The version that was asked for."""
    fault: str = ""
    """Why it did not come that far."""
    goes_on: bool = False
    """Whether the next look would come farther: only its bound ended this one."""

    @property
    def is_there(self) -> bool:
        return self.held.version == self.wanted


@dataclass(frozen=True, slots=True)
class SnapshotShown:
    """The snapshot of an aggregate."""

    position: int
    version: int
    written_s: float
    """When, in seconds since 1970."""
    size: int
    """Bytes."""
    unused: str
    """Why it is not used; empty where it is."""


@dataclass(slots=True)
class _Known:
    """States of one aggregate by version."""

    states: dict[int, FoldedState[Any]] = field(default_factory=dict[int, FoldedState[Any]])

    def nearest(self, version: int) -> FoldedState[Any] | None:
        below = [one for one in self.states if one <= version]
        return self.states[max(below)] if below else None

    def keep(self, held: FoldedState[Any]) -> None:
        self.states[held.version] = held
        while len(self.states) > _KEPT_MAX:
            # Thinned out, so that what is left still spans all of it.
            ordered = sorted(self.states)
            for version in ordered[1:-1:2]:
                del self.states[version]


class TimeTravel:
    """Of one connection; for any number of tasks of its loop."""

    def __init__(self, repositories: Repositories, client: Client | None) -> None:
        self._repositories = repositories
        self._store = repositories.store
        self._snapshots = None if client is None else KeyValueSnapshots(snapshot_bucket(repositories.app.name), client)
        self._classes = {info.name: cls for cls, info in repositories.app.aggregates.items()}
        self._codecs: dict[str, SnapshotCodec[Any]] = {}
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._log = ("", 0)

    def knows(self, aggregate: str) -> bool:
        """Whether the app says how events of this type fold."""
        return aggregate in self._classes

    def snapshots(self, aggregate: str) -> bool:
        """Whether the app keeps snapshots of this type."""
        return aggregate_info(self._classes[aggregate]).snapshot_every is not None

    async def at(self, aggregate: str, aggregate_id: str, version: int, most: int = EVENTS_MAX) -> Folded:
        """The state at a version, from the nearest known one or the snapshot at or below it; 0 is the initial state.

        `most` events are folded for it, and not more than what is read in 1.5 s.
        Raises what `EventStore` does; what application code raises is a fault of the answer.
        """
        known = self._of(aggregate, aggregate_id)
        held = known.nearest(version) or FoldedState(self._classes[aggregate](), 0, 0)
        if version - held.version > _EVERY:
            snapshot = await self._believable(aggregate, aggregate_id, version)
            held = snapshot if snapshot is not None and snapshot.version > held.version else held
        return await self._fold(known, held, (aggregate, aggregate_id), version, most)

    async def snapshot(self, aggregate: str, aggregate_id: str) -> SnapshotShown | None:
        """What is kept beside the log, whatever it is worth; None for nothing. Raises `StoreError`."""
        if self._snapshots is None:
            return None
        entry = await self._snapshots.entry(aggregate, aggregate_id)
        if entry is None:
            return None
        held = self._decoded(aggregate, entry[4])
        version, position = (held.version, held.position) if held is not None else _told(entry[4])
        unused = ""
        if not self.snapshots(aggregate):
            unused = "the aggregate has no `snapshot_every`"
        elif held is None:
            unused = "it was written by another revision, or with other fields or schemas; the next one replaces it"
        elif not await self._stands(held):
            unused = "its last event is not at its position of this log"
        return SnapshotShown(position, version, entry[1] / 1e9, len(entry[4]), unused)

    def _of(self, aggregate: str, aggregate_id: str) -> _Known:
        log = (self._store.identity, len(self._repositories.catalog.voids))
        if log != self._log:
            self._known.clear()
            self._log = log
        known = self._known.setdefault((aggregate, aggregate_id), _Known())
        self._known.move_to_end((aggregate, aggregate_id))
        if len(self._known) > _AGGREGATES_MAX:
            self._known.popitem(last=False)
        return known

    async def _fold(
        self, known: _Known, held: FoldedState[Any], of: tuple[str, str], version: int, events: int
    ) -> Folded:
        begin, until = held.version, time.monotonic() + FOLD_S
        decoder = Decoder(self._repositories.catalog)
        while held.version < version:
            left = events - (held.version - begin)
            if left <= 0 or time.monotonic() > until:
                why = f"It is {version - begin:,} events from the nearest known state, at version {begin:,}"
                return Folded(held, version, f"{why}; this look came to version {held.version:,}.", goes_on=True)
            most = min(_EVERY, left, version - held.version)
            found = await self._store.history(*of, after=held.position, most=most)
            records = [record for record in found if (version_in(record) or 0) <= version]
            if not records:
                return Folded(held, version, f"The log tells no version {held.version + 1:,} of it here.")
            # In a thread: it is the application's code, and pages are served meanwhile.
            before = held
            held, fault = await asyncio.to_thread(_folded, held, records, decoder)
            if held.version > before.version:
                known.keep(held)
            if fault:
                return Folded(held, version, fault)
            if held.position <= before.position:
                return Folded(held, version, "Its records do not follow one another.")
        return Folded(held, version)

    async def _believable(self, aggregate: str, aggregate_id: str, version: int) -> FoldedState[Any] | None:
        """The snapshot, where it is of this log and not above the version."""
        if self._snapshots is None:
            return None
        try:
            value = await self._snapshots.get(aggregate, aggregate_id)
            held = None if value is None else self._decoded(aggregate, value)
            if held is None or held.version > version or not await self._stands(held):
                return None
        except (StoreError, Unreachable):
            return None  # it only makes folding shorter
        return held

    async def _stands(self, held: FoldedState[Any]) -> bool:
        record = await self._store.at(held.position)
        return record is not None and (header(record[3], MSG_ID) or "") == held.event_id

    def _decoded(self, aggregate: str, value: bytes) -> FoldedState[Any] | None:
        if aggregate not in self._codecs:
            try:
                self._codecs[aggregate] = SnapshotCodec[Any](self._classes[aggregate])
            except DefinitionError:
                return None  # a state that cannot be a snapshot, and need not be
        return self._codecs[aggregate].decode(value)


def difference(before: FoldedState[Any], after: FoldedState[Any]) -> Beside:
    """What differs between two states of an aggregate, with what is personal hidden."""
    states = [plain(one.state) for one in (before, after)]
    shown = [masked(told, type(one.state)) for told, one in zip(states, (before, after), strict=True)]
    return compared(states[0], states[1], shown[0], shown[1])


def _folded(held: FoldedState[Any], records: Sequence[RawRecord], decoder: Decoder) -> tuple[FoldedState[Any], str]:
    """As far as they can be folded, and why not farther."""
    try:
        return fold_records(held, records, decoder), ""
    except (DefinitionError, CodecError, HistoryBroken):
        pass
    for record in records:  # one by one, to know which
        try:
            held = fold_records(held, [record], decoder)
        except DefinitionError as error:
            return held, f"Version {held.version + 1:,}, at position {record[0]:,}: {'; '.join(error.faults)}"
        except (CodecError, HistoryBroken) as error:
            return held, f"Position {record[0]:,}: {error}"
    return held, ""


def _told(value: bytes) -> tuple[int, int]:
    """Version and position that a snapshot tells which this app cannot use; zeros for what tells none."""
    try:
        inner = read_json(value)["snapshot"]
        return int(inner["version"]), int(inner["position"])
    except (ValueError, KeyError, TypeError):
        return 0, 0
