"""Pages of a log for whoever looks at it: backwards and forwards from a position, filtered, each of bounded cost.

The server reads a subject forwards alone. So a page of earlier events is made of windows of positions, each read
forwards, the newest first: they grow while they hold little, and shrink where they hold too much.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from eventjet.codec.headers import ACTOR, COMMAND, CORRELATION, TYPE, RawRecord, header, reason_in, void_subject
from eventjet.codec.subjects import subject_of, type_subjects
from eventjet.errors import StoreUnavailable, StreamMissing
from eventjet.jetstream import api
from eventjet.jetstream.client import Client
from eventjet.log.topology import missing
from eventjet.nats.protocol import Frame

ROWS = 50
"""Events of one page."""
RECORDS_MAX = 20_000
"""Records that are looked at for one page."""
LOOK_S = 0.2
"""How long one page may look for what the server cannot find by itself; one window is always looked at."""
BYTES_MAX = 8_000_000
"""Bytes of a window; one with more in it is made smaller, to a single record if need be."""
_REQUEST = 1_000
_SCAN = 2_000
"""Positions of a window where each record has to be looked at."""


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which events are looked for; what is None is not asked."""

    types: tuple[str, ...] = ()
    """Names of one event, of which one is written."""
    aggregate: str | None = None
    aggregate_id: str | None = None
    actor: str | None = None
    correlation: str | None = None
    command_id: str | None = None

    def subject(self, app: str) -> str | None:
        """What the server selects by; None where it is to give everything. Raises `Refused` for an id that is none."""
        if self.aggregate is None:
            return None
        if self.aggregate_id is None:
            return type_subjects(app, self.aggregate)
        return subject_of(app, self.aggregate, self.aggregate_id)

    @property
    def scans(self) -> bool:
        """Whether records have to be looked at one by one."""
        return bool(self.types or self.actor or self.correlation or self.command_id)

    def takes(self, record: RawRecord) -> bool:
        """Whether a record of the subject is looked for."""
        block = record[3]
        if self.types and header(block, TYPE) not in self.types:
            return False
        wanted = ((ACTOR, self.actor), (CORRELATION, self.correlation), (COMMAND, self.command_id))
        return all(value is None or unquote(header(block, name) or "") == value for name, value in wanted)


@dataclass(slots=True)
class LogPage:
    """Events of one page, in the order of the log, and which positions were looked at for it."""

    records: list[RawRecord] = field(default_factory=list[RawRecord])
    start: int = 0
    """The first position that was looked at."""
    end: int = 0
    """One beyond the last that was looked at."""
    looked: int = 0
    """Records that were looked at."""


async def page_before(client: Client, app: str, end: int, first: int, wanted: LogFilter) -> LogPage:
    """The newest events before position `end`, `ROWS` at the most, not before `first`.

    Where it looked for them and found less, `start` says how far it came. Raises `StoreUnavailable` and `Forbidden`.
    """
    subject, page = wanted.subject(app), LogPage(start=end, end=end)
    deadline = time.monotonic() + LOOK_S
    size = ROWS if subject is None and not wanted.scans else _SCAN
    while page.start > first and len(page.records) < ROWS:
        if page.end > page.start and (time.monotonic() > deadline or page.looked >= RECORDS_MAX):
            break
        begin = max(first, page.start - size)
        window = await _window(client, app, subject, begin, page.start)
        if window is None and page.start - begin > 1:
            size = max(1, (page.start - begin) // 8)
            continue
        window = window or []
        page.looked += len(window)
        found = [record for record in window if wanted.takes(record)]
        missing = ROWS - len(page.records)
        page.records[:0] = found[-missing:]
        # What lies before the oldest event that is shown belongs to the next page.
        page.start = found[-missing][0] if len(found) > missing else begin
        # The server passes over what is of other subjects; what it gives is looked at record by record.
        grows = 8 if not window else 2
        size = size if subject is None else size * grows
    return page


async def page_from(client: Client, app: str, start: int, last: int, wanted: LogFilter) -> LogPage:
    """The oldest events from position `start` on, `ROWS` at the most, not after `last`.

    Where it looked for them and found less, `end` says how far it came. Raises `StoreUnavailable` and `Forbidden`.
    """
    subject, page = wanted.subject(app), LogPage(start=start, end=start)
    deadline = time.monotonic() + LOOK_S
    while page.end <= last and len(page.records) < ROWS:
        if page.end > start and (time.monotonic() > deadline or page.looked >= RECORDS_MAX):
            break
        count = ROWS - len(page.records) if not wanted.scans else _REQUEST
        records, left = await _request(client, app, subject, page.end, count)
        if not records:
            page.end = last + 1
            break
        for record in records:
            if record[0] > last:
                page.end = last + 1
                break
            page.end, page.looked = record[0] + 1, page.looked + 1
            if wanted.takes(record):
                page.records.append(record)
                if len(page.records) == ROWS:
                    break
        if not left and len(page.records) < ROWS:
            page.end = last + 1
    return page


async def ends_of(client: Client, app: str) -> tuple[int, int]:
    """Positions of the first and the last record, (1, 0) for none. Raises `LogUnusable` where `init` is missing."""
    try:
        state = await client.ask(api.stream_info(app))
    except StreamMissing:
        raise missing(app) from None
    return max(1, state.first), state.last


async def news_since(client: Client, app: str, start: int, wanted: LogFilter, most: int) -> tuple[list[RawRecord], int]:
    """(records from a position on as the server selects them, `most` at the most, and how many it has beyond them)."""
    return await _request(client, app, wanted.subject(app), start, most)


async def voids_among(client: Client, app: str, records: Sequence[RawRecord]) -> dict[int, str]:
    """Position → reason of those that the log declares void: a request for each."""
    found = await asyncio.gather(*(client.ask(api.direct_last(app, void_subject(app, one[0]))) for one in records))
    return {one[0]: reason_in(void[4]) for one, void in zip(records, found, strict=True) if void is not None}


def names_of(known: Collection[Sequence[str]], name: str) -> tuple[str, ...]:
    """All names of the event that has this one; itself alone where no event has it."""
    return next((tuple(names) for names in known if name in names), (name,))


async def _window(client: Client, app: str, subject: str | None, start: int, end: int) -> list[RawRecord] | None:
    """The records at `start` <= position < `end`; None where that is more than a window may hold."""
    found: list[RawRecord] = []
    position, size = start, 0
    while position < end:
        records, left = await _request(client, app, subject, position, min(_REQUEST, end - position))
        for record in records:
            if record[0] >= end:
                return found
            found.append(record)
            size += len(record[3]) + len(record[4])
        if not left or not records:
            return found
        if len(found) > RECORDS_MAX // 4 or size > BYTES_MAX:
            return None
        position = records[-1][0] + 1
    return found


async def _request(
    client: Client, app: str, subject: str | None, position: int, count: int
) -> tuple[list[RawRecord], int]:
    """(some records from a position on, how many the server has beyond them); raises `StoreUnavailable`."""
    request = api.direct_page(app, position, subject, count=count, size=BYTES_MAX)
    parts: AsyncGenerator[list[Frame]] = client.stream(request)
    records: list[RawRecord] = []
    try:
        async for frames in parts:
            final = frames.pop() if api.is_status(frames[-1]) else None
            records += [api.direct_record(frame, stream=app) for frame in frames]
            if final is not None:
                last, left = request.parse(final) or (0, 0)
                if last != (records[-1][0] if records else 0):
                    raise StoreUnavailable(request.what, f"records up to position {last} were lost on the way")
                return records, left
    finally:
        await parts.aclose()
    raise StoreUnavailable(request.what, "its end was lost on the way")
