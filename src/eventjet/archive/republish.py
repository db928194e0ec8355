"""Publish an archived log into an empty stream, with the same positions, ids, versions and times, or raise an error.

Each batch is atomic and expects the log to end right before it, so it is stored at its positions or not at all, even
when others write. When the server's answer is lost, the restore reads the stream to see whether the batch is stored.
However a restore ends, the next one goes on after the last stored batch.

Subject, body, and all headers that readers use stay as they are, in their order. Headers that were only for the server
(batches, expectations of a whole stream) are removed. The server gives a published message a new time, so the header
`Ej-Recorded-At` keeps the original time, and `Ej-Logged-At` the log's time of an imported event, whose recorded time
may differ. Publishing a record a second time in this way gives the same record again.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, TypeAlias, TypeVar

from eventjet import failpoints
from eventjet.archive.bodies import NO_BODIES, CopiedBodies
from eventjet.archive.reading import Archive, ArchiveReader
from eventjet.codec.headers import EXPECTED, LOGGED_AT, MSG_ID, RECORDED_AT, RawRecord, header, is_imported, number_of
from eventjet.codec.subjects import SERVER_MESSAGE_MAX
from eventjet.errors import (
    ApiRefused,
    ArchiveBroken,
    HistoryBroken,
    Refused,
    StoreUnavailable,
    StreamMissing,
    Unreachable,
)
from eventjet.jetstream import api
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import read_range
from eventjet.log.outcome import REFUSALS, STALE_LEADER_S
from eventjet.log.topology import CONTINUES, FIRST, IDENTITY, MISSING, compare, not_created, stream_config
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import publish_frame
from eventjet.runtime import read_ahead
from eventjet.text import cut

T = TypeVar("T")

BATCH_MAX = 500
"""The maximum number of messages in one atomic batch; in larger batches the cost of a batch is negligible."""
BATCH_BYTES = 4_000_000
"""The approximate maximum size of one batch: the server waits only ten seconds for the rest of a batch."""
HEADERS_ADDED = 240
"""The maximum number of bytes by which a message grows: `Ej-Recorded-At` (48), `Ej-Logged-At` (46), the batch's headers
(79), the expected end of the log (51)."""
WINDOW_NS = 100_000_000
"""The stream's duplicate window during a restore, the shortest that the server allows. Two events with the same id, far
apart in the log, are not taken for duplicates, and the server need not keep millions of ids in memory. A stream that
still has this window was not restored completely."""

_AHEAD_MAX = 2
"""Batches that are read and framed while another one is stored."""
_BACKOFF_S = (0.05, 1.0)
_RETRY_S = 60.0
_CONFIGURED_SETTINGS = frozenset({"duplicate_window", "max_msg_size", "num_replicas"})
"""Settings of an existing stream that may differ, because the restore sets them or works with any value."""
_FOR_SERVER = re.compile(rb"\r\n(?:Ej-Save: |Nats-(?!Msg-Id: |Expected-Last-Subject-Sequence: ))[^\r\n]*")
_EXPECTATION = re.compile(rb"\r\nNats-Expected-Last-Subject-Sequence: [^\r\n]*")
_OTHER_SUBJECT = b"\r\nNats-Expected-Last-Subject-Sequence-Subject: "
_RECORDED, _LOGGED = (f"\r\n{name}: ".encode() for name in (RECORDED_AT, LOGGED_AT))
_NO_HEADERS = b"NATS/1.0\r\n\r\n"

Progress: TypeAlias = Callable[[Literal["publish", "compare"], int, int], object]
"""Called with (phase, events done, events in all)."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The outcome of a restore."""

    stream: str
    log: str
    """The identity of the log."""
    first: int
    last: int
    events: int
    """The number of events in the stream now; each was compared with the archive."""
    published: int
    """How many events this run published; an earlier, interrupted run published the others."""
    seconds: Mapping[str, float]
    """Wall time by phase."""
    bodies: CopiedBodies = NO_BODIES
    """The large bodies of the events, which were stored first."""
    torn: int = 0
    """How many of the last events belong to one save of which the archive does not have the end."""


