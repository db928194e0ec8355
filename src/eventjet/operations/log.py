"""The log as operators see it: pages of events, status, replicas, consumers and account limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from eventjet.codec.headers import ACTOR, COMMAND, CORRELATION, TYPE, RawRecord, header, reason_in, skip_subject
from eventjet.codec.subjects import stream_subjects, subject_of, type_subjects
from eventjet.errors import StoreUnavailable, StreamMissing
from eventjet.jetstream.api import (
    StreamState,
    call,
    direct_last,
    direct_page,
    direct_record,
    is_status,
    last_message,
    nanoseconds,
    stream_info,
)
from eventjet.jetstream.client import Client
from eventjet.log.integrity import missing_range
from eventjet.log.topology import identity_of, missing_stream
from eventjet.nats.protocol import Frame
from eventjet.text import listed

ROWS = 50
"""Events on one page."""
RECORDS_MAX = 20_000
"""Records that are examined for one page at most."""
LOOK_S = 0.2
"""Seconds that a page may search for what the server cannot select by itself; one window is always read."""
BYTES_MAX = 8_000_000
"""Bytes of a window; a larger window is divided, down to a single record if need be."""
_PATIENT_S = 60.0
"""How many seconds after its beginning a move may wait for servers that are not online yet."""
_REQUEST = 1_000
_SCAN = 2_000
"""Positions in a window where each record has to be examined."""


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The conditions of a search in the log; None in a field sets no condition."""

    types: tuple[str, ...] = ()
    """All wire names of one event class: a record matches with any of them."""
    aggregate: str | None = None
    aggregate_id: str | None = None
    actor: str | None = None
    correlation: str | None = None
    command_id: str | None = None

    def subject(self, app: str) -> str | None:
        """Return the subject that the server selects by; None for all records. Raises `Refused` for an invalid id."""
        if self.aggregate is None:
            return None
        if self.aggregate_id is None:
            return type_subjects(app, self.aggregate)
        return subject_of(app, self.aggregate, self.aggregate_id)

    @property
    def scans(self) -> bool:
        """Return whether each record has to be examined, since the server cannot select by every condition."""
        return bool(self.types or self.actor or self.correlation or self.command_id)

    def takes(self, record: RawRecord) -> bool:
        """Return whether a record of the subject meets the other conditions."""
        block = record[3]
        if self.types and header(block, TYPE) not in self.types:
            return False
        conditions = ((ACTOR, self.actor), (CORRELATION, self.correlation), (COMMAND, self.command_id))
        return all(value is None or unquote(header(block, name) or "") == value for name, value in conditions)


@dataclass(slots=True)
class LogPage:
    """Events of one page in the order of the log, and the positions that were searched for them."""

    records: list[RawRecord] = field(default_factory=list[RawRecord])
    start: int = 0
    """The first position that was searched."""
    end: int = 0
    """The position after the last that was searched."""
    examined: int = 0
    """Records that were examined."""


