"""The log in memory: the executable specification of `EventStore`, and the store of fast tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from datetime import datetime
from itertools import islice
from uuid import uuid4

from eventjet.codec.headers import RawRecord, batch_blocks, logged_at, reason_in, skipped_by
from eventjet.codec.subjects import subject_of, type_subjects
from eventjet.domain.blob import CHUNK_BYTES, Blob
from eventjet.errors import BlobMissing, ConcurrencyConflict, Refused
from eventjet.log.store import (
    Append,
    EventStore,
    LogState,
    ObjectStore,
    changed_content,
    check_save,
    event_lines,
    wrong_size,
)


class MemoryObjects(ObjectStore):
    """Large bodies in memory."""

    name = "in memory"

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}

    async def claim(self, digest: str, size: int) -> bool:
        if digest in self._bodies and len(self._bodies[digest]) != size:
            raise wrong_size(digest, size, len(self._bodies[digest]))
        return digest in self._bodies

    async def put(self, content: AsyncIterator[bytes], digest: str = "") -> tuple[str, int]:
        body = b"".join([piece async for piece in content])
        blob = Blob.of(body)
        if digest not in ("", blob.digest):
            raise changed_content(digest, blob.digest)
        self._bodies[blob.digest] = body
        return blob.digest, blob.size

    async def size(self, digest: str) -> int | None:
        return len(self._bodies[digest]) if digest in self._bodies else None

    async def chunks(self, digest: str, size: int | None = None) -> AsyncIterator[bytes]:
        if digest not in self._bodies:
            raise BlobMissing(digest, self.name)
        if size not in (None, len(self._bodies[digest])):
            raise wrong_size(digest, size, len(self._bodies[digest]))
        for start in range(0, len(self._bodies[digest]), CHUNK_BYTES):
            yield self._bodies[digest][start : start + CHUNK_BYTES]


class MemoryStore(EventStore):
    """A log in memory, all records in one list. Reads never lag; an append is atomic because nothing in it awaits."""

    def __init__(self, app: str, clock: Callable[[], int] = time.time_ns) -> None:
        """Create an empty log; `clock` returns nanoseconds since 1970."""
        self.app = app
        self.objects = MemoryObjects()
        self._clock = clock
        self._records: list[RawRecord] = []
        self._last: dict[str, int] = {}
        self._ids: set[str] = set()
        self._identity = str(uuid4())
        self._growth = asyncio.Condition()

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def is_confirmed(self) -> bool:
        return True

    @property
    def missing_range(self) -> str:
        return ""

    async def at(self, position: int) -> RawRecord | None:
        return self._records[position - 1] if 0 < position <= len(self._records) else None

    async def confirm(self) -> bool:
        return True

    async def append(self, writes: Sequence[Append]) -> int:
        check_save(self.app, writes)
        subjects = [subject_of(self.app, write.aggregate, write.aggregate_id) for write in writes]
        for subject, write in zip(subjects, writes, strict=True):
            if self._last.get(subject, 0) != write.expected:
                raise ConcurrencyConflict(subject, write.expected)
        ids = [event.event_id for write in writes for event in write.events]
        if len(set(ids)) < len(ids) or not self._ids.isdisjoint(ids):
            raise Refused("A save", "one of its event ids is in the log already", "Give every event an id of its own.")
        self._ids.update(ids)
        time_ns = self._clock()
        events = [
            (subject, event_lines(write, index), event.encoded.body)
            for subject, write in zip(subjects, writes, strict=True)
            for index, event in enumerate(write.events)
        ]
        blocks = batch_blocks([lines for _, lines, _ in events])
        for (subject, _, body), block in zip(events, blocks, strict=True):
            position = len(self._records) + 1
            self._records.append((position, time_ns, subject.encode(), block, body))
            self._last[subject] = position
        async with self._growth:
            self._growth.notify_all()
        return len(self._records)

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[RawRecord]:
        subject = subject_of(self.app, aggregate, aggregate_id).encode()
        records = (record for record in islice(self._records, max(after, 0), None) if record[2] == subject)
        return list(islice(records, limit))

    async def pages(self, aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        yield await self.history(aggregate, aggregate_id, after=after)

    async def last(self, aggregate: str, aggregate_id: str) -> int:
        return self._last.get(subject_of(self.app, aggregate, aggregate_id), 0)

    async def tail(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        return await self.newest(aggregate, aggregate_id)

    async def newest(self, aggregate: str, aggregate_id: str) -> RawRecord | None:
        position = await self.last(aggregate, aggregate_id)
        return self._records[position - 1] if position else None

    async def newest_of(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], RawRecord]:
        newest = [(key, await self.newest(*key)) for key in keys]
        return {key: record for key, record in newest if record is not None}

    async def ends(self, aggregate: str) -> tuple[int, int]:
        positions = [record[0] async for page in self.pages_of(aggregate) for record in page]
        return (positions[0], positions[-1]) if positions else (0, 0)

    async def pages_of(self, aggregate: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
        prefix = type_subjects(self.app, aggregate).removesuffix("*").encode()
        yield [record for record in self._records[max(after, 0) :] if record[2].startswith(prefix)]

    async def position_at(self, at: datetime) -> int:
        return next((record[0] for record in self._records if logged_at(record) >= at), len(self._records) + 1)

    async def skip_markers(self) -> dict[int, str]:
        markers = ((skipped_by(subject), body) for _, _, subject, _, body in self._records)
        return {position: reason_in(body) for position, body in markers if position is not None}

    async def state(self) -> LogState:
        return LogState(self._identity, 1, len(self._records))

    async def records_from(self, start: int, limit: int) -> list[RawRecord]:
        index = max(start, 1) - 1
        return self._records[index : index + limit]

    async def records(
        self, *, start: int = 1, until: int | None = None, follow: bool = False
    ) -> AsyncGenerator[RawRecord]:
        position = max(start, 1)
        while until is None or position <= until:
            while position <= len(self._records) and (until is None or position <= until):
                yield self._records[position - 1]
                position += 1
            if not follow or (until is not None and position > until):
                return
            async with self._growth:
                await self._growth.wait_for(lambda: len(self._records) >= position)  # noqa: B023  called within the turn