@dataclass(slots=True)
class Restore:
    """One restore: create the stream, or continue an interrupted restore, and compare all its events. Blocks.

    `check` says beforehand whether `run` would refuse the stream, and changes nothing.

    `run` raises `Refused` for a stream with other events and when somebody else writes, `ArchiveBroken` for an archive
    whose events do not follow one another, `HistoryBroken` when the stored events differ from the archive, and
    `StoreUnavailable` when the server stores nothing for a minute. Exceptions of `progress` and `wait` end the restore.
    """

    endpoint: Endpoint
    archive: ArchiveReader
    replicas: int = 1
    progress: Progress = lambda _phase, _done, _total: None
    wait: Callable[[float], object] = time.sleep
    timeout_s: float = 5.0
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    manifest: Archive = field(init=False)
    _connection: NatsConnection | None = field(init=False, default=None)
    _position: int = field(init=False, default=0)
    """The next position to publish."""
    _contradicted: tuple[int, float] = field(init=False, default=(0, 0.0))
    """(first position of the last batch for which the server expected another end of the log, since when)."""

    def __post_init__(self) -> None:
        self.manifest = self.archive.manifest

    def check(self) -> None:
        """Raise `Refused` if the server has a stream into which nothing may be restored."""
        try:
            self._start_in(self._state())
        except StreamMissing:
            pass
        finally:
            self._disconnect()  # what is done before `run` may take hours

    def run(self) -> Restored:
        """Carry out the restore; may be called once."""
        manifest = self.manifest
        try:
            start = self._prepare()
            began = time.monotonic()
            self._retry(f"Storing the events of {manifest.stream}", self._publish)
            self.seconds["publish"] = round(time.monotonic() - began, 3)
            # The last steps are retried, so that an election of a leader at the end does not fail the whole restore.
            end = f"The end of the restore into {manifest.stream}"
            self._retry(end, self._check_end)
            self._compare()
            self._retry(end, lambda: self._configure(self._state(), finished=True))
        finally:
            self._disconnect()
        published = manifest.last - start + 1
        return Restored(
            manifest.stream, manifest.log, manifest.first, manifest.last, manifest.events, published, self.seconds
        )

    def _prepare(self) -> int:
        """Create or configure the stream and return the next position; raises `Refused` before any change."""
        try:
            state = self._state()
        except StreamMissing:
            return self._create()
        start = self._start_in(state)
        self._configure(state, finished=False)
        return start

    def _start_in(self, state: api.StreamState) -> int:
        """Return the next position to publish into an existing stream; raises `Refused` for one that is not fit."""
        manifest = self.manifest
        drifts = compare(stream_config(manifest.stream, self.replicas), state.config)
        wrong = [str(drift) for drift in drifts if drift.setting not in _CONFIGURED_SETTINGS]
        if wrong:
            raise self._refused(f"the stream is not as it should be ({'; '.join(wrong)})")
        if state.messages == 0 and state.last + 1 == manifest.first:
            # The empty stream becomes another log; workers that wait for its events would note the wrong identity.
            same_log = state.metadata.get(IDENTITY) == manifest.log
            consumers = () if same_log else self._ask(api.waiting_consumers(manifest.stream))
            if consumers:
                raise self._refused(f"workers wait for its events ({', '.join(consumers)}); stop them first")
            return manifest.first
        return self._next_position(state)

    def _create(self) -> int:
        manifest = self.manifest
        config = {**_config(manifest, self.replicas), "duplicate_window": WINDOW_NS}
        try:
            self._ask(api.create_stream(config))
        except ApiRefused as refusal:
            if refusal.err_code == api.NAME_IN_USE:
                raise self._refused("somebody else made the stream just now") from None
            raise not_created(manifest.stream, refusal) from None
        return manifest.first

    def _next_position(self, state: api.StreamState) -> int:
        """Return the next position in a stream that has the archive's first events; raises `Refused` for any other."""
        manifest, identity = self.manifest, state.metadata.get(IDENTITY)
        holds = f"it holds {state.messages:,} events at positions {state.first:,} to {state.last:,}"
        if state.messages == 0:
            reason = f"its next event gets position {state.last + 1:,}, and the archive's first {manifest.first:,}"
            raise self._refused(reason)
        if identity != manifest.log:
            raise self._refused(
                f"{holds} of the log {identity or 'without identity'}, and the archive is of {manifest.log}"
            )
        if state.first != manifest.first or state.last > manifest.last or state.deleted:
            raise self._refused(f"{holds}, and the archive {manifest.first:,} to {manifest.last:,}")
        for position in (state.first, state.last):
            if not self._is_archived(position):
                raise self._refused(f"{holds}, and its event at position {position:,} is not that of the archive")
        return state.last + 1

    def _configure(self, state: api.StreamState, *, finished: bool) -> None:
        """Set the identity, the maximum message size and the duplicate window of an existing stream."""
        declared = _config(self.manifest, self.replicas)
        size = state.config["max_msg_size"]
        if size > 0:
            size = max(size, declared["max_msg_size"])
        window = declared["duplicate_window"] if finished else WINDOW_NS
        metadata = {**state.metadata, **_metadata(self.manifest)}
        if not self.manifest.continues:
            metadata.pop(CONTINUES, None)  # of the empty log that the stream was before
        config = {**state.config, "metadata": metadata, "max_msg_size": size, "duplicate_window": window}
        if config != state.config:
            self._ask(api.update_stream(config))

    def _retry(self, what: str, attempt: Callable[[], None]) -> None:
        """Repeat `attempt` while the server fails; raises `StoreUnavailable` after a minute without progress."""
        position, deadline, pause_s = self._position, time.monotonic() + _RETRY_S, _BACKOFF_S[0]
        while True:
            try:
                return attempt()
            except (StoreUnavailable, Unreachable) as error:
                self._disconnect()
                if self._position > position:
                    position, deadline, pause_s = self._position, time.monotonic() + _RETRY_S, _BACKOFF_S[0]
                elif time.monotonic() > deadline:
                    raise StoreUnavailable(what, f"for {_RETRY_S:g} s; at last: {error}") from error
            self.wait(pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_S[1])

    def _publish(self) -> None:
        """Publish the events that the stream lacks; after an error, the next call goes on where the stream ends."""
        manifest, state = self.manifest, self._state()
        if state.messages and not self._is_archived(state.last):
            raise Refused(
                f"The restore of {manifest.url}",
                f"somebody else wrote to the stream {manifest.stream!r}: it ends at position {state.last:,} after "
                f"{self._position - 1:,} were restored",
                "Stop all that writes to it, delete the stream, and restore again.",
            )
        self._position = max(state.last + 1, manifest.first)
        # While the server stores a batch, a thread reads and frames the next ones.
        framed = ((batch, *batch.frames(secrets.token_hex(8))) for batch in batches(self.archive, self._position))
        with closing(read_ahead(framed, lambda: None, _AHEAD_MAX)) as ahead:
            for batch, frames, headers in ahead:
                self._send(batch, frames, headers)
                self._position = batch.last + 1
                failpoints.reach("restore.batch_stored")
                self.progress("publish", batch.last - manifest.first + 1, manifest.events)

    def _is_archived(self, position: int) -> bool:
        """Tell whether the stream has the archive's event at a position."""
        if position > self.manifest.last:
            return False
        record = self._ask(api.message_at(self.manifest.stream, position))
        return record is not None and lasting(record) == lasting(self.archive.record(position))

    def _send(self, batch: RestoreBatch, frames: bytes, headers: bytes) -> None:
        """Store a batch; raises `StoreUnavailable` when it is not known to be stored, and other errors for good."""
        link = self._open_connection()
        largest = max(len(block) + len(record[4]) for block, record in zip(batch.blocks, batch.records, strict=True))
        if largest + HEADERS_ADDED > link.max_payload:
            raise Refused(
                f"The restore of {self.manifest.url}",
                f"the server takes messages of {link.max_payload:,} bytes; an event of positions {batch.first:,} to "
                f"{batch.last:,} has {largest:,}",
                "Set `max_payload: 1MB` in its configuration, and restore again.",
            )
        if frames:
            link.send(frames)
        failpoints.reach("restore.batch_sent")
        _, _, subject, _, body = batch.records[-1]
        reply = link.request(
            subject.decode(),
            body,
            headers=headers,
            timeout_s=2 * self.timeout_s,
            stream=self.manifest.stream,
            batch_size=len(batch.records),
        )
        try:
            answer = api.answer_in(reply, subject.decode())
        except ApiRefused as refusal:
            raise self._not_stored(batch, refusal) from refusal
        if (answer.get("seq"), answer.get("count")) != (batch.last, len(batch.records)):
            raise StoreUnavailable(f"Storing position {batch.last}", f"the server answered {answer}")

    def _not_stored(self, batch: RestoreBatch, refusal: ApiRefused) -> Exception:
        """Return the error for a batch that the server refused.

        A deposed leader may expect another end of the log than the one that was just read, but only for a while.
        """
        if refusal.err_code in REFUSALS:
            return Refused(
                f"The restore of {self.manifest.url}",
                f"the server takes no more after position {batch.first - 1:,}: {refusal.description} "
                f"({refusal.err_code})",
                "Make room, or fix the limit that it names, and restore again: it goes on there.",
            )
        if refusal.err_code == api.WRONG_SEQUENCE:
            if self._contradicted[0] != batch.first:
                self._contradicted = batch.first, time.monotonic()
            elif time.monotonic() - self._contradicted[1] > STALE_LEADER_S:
                reason = f"an event of positions {batch.first} to {batch.last} does not follow the one it was "
                return ArchiveBroken(self.manifest.url, f"{reason}written after")
        return StoreUnavailable(f"Storing positions {batch.first:,} to {batch.last:,}", str(refusal))

    def _check_end(self) -> None:
        manifest = self.manifest
        state = self._state()
        identity = state.metadata.get(IDENTITY)
        if (identity, state.first, state.last, state.messages) != (
            manifest.log,
            manifest.first,
            manifest.last,
            manifest.events,
        ):
            reason = f"it holds {state.messages} events of the log {identity} after the restore"
            raise HistoryBroken(manifest.stream, state.last, reason)

    def _compare(self) -> None:
        """Read the whole stream and compare it with the archive; raises `HistoryBroken` at the first difference."""
        manifest, began = self.manifest, time.monotonic()
        stored = read_range(self.endpoint, manifest.stream, manifest.first, manifest.last + 1)
        archived = self.archive.records(manifest.first, manifest.last + 1)
        pairs = zip(chain.from_iterable(stored), chain.from_iterable(archived), strict=True)
        for count, (stored_record, archived_record) in enumerate(pairs, 1):
            if lasting(stored_record) != lasting(archived_record):
                raise HistoryBroken(manifest.stream, stored_record[0], "it is not the event of the archive")
            if count % 1_000 == 0 or count == manifest.events:
                self.progress("compare", count, manifest.events)
        self.seconds["compare"] = round(time.monotonic() - began, 3)

    def _refused(self, reason: str) -> Refused:
        return Refused(
            f"The restore of {self.manifest.url} into the stream {self.manifest.stream!r}",
            reason,
            "Nothing was written. Restore to another server or account, or delete that stream if nobody needs it.",
        )

    def _state(self) -> api.StreamState:
        return self._ask(api.stream_info(self.manifest.stream))

    def _ask(self, request: api.Request[T]) -> T:
        return self._open_connection().ask(request, timeout_s=self.timeout_s)

    def _open_connection(self) -> NatsConnection:
        if self._connection is None:
            self._connection = NatsConnection.open(self.endpoint, timeout_s=self.timeout_s)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _metadata(manifest: Archive) -> dict[str, str]:
    """Return the stream's metadata: identity, first position, none missing, and the logs that it continues."""
    noted = {IDENTITY: manifest.log, FIRST: str(manifest.first), MISSING: "0", CONTINUES: manifest.continues}
    return {name: text for name, text in noted.items() if text}


