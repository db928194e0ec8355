"""Load aggregates of one type: from snapshot and log, at an earlier time, and what a command recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Any, Generic, TypeVar

from eventjet.codec.catalog import Catalog
from eventjet.codec.commands import request_in
from eventjet.codec.headers import (
    BATCH_ID,
    COMMAND,
    RECORDED_AT,
    VERSION,
    RawRecord,
    context_headers,
    event_id_of,
    header,
    number_of,
    open_batch,
    recorded_at,
    save_of,
)
from eventjet.codec.records import Decoder
from eventjet.commands.history import Bounds, HistoryReader
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.history import FoldedState, Link, fold_history
from eventjet.domain.moment import check_moment
from eventjet.domain.recorded import NO_METADATA, Recorded, own_event
from eventjet.errors import (
    CodecError,
    EventjetError,
    HistoryBroken,
    LogIncomplete,
    SaveTorn,
    StoreUnavailable,
    UsageError,
)
from eventjet.log.snapshots import KeyValueSnapshots, SnapshotCodec
from eventjet.log.store import LAG_PAUSES_S, EventStore
from eventjet.text import shown

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snapshots(Generic[S]):
    """Where an aggregate type keeps its snapshots, how they are encoded, and after how many events one is due."""

    store: KeyValueSnapshots
    codec: SnapshotCodec[S]
    every: int


@dataclass(frozen=True, slots=True)
class FirstOutcome(Generic[S]):
    """What a command recorded when it was executed first."""

    after: FoldedState[S]
    """The state after its last event."""
    events: list[Recorded[Any]]
    """The recorded events, without retired events."""
    request: str | None
    """Digest of the request, if it was recorded."""
    position: int
    """Position of the first event."""
    batch: str | None
    """The atomic batch of the save; None for a single event, empty if a restored log does not say."""


def fold_records(folded: FoldedState[S], records: Sequence[RawRecord], decoder: Decoder) -> FoldedState[S]:
    """Fold the next records of one aggregate; raises `HistoryBroken`, `CodecError` and `DefinitionError`."""
    if not records:
        return folded
    last = records[-1]
    return fold_history(folded, map(decoder.link, records), last[2].decode("utf-8", "replace"), event_id_of(last))


class Histories(Generic[S]):
    """The reader of one aggregate type's histories, which it folds into states; it keeps only skip markers."""

    def __init__(
        self, store: EventStore, catalog: Catalog, initial: Callable[[], S], snapshots: Snapshots[S] | None = None
    ) -> None:
        self.store = store
        self.info = aggregate_info(initial)
        self._initial = initial
        self._snapshots = snapshots
        self._decoder = Decoder(catalog)
        self._skipped = catalog.skipped
        self._reader = HistoryReader(store, self.info.name, self._decoder, self._skipped)

    async def load(self, aggregate_id: str, cached: FoldedState[S] | None) -> FoldedState[S]:
        """Return the newest state: `cached`, or a snapshot, and the events after it. Raises `HistoryBroken`."""
        try:
            return await (self._fold_after(aggregate_id, cached) if cached else self._from_snapshot(aggregate_id))
        except (HistoryBroken, CodecError) as error:
            # A lost reply looks the same as a broken history, so read again from the start before raising.
            if not await self._read_skip_markers() and isinstance(error, CodecError):
                raise
            return await self._fold(aggregate_id, self._initial_state())

    def followed(self, folded: FoldedState[S], record: RawRecord) -> FoldedState[S] | None:
        """Fold the next event into a state; None if that fails, and then a read of the log raises the reason."""
        try:
            return self._fold_page(folded, [record])
        except EventjetError:
            return None

    def folded_first(self, event: Recorded[Any]) -> FoldedState[S] | None:
        """Return the state after an aggregate's first event; None if the fold fails, and then a load raises why."""
        link = Link(event.version, event.position, 0, event.command_id, own_event(event).data)
        try:
            return fold_history(self._initial_state(), [link], event.aggregate_id, event.event_id)
        except EventjetError:
            return None

    async def load_until(
        self, aggregate_id: str, *, version: int | None, position: int | None, at: datetime | None
    ) -> FoldedState[S]:
        """Return the state at the one given bound; raises `UsageError` for one beyond the end, or to come."""
        await self._check_bound(version, position, at)

        bound: Any = next(bound for bound in (version, position, at) if bound is not None)

        def measure(record: RawRecord) -> Any:
            if version is not None:
                return number_of(record[3], VERSION) or 0
            return record[0] if position is not None else recorded_at(record)

        def reaches(record: RawRecord) -> bool:
            return measure(record) > bound if at is not None else measure(record) >= bound

        async def read() -> FoldedState[S]:
            history = await self._read_until(aggregate_id, reaches)
            # Stop at the first later event: events that other programs wrote behind it may have any time.
            records = list(takewhile(lambda record: measure(record) <= bound, history))
            if version is not None and len(records) < version:
                raise UsageError(
                    f"{self.info.name} {aggregate_id!r} has {len(records)} events, so there is no version {version}. "
                    "Ask for one that exists."
                )
            return self._fold_page(self._initial_state(), records)

        return await self._with_skip_markers(read)

    async def outcome(self, aggregate_id: str, first: int, last: int, command_id: str) -> FirstOutcome[S] | None:
        """Return what a command recorded as versions `first` to `last`.

        None if the log has no such events of the command, so that the versions are from another log. Raises `SaveTorn`
        if these are not all the events that the command was to record.
        """

        async def read() -> FirstOutcome[S] | None:
            history = await self._read_until(aggregate_id, lambda record: (number_of(record[3], VERSION) or 0) >= last)
            records, recorded = history[:last], history[first - 1 : last]
            if len(records) < last or header(recorded[0][3], COMMAND) != _escaped(command_id):
                return None
            await self._check_not_torn(recorded)
            events = [event for event in map(self._decoder, recorded) if event is not None]
            position, _, _, block, _ = recorded[0]
            after = self._fold_page(self._initial_state(), records)
            batch = save_of(block) if header(block, RECORDED_AT) is None else ""
            return FirstOutcome(after, events, request_in(block), position, batch)

        return await self._with_skip_markers(read)

    async def _check_not_torn(self, records: Sequence[RawRecord]) -> None:
        """Raise `SaveTorn` if the last record does not end its batch and the next record does not continue it."""
        position, _, subject, block, _ = records[-1]
        batch = open_batch(block)
        if batch is None:
            return
        following = await self.store.at(position + 1)  # in a restored log, batches are cut elsewhere and may go on
        if following is None or header(following[3], BATCH_ID) != batch:
            raise SaveTorn([subject.decode()], [*map(event_id_of, records)])

    async def events(self, aggregate_id: str, bounds: Bounds) -> list[Recorded[Any]]:
        """Return recorded events of one aggregate, without retired events; raises as `Repository.history`."""
        bounds.check()
        end = await self.store.last(self.info.name, aggregate_id) if self.store.may_lag else 0
        return await self._with_skip_markers(lambda: self._reader.read(aggregate_id, bounds, end))

    async def find_command(
        self, aggregate_id: str, folded: FoldedState[S], command_id: str, since: int | None = None
    ) -> tuple[int, int] | None:
        """Return the first and the last version that a command recorded; None if it is not known.

        The state knows the newest 1,024 commands, and has marks of older commands. The whole history is searched only
        for an id that has a mark, and never with a snapshot policy, where a state may lack older marks. `since` is a
        position before which the command cannot have been recorded: then only later events are searched.
        """
        version_range = folded.commands.find(command_id)
        if version_range is not None or not folded.commands.may_have(command_id):
            return version_range
        if since is not None:
            escaped_ids = {_escaped(command_id)}
            return next(
                iter((await self.commands_since(aggregate_id, folded, since, escaped_ids.__contains__)).values()), None
            )
        if self._snapshots is not None:
            return None
        # Only headers are compared, so that retired events count as well.
        records = await self._with_skip_markers(
            lambda: self._read_until(aggregate_id, lambda record: record[0] >= folded.position)
        )
        escaped_id = _escaped(command_id)
        versions = [index for index, record in enumerate(records, 1) if header(record[3], COMMAND) == escaped_id]
        return (versions[0], versions[-1]) if versions else None

    async def commands_since(
        self, aggregate_id: str, folded: FoldedState[S], since: int, selects: Callable[[str], bool]
    ) -> dict[str, tuple[int, int]]:
        """Return (first, last) version by id of commands recorded after a position; `selects` gets escaped ids."""
        records = await self._after_position(aggregate_id, since, folded.position)
        versions: dict[str, tuple[int, int]] = {}
        for record in records:
            escaped_id, version = header(record[3], COMMAND), number_of(record[3], VERSION)
            if escaped_id is not None and version is not None and selects(escaped_id):
                versions[escaped_id] = (min(versions.get(escaped_id, (version, 0))[0], version), version)
        return versions

    async def _after_position(self, aggregate_id: str, after: int, until: int) -> list[RawRecord]:
        """Return the records after a position, at least up to `until`; raises `StoreUnavailable` if a replica lags."""
        name = self.info.name
        for pause_s in LAG_PAUSES_S:
            records = await self.store.history(name, aggregate_id, after=after)
            if until <= after or (records and records[-1][0] >= until):
                return records
            await asyncio.sleep(pause_s)
        raise StoreUnavailable(f"The history of {name} {aggregate_id!r}", "the replica that was asked lags behind")

    def keep(self, aggregate_id: str, before: int, folded: FoldedState[S]) -> None:
        """Queue a snapshot if the policy requires one between version `before` and the state."""
        if self._snapshots is None or folded.version // self._snapshots.every == before // self._snapshots.every:
            return
        codec = self._snapshots.codec
        self._snapshots.store.keep(self.info.name, aggregate_id, lambda: codec.encode(folded))

    def _initial_state(self) -> FoldedState[S]:
        return FoldedState(self._initial(), 0, 0)

    async def _fold_after(self, aggregate_id: str, base: FoldedState[S]) -> FoldedState[S]:
        """Fold the events after `base`, or all events if the log does not contain the last event of `base`."""
        folded = await self._continue(aggregate_id, base) if base.position else None
        if folded is None:
            await self._check_not_deleted(aggregate_id, base)
            base = self._initial_state()
            folded = await self._fold(aggregate_id, base)
        self.keep(aggregate_id, base.version, folded)
        return folded

    async def _continue(self, aggregate_id: str, base: FoldedState[S]) -> FoldedState[S] | None:
        """Fold the events after `base`; None if the log has another event, or none, at the position of `base`."""
        folded: FoldedState[S] | None = None
        async for page in self.store.pages(self.info.name, aggregate_id, after=base.position - 1):
            if folded is None:
                if not page:
                    continue
                if page[0][0] != base.position or event_id_of(page[0]) != base.event_id:
                    return None
                folded, page = base, page[1:]
            folded = self._fold_page(folded, page)
        if folded is None and await self.store.last(self.info.name, aggregate_id) >= base.position:
            return base  # the replica lags behind
        return folded

    async def _from_snapshot(self, aggregate_id: str) -> FoldedState[S]:
        if self._snapshots is None:
            return await self._fold_after(aggregate_id, self._initial_state())
        # The last record is requested together with the snapshot: it shows whether the snapshot is the newest state.
        snapshot_task = asyncio.create_task(self._snapshots.store.get(self.info.name, aggregate_id))
        try:
            newest = await self.store.newest(self.info.name, aggregate_id)
            value = await snapshot_task
        finally:
            snapshot_task.cancel()
        folded = None if value is None else self._snapshots.codec.decode(value)
        if folded is None or newest is None or newest[0] < folded.position:
            # There is no snapshot, it cannot be decoded, or it is beyond the end of the log: replay.
            if folded is not None:
                await self._check_not_deleted(aggregate_id, folded)
            if newest is None:
                return self._initial_state()
            if number_of(newest[3], VERSION) != 1:
                return await self._fold_after(aggregate_id, self._initial_state())
            folded = self._fold_page(self._initial_state(), [newest])  # the newest event is the only event
            self.keep(aggregate_id, 0, folded)
            return folded
        if newest[0] == folded.position and event_id_of(newest) == folded.event_id:
            return folded
        return await self._fold_after(aggregate_id, folded)

    async def _check_not_deleted(self, aggregate_id: str, base: FoldedState[S]) -> None:
        """Raise `LogIncomplete` if the last event of `base` was deleted from the log.

        A log that was created again, or restored from a backup, has another event at its position or ends before it.
        """
        if not base.position or await self.store.at(base.position) is not None:
            return
        if base.position <= (await self.store.state()).last:
            where = f"The history of {self.info.name} {aggregate_id!r}"
            raise LogIncomplete(where, f"its event {base.version} was at position {base.position} and is gone")

    async def _fold(self, aggregate_id: str, folded: FoldedState[S]) -> FoldedState[S]:
        """Fold the events after a state; each page is folded while the next page travels."""
        async for page in self.store.pages(self.info.name, aggregate_id, after=folded.position):
            folded = self._fold_page(folded, page)
        return folded

    async def _read_until(self, aggregate_id: str, reaches: Callable[[RawRecord], bool]) -> list[RawRecord]:
        """Return the history, without gaps, at least up to a record for which `reaches` is true, or else to its end.

        The leader says where the end is. Raises `StoreUnavailable` if a replica stays behind, and `HistoryBroken`.
        """
        name = self.info.name
        records = await self.store.history(name, aggregate_id)
        for pause_s in LAG_PAUSES_S:
            position = records[-1][0] if records else 0
            if (records and reaches(records[-1])) or await self.store.last(name, aggregate_id) <= position:
                return self._one_per_version(records)
            await asyncio.sleep(pause_s)
            records += await self.store.history(name, aggregate_id, after=position)
        raise StoreUnavailable(f"The history of {name} {aggregate_id!r}", "the replica that was asked lags behind")

    def _one_per_version(self, records: Sequence[RawRecord]) -> list[RawRecord]:
        """Return one record for each version; raises `HistoryBroken`."""
        valid_records: list[RawRecord] = []
        for record in records:
            if number_of(record[3], VERSION) == len(valid_records) + 1:
                valid_records.append(record)
            elif record[0] not in self._skipped:
                subject = record[2].decode("utf-8", "replace")
                raise HistoryBroken(subject, record[0], f"version {len(valid_records) + 1} is missing")
        return valid_records

    async def _with_skip_markers(self, read: Callable[[], Awaitable[T]]) -> T:
        """Run `read`, and run it again if the history was broken or an error came with new skip markers in the log.

        A lost reply looks the same as a broken history, so `HistoryBroken` is raised only after the second read.
        """
        try:
            return await read()
        except (HistoryBroken, CodecError) as error:
            if not await self._read_skip_markers() and isinstance(error, CodecError):
                raise
        return await read()

    async def _read_skip_markers(self) -> bool:
        """Read the skip markers; return whether there are new ones."""
        count_before = len(self._skipped)
        self._skipped.update(await self.store.skip_markers())
        return len(self._skipped) > count_before

    def _fold_page(self, folded: FoldedState[S], records: Sequence[RawRecord]) -> FoldedState[S]:
        return fold_records(folded, records, self._decoder)

    async def _check_bound(self, version: int | None, position: int | None, at: datetime | None) -> None:
        if sum(bound is not None for bound in (version, position, at)) != 1:
            raise UsageError("Give one of version, position and at.")
        for name, number in (("version", version), ("position", position)):
            if number is not None and not isinstance(number, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"The {name} is given as {shown(number, 60)}. Give a whole number.")
        if version is not None and version < 0:
            raise UsageError(f"There is no version {version}. Versions start at 1; 0 is the initial state.")
        if at is not None:
            check_moment("The time to load at is", at)
        if position is not None and not 0 <= position <= (last := (await self.store.state()).last):
            raise UsageError(f"The log ends at position {last}; {position} is not in it. Give one that is.")


def _escaped(command_id: str) -> str:
    """Return a command id as it stands in its header, escaped."""
    ((_, value),) = context_headers(command_id, NO_METADATA)
    return value