async def page_before(client: Client, app: str, end: int, first: int, log_filter: LogFilter) -> LogPage:
    """Return the newest events before `end`, at most `ROWS`, none before `first`; `start` says how far it searched."""
    subject, page = log_filter.subject(app), LogPage(start=end, end=end)
    deadline = time.monotonic() + LOOK_S
    size = ROWS if subject is None and not log_filter.scans else _SCAN
    while page.start > first and len(page.records) < ROWS:
        if page.end > page.start and (time.monotonic() > deadline or page.examined >= RECORDS_MAX):
            break
        begin = max(first, page.start - size)
        window = await _window(client, app, subject, begin, page.start)
        if window is None and page.start - begin > 1:
            size = max(1, (page.start - begin) // 8)
            continue
        window = window or []
        page.examined += len(window)
        matches = [record for record in window if log_filter.takes(record)]
        missing = ROWS - len(page.records)
        page.records[:0] = matches[-missing:]
        # Positions before the oldest event of this page belong to the next page.
        page.start = matches[-missing][0] if len(matches) > missing else begin
        # The server skips other subjects by itself, so a window may span more of the log.
        grows = 8 if not window else 2
        size = size if subject is None else size * grows
    return page


async def page_from(client: Client, app: str, start: int, last: int, log_filter: LogFilter) -> LogPage:
    """Return the oldest events from `start` on, at most `ROWS`, none after `last`; `end` says how far it searched."""
    subject, page = log_filter.subject(app), LogPage(start=start, end=start)
    deadline = time.monotonic() + LOOK_S
    while page.end <= last and len(page.records) < ROWS:
        if page.end > start and (time.monotonic() > deadline or page.examined >= RECORDS_MAX):
            break
        count = ROWS - len(page.records) if not log_filter.scans else _REQUEST
        records, remaining = await page_of_log(client, app, page.end, subject, count)
        if not records:
            page.end = last + 1
            break
        for record in records:
            if record[0] > last:
                page.end = last + 1
                break
            page.end, page.examined = record[0] + 1, page.examined + 1
            if log_filter.takes(record):
                page.records.append(record)
                if len(page.records) == ROWS:
                    break
        if not remaining and len(page.records) < ROWS:
            page.end = last + 1
    return page


async def ends_of(client: Client, app: str) -> tuple[int, int]:
    """Return the first and the last position, (1, 0) for an empty log; raises `LogUnusable` before `eventjet init`."""
    try:
        state = await client.ask(stream_info(app))
    except StreamMissing:
        raise missing_stream(app) from None
    return max(1, state.first), state.last


async def skipped_among(client: Client, app: str, records: Sequence[RawRecord]) -> dict[int, str]:
    """Return the reason by position of the records that have a skip marker; sends one request for each record."""
    markers = await asyncio.gather(*(client.ask(direct_last(app, skip_subject(app, record[0]))) for record in records))
    return {
        record[0]: reason_in(marker[4]) for record, marker in zip(records, markers, strict=True) if marker is not None
    }


async def _window(client: Client, app: str, subject: str | None, start: int, end: int) -> list[RawRecord] | None:
    """Return the records at `start` <= position < `end`; None where they are too many or too large for a window."""
    window: list[RawRecord] = []
    position, size = start, 0
    while position < end:
        records, remaining = await page_of_log(client, app, position, subject, min(_REQUEST, end - position))
        for record in records:
            if record[0] >= end:
                return window
            window.append(record)
            size += len(record[3]) + len(record[4])
        if not remaining or not records:
            return window
        if len(window) > RECORDS_MAX // 4 or size > BYTES_MAX:
            return None
        position = records[-1][0] + 1
    return window


async def page_of_log(
    client: Client, stream: str, start: int, subject: str | None, count: int, size: int = BYTES_MAX
) -> tuple[list[RawRecord], int]:
    """Return records from a position on, in order, and how many the server has beyond them.

    Return at most `count` records and `size` bytes. Any replica may answer, and it may lag behind the leader. Raises
    `StoreUnavailable`.
    """
    request = direct_page(stream, start, subject, count=count, size=size)
    parts: AsyncGenerator[list[Frame]] = client.stream(request)
    records: list[RawRecord] = []
    try:
        async for frames in parts:
            final = frames.pop() if is_status(frames[-1]) else None
            records += [direct_record(frame, stream=stream) for frame in frames]
            if final is not None:
                last, remaining = request.parse(final) or (0, 0)
                if last != (records[-1][0] if records else 0):
                    raise StoreUnavailable(request.what, f"records up to position {last} were lost on the way")
                return records, remaining
    finally:
        await parts.aclose()
    raise StoreUnavailable(request.what, "its end was lost on the way")


@dataclass(frozen=True, slots=True)
class LogStatus:
    """The status of a log as its leader reports it."""

    identity: str
    first: int
    last: int
    messages: int
    bytes: int
    replicas: int
    """Copies that the stream is configured to have."""
    others: Sequence[Replica]
    """The copies besides the leader's."""
    move: Move | None
    """Where the stream is moved to, if it is."""
    last_at: float | None
    """When the server stored the last event, in seconds since 1970; None for an empty log."""
    max_bytes: int | None
    """Size limit of the stream in bytes; None where only the disk limits it."""
    max_messages: int | None
    loss: str
    """The missing range of positions, in words; empty where nothing is missing."""


async def log_now(client: Client, app: str, previous: LogStatus | None, timeout_s: float) -> LogStatus:
    """Return the status of the log now; the `previous` one saves a request. Raises `LogUnusable` without a stream."""
    try:
        state, info = await asyncio.gather(
            client.ask(stream_info(app), timeout_s), client.ask(call(f"STREAM.INFO.{app}"), timeout_s)
        )
    except StreamMissing:
        raise missing_stream(app) from None
    if previous is not None and (previous.last, previous.identity) == (state.last, identity_of(state)):
        last_at = previous.last_at
    else:
        record = await client.ask(last_message(app, stream_subjects(app)), timeout_s)
        last_at = None if record is None else record[1] / 1e9
    return LogStatus(
        identity=identity_of(state),
        first=state.first,
        last=state.last,
        messages=state.messages,
        bytes=state.bytes,
        replicas=int(state.config.get("num_replicas") or 1),
        others=replicas_in(info),
        move=move_in(info),
        last_at=last_at,
        max_bytes=_limit(state, "max_bytes"),
        max_messages=_limit(state, "max_msgs"),
        loss=missing_range(state),
    )


def _limit(state: StreamState, name: str) -> int | None:
    value = int(state.config.get(name) or -1)
    return value if value > 0 else None


@dataclass(frozen=True, slots=True)
class Replica:
    """A server that keeps a copy of a stream, other than its leader."""

    name: str
    is_current: bool
    is_offline: bool
    silent_s: float | None
    """Seconds since the leader heard of it, None where it never has; the server reports it offline only much later."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move, a scaling or an evacuation of a stream that is under way."""

    servers: Sequence[str]
    """Where the copies will be; empty while the server has not chosen."""
    since: str
    reason: str
    """What it waits for, as the server says; may be empty."""
    is_long: bool
    """Whether it began long enough ago for its servers to have been heard of."""
    is_stuck: bool
    """Whether it is long, and waits for servers that are away or because of an error."""

    def __str__(self) -> str:
        servers = listed(self.servers) if self.servers else "servers that are not chosen yet"
        return f"on its way to {servers}, since {self.since}{f' ({self.reason})' if self.reason else ''}"


def move_in(info: Mapping[str, Any]) -> Move | None:
    """Return the move that the information of a stream names, if one is under way (nats-server 2.15)."""
    cluster: Mapping[str, Any] = info.get("cluster") or {}
    desired: Mapping[str, Any] = cluster.get("desired") or {}
    if not desired:
        return None
    status: Mapping[str, Any] = desired.get("status") or {}
    copies: Sequence[Mapping[str, Any]] = desired.get("replicas") or ()
    since = str(desired["created"])
    # A copy that has just been added is not online at first.
    is_long = time.time() - nanoseconds(since.encode()) / 1e9 > _PATIENT_S
    return Move(
        [str(copy["name"]) for copy in copies],
        since,
        ": ".join(str(status[key]) for key in ("description", "err") if status.get(key)),
        is_long,
        is_long and (bool(status.get("err")) or status.get("type") == "quorum"),
    )


def replicas_in(info: Mapping[str, Any]) -> list[Replica]:
    """Return the replicas besides the leader that the information of a stream names; none where it has one copy.

    Copies that a move takes away are left out.
    """
    cluster: Mapping[str, Any] = info.get("cluster") or {}
    copies: list[dict[str, Any]] = cluster.get("replicas") or []
    move = move_in(info)
    return [
        Replica(
            str(copy["name"]),
            bool(copy.get("current")),
            bool(copy.get("offline")),
            int(copy["active"]) / 1e9 if copy.get("active") else None,
        )
        for copy in copies
        if move is None or not move.servers or copy["name"] in move.servers
    ]