def _config(manifest: Archive, replicas: int) -> dict[str, Any]:
    """Return the configuration of `init`, with the archive's metadata and start, and room for more headers."""
    config = stream_config(manifest.stream, replicas)
    config |= {"max_msg_size": SERVER_MESSAGE_MAX + HEADERS_ADDED, "metadata": _metadata(manifest)}
    return config if manifest.first == 1 else {**config, "first_seq": manifest.first}


@dataclass(slots=True)
class RestoreBatch:
    """Messages that follow one another in the log, and are stored together or not at all."""

    records: list[RawRecord] = field(default_factory=list[RawRecord])
    blocks: list[bytes] = field(default_factory=list[bytes])
    """The header block of each message, without the headers of the batch."""
    size: int = 0
    ids: set[str] = field(default_factory=set[str])
    lasts: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """The position of each subject's last message in the batch."""

    @property
    def first(self) -> int:
        """Position of the first message."""
        return self.records[0][0]

    @property
    def last(self) -> int:
        """Position of the last message."""
        return self.records[-1][0]

    def frames(self, batch_id: str) -> tuple[bytes, bytes]:
        """Return (frames of all messages but the last, headers of the last): stored only right after the log's end."""
        frames: list[bytes] = []
        expected = b"Nats-Expected-Last-Sequence: %d\r\n" % (self.first - 1)
        name, headers = batch_id.encode(), b""
        for number, (record, block) in enumerate(zip(self.records, self.blocks, strict=True), 1):
            headers = b"%bNats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b" % (block[:-2], name, number, expected)
            expected = b""
            if number < len(self.records):
                frames.append(publish_frame(record[2], record[4], headers=headers + b"\r\n"))
        return b"".join(frames), headers + b"Nats-Batch-Commit: 1\r\n\r\n"


def batches(archive: ArchiveReader, start: int) -> Iterator[RestoreBatch]:
    """Yield the archive's records from a position on, in batches.

    Raises `ArchiveBroken` when the records of an aggregate do not follow one another. The size of a batch is that of
    the records in the form that `lasting` returns, so a log that was restored before is cut at the same positions.
    """
    manifest = archive.manifest
    batch = RestoreBatch()
    for page in archive.records(start, manifest.last + 1):
        for record in page:
            _check_subject(manifest, record)
            block = _lasting_headers(record)
            bare = _EXPECTATION.sub(b"", block)
            size = len(record[2]) + len(bare) + len(record[4])
            event_id = header(bare, MSG_ID)
            # A batch must not have an id twice; the log may, if the two events are far enough apart.
            full = len(batch.records) == BATCH_MAX or batch.size + size > BATCH_BYTES or event_id in batch.ids
            if full and batch.records:
                yield batch
                batch = RestoreBatch()
            batch.records.append(record)
            batch.blocks.append(block if _may_expect(manifest, record, batch.lasts) else bare)
            batch.lasts[record[2]] = record[0]
            batch.size += size
            if event_id is not None:
                batch.ids.add(event_id)
    if batch.records:
        yield batch


def _check_subject(manifest: Archive, record: RawRecord) -> None:
    """Raise `ArchiveBroken` for a subject outside the log, because a restore may have the right to publish anywhere."""
    position, _, subject, _, _ = record
    if not subject.startswith(f"{manifest.stream}.".encode()) or subject.count(b".") != 2:
        shown_subject = cut(subject.decode("utf-8", "replace"))
        raise ArchiveBroken(
            manifest.url, f"position {position:,} is on {shown_subject!r}, no subject of the log {manifest.stream!r}"
        )


def _may_expect(manifest: Archive, record: RawRecord, lasts: Mapping[bytes, int]) -> bool:
    """Tell whether the server can check the predecessor that a record expects.

    `lasts` maps subjects to their last positions in the record's batch. The server cannot check the second message of
    a subject in a batch, so it is checked here: a wrong predecessor raises `ArchiveBroken`. A predecessor before the
    archive's first position cannot be checked at all.
    """
    position, _, subject, block, _ = record
    expected = number_of(block, EXPECTED)
    if expected is None or _OTHER_SUBJECT in block or 0 < expected < manifest.first:
        return False
    previous = lasts.get(subject, expected)
    if expected != previous:
        reason = f"position {position} was written after {expected}, but {previous} came before it"
        raise ArchiveBroken(manifest.url, reason)
    return subject not in lasts


def lasting(record: RawRecord) -> tuple[int, bytes, bytes, bytes]:
    """Return (position, subject, headers, body) in a form that stays the same when a record is published again."""
    position, _, subject, _, body = record
    return position, subject, _EXPECTATION.sub(b"", _lasting_headers(record)), body


def _lasting_headers(record: RawRecord) -> bytes:
    """Return the header block without headers that were only for the server, and with the time headers."""
    block = _FOR_SERVER.sub(b"", record[3] or _NO_HEADERS)
    names = [_RECORDED, _LOGGED] if is_imported(block) else [_RECORDED]
    missing = [name for name in names if name not in block]
    headers = block.rstrip(b"\r\n")
    if missing:
        second, nanosecond = divmod(record[1], 1_000_000_000)
        time = f"{_time_text(second)}.{nanosecond:09d}Z".encode()
        headers += b"".join(name + time for name in missing)
    return headers + b"\r\n\r\n"


@lru_cache(maxsize=64)
def _time_text(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
