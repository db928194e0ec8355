"""Publish an archived log into an empty stream: the same positions, ids, versions and times, or an error.

Each batch is atomic and expects the log to end right before it, so it is stored where it belongs or not at all,
whoever else writes. When an answer is lost, the restore reads what the stream holds. Whatever ends a restore, the next
one goes on after the last batch that was stored.

Subject, body, and all headers that readers use stay as they are, in their order. Headers that were only for the server
(batches, expectations of a whole stream) go. `Ej-Recorded-At` keeps the time that the server will not give again, and
`Ej-Logged-At` that of an imported event, whose own may be another. Publishing twice in this way gives the same as once.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, TypeAlias, TypeVar

from eventjet import failpoints
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
from eventjet.log.integrity import FIRST, MISSING
from eventjet.log.outcome import REFUSALS, STALE_LEADER_S
from eventjet.log.topology import IDENTITY, compare, not_created, stream_config
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import publish_frame
from eventjet.text import cut

T = TypeVar("T")

BATCH_MAX = 500
"""Messages of one atomic batch: beyond that, a batch costs what its messages cost."""
BATCH_BYTES = 4_000_000
"""Of one batch, about: the server waits ten seconds for the rest of it."""
HEADERS_ADDED = 240
"""Bytes that a message grows by at the most: `Ej-Recorded-At` (48), `Ej-Logged-At` (46), the batch's headers (79), the
expected end of the log (51)."""
WINDOW_NS = 100_000_000
"""How long the server remembers event ids during a restore, the least it can: an id that the log holds twice, long
after one another, is not to be taken for a repetition, and millions of ids need not lie in the server's memory. A
stream that still has it was not restored to its end."""

_BACKOFF_S = (0.05, 1.0)
_PATIENCE_S = 60.0
_SET_HERE = frozenset({"duplicate_window", "max_msg_size", "num_replicas"})
"""Settings of an existing stream that a restore sets itself, or can live with."""
_FOR_SERVER = re.compile(rb"\r\n(?:Ej-Save: |Nats-(?!Msg-Id: |Expected-Last-Subject-Sequence: ))[^\r\n]*")
_EXPECTATION = re.compile(rb"\r\nNats-Expected-Last-Subject-Sequence: [^\r\n]*")
_OF_ANOTHER = b"\r\nNats-Expected-Last-Subject-Sequence-Subject: "
_RECORDED, _LOGGED = (f"\r\n{name}: ".encode() for name in (RECORDED_AT, LOGGED_AT))
_NO_HEADERS = b"NATS/1.0\r\n\r\n"

Tell: TypeAlias = Callable[[Literal["publish", "compare"], int, int], object]
"""Called with (phase, events done, events in all)."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The outcome of a restore."""

    stream: str
    log: str
    first: int
    last: int
    events: int
    """In the stream now, each compared with the archive."""
    published: int
    """By this run; an earlier one that was interrupted published the rest."""
    seconds: Mapping[str, float]
    """By phase."""


@dataclass(slots=True)
class Restore:
    """Makes the stream, or goes on where an interrupted restore ended, and compares all that it holds. Blocks.

    `run` raises `Refused` for a stream that holds anything else and when somebody else writes, `ArchiveBroken` for a
    log that does not follow from itself, `HistoryBroken` when what was stored is not what was read, and
    `StoreUnavailable` when the server stores nothing for a minute. What `progress` and `wait` raise ends it.
    """

    endpoint: Endpoint
    archive: ArchiveReader
    replicas: int = 1
    progress: Tell = lambda _phase, _done, _total: None
    wait: Callable[[float], object] = time.sleep
    timeout_s: float = 5.0
    connection: NatsConnection | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    sealed: Archive = field(init=False)

    def __post_init__(self) -> None:
        self.sealed = self.archive.manifest

    def run(self) -> Restored:
        """See the class; once."""
        sealed = self.sealed
        try:
            start = self._prepare()
            began = time.monotonic()
            for batch in batches(self.archive, start):
                self._store(batch)
                failpoints.reach("restore.batch_stored")
                self.progress("publish", batch.last - sealed.first + 1, sealed.events)
            self.seconds["publish"] = round(time.monotonic() - began, 3)
            # What is stored should not be in vain because of an election at the end.
            end = f"The end of the restore into {sealed.stream}"
            self._insist(end, lambda _: self._check_end())
            self._compare()
            self._insist(end, lambda _: self._configure(self._state(), finished=True))
        finally:
            self._drop()
        published = sealed.last - start + 1
        return Restored(sealed.stream, sealed.log, sealed.first, sealed.last, sealed.events, published, self.seconds)

    def _prepare(self) -> int:
        """Make the stream what it must be and return the position to go on at; raises `Refused` before any change."""
        sealed = self.sealed
        try:
            state = self._state()
        except StreamMissing:
            return self._create()
        drifts = compare(stream_config(sealed.stream, self.replicas), state.config)
        wrong = [str(drift) for drift in drifts if drift.setting not in _SET_HERE]
        if wrong:
            raise self._refused(f"the stream is not as it should be ({'; '.join(wrong)})")
        if state.messages == 0 and state.last + 1 == sealed.first:
            # It becomes another log, and workers that wait for its events would note the wrong one.
            same = state.metadata.get(IDENTITY) == sealed.log
            waiting = () if same else self._ask(api.waiting_consumers(sealed.stream))
            if waiting:
                raise self._refused(f"workers wait for its events ({', '.join(waiting)}); stop them first")
            start = sealed.first
        else:
            start = self._continued(state)
        self._configure(state, finished=False)
        return start

    def _create(self) -> int:
        sealed = self.sealed
        config = {**_config(sealed, self.replicas), "duplicate_window": WINDOW_NS}
        try:
            self._ask(api.create_stream(config))
        except ApiRefused as refusal:
            if refusal.err_code == api.NAME_IN_USE:
                raise self._refused("somebody else made the stream just now") from None
            raise not_created(sealed.stream, refusal) from None
        return sealed.first

    def _continued(self, state: api.StreamState) -> int:
        """Return where to go on in a stream that holds the archive's first events, and nothing else."""
        sealed, identity = self.sealed, state.metadata.get(IDENTITY)
        holds = f"it holds {state.messages:,} events at positions {state.first:,} to {state.last:,}"
        if state.messages == 0:
            reason = f"its next event gets position {state.last + 1:,}, and the archive's first {sealed.first:,}"
            raise self._refused(reason)
        if identity != sealed.log:
            raise self._refused(
                f"{holds} of the log {identity or 'without identity'}, and the archive is of {sealed.log}"
            )
        if state.first != sealed.first or state.last > sealed.last or state.deleted:
            raise self._refused(f"{holds}, and the archive {sealed.first:,} to {sealed.last:,}")
        for position in (state.first, state.last):
            record = self._ask(api.message_at(sealed.stream, position))
            if record is None or lasting(record) != lasting(self.archive.record(position)):
                raise self._refused(f"{holds}, and its event at position {position:,} is not that of the archive")
        return state.last + 1

    def _configure(self, state: api.StreamState, *, finished: bool) -> None:
        """Set an existing stream's identity, room for what events grow by, and how long ids are remembered."""
        wanted = _config(self.sealed, self.replicas)
        size = state.config["max_msg_size"]
        if size > 0:
            size = max(size, wanted["max_msg_size"])
        window = wanted["duplicate_window"] if finished else WINDOW_NS
        metadata = {**state.metadata, **_metadata(self.sealed)}
        config = {**state.config, "metadata": metadata, "max_msg_size": size, "duplicate_window": window}
        if config != state.config:
            self._ask(api.update_stream(config))

    def _store(self, batch: RestoreBatch) -> None:
        """Store a batch exactly once; raises what is final, and `StoreUnavailable` when it takes too long."""
        contradicted_at: float | None = None

        def attempt(answer: Exception | None) -> Exception | None:
            nonlocal contradicted_at
            if answer is not None and self._holds(batch):
                return None
            contradicted_at = self._check_answer(batch, answer, contradicted_at)
            return self._send(batch)

        self._insist(f"Storing positions {batch.first:,} to {batch.last:,} of {self.sealed.stream}", attempt)

    def _insist(self, what: str, attempt: Callable[[Exception | None], Exception | None]) -> None:
        """Repeat `attempt`, given the fault of the try before, until it returns none or the time is over."""
        deadline = time.monotonic() + _PATIENCE_S
        pause_s = _BACKOFF_S[0]
        fault: Exception | None = None
        while True:
            try:
                fault = attempt(fault)
                if fault is None:
                    return
            except (StoreUnavailable, Unreachable) as error:
                fault = error
                self._drop()
            if time.monotonic() > deadline:
                raise StoreUnavailable(what, f"for {_PATIENCE_S:g} s; at last: {fault}") from fault
            self.wait(pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_S[1])

    def _send(self, batch: RestoreBatch) -> Exception | None:
        """Send a batch once; return None when the server says that it is stored where it belongs, else the fault."""
        link = self._link()
        frames, headers = batch.frames(secrets.token_hex(8))
        largest = max(len(block) + len(record[4]) for block, record in zip(batch.blocks, batch.records, strict=True))
        if largest + HEADERS_ADDED > link.max_payload:
            raise Refused(
                f"The restore of {self.sealed.url}",
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
            stream=self.sealed.stream,
            messages=len(batch.records),
        )
        try:
            answer = api.answer_in(reply, subject.decode())
        except ApiRefused as refusal:
            return refusal
        if (answer.get("seq"), answer.get("count")) != (batch.last, len(batch.records)):
            return StoreUnavailable(f"Storing position {batch.last}", f"the server answered {answer}")
        return None

    def _holds(self, batch: RestoreBatch) -> bool:
        """Tell whether the log holds the batch, as its leader says; raises `Refused` when another's event is there."""
        state = self._state()
        if state.last == batch.first - 1:
            return False
        if state.last < batch.first:
            # A leader that was deposed, or the log lost its end: the next run goes on where that is.
            raise StoreUnavailable(f"Position {batch.first - 1:,}", f"the log ends at {state.last:,} all at once")
        record = self._ask(api.message_at(self.sealed.stream, batch.last))
        if state.last != batch.last or record is None or lasting(record) != lasting(batch.records[-1]):
            raise Refused(
                f"The restore of {self.sealed.url}",
                f"somebody else wrote to the stream {self.sealed.stream!r}: it ends at position {state.last:,} after "
                f"{batch.first - 1:,} were restored",
                "Stop all that writes to it, delete the stream, and restore again.",
            )
        return True

    def _check_answer(self, batch: RestoreBatch, answer: Exception | None, since: float | None) -> float | None:
        """Raise what is final of an answer after which the log still ends right before the batch.

        Returns since when the log has contradicted what the batch expects: a deposed leader may do so for a while.
        """
        if not isinstance(answer, ApiRefused):
            return None
        code = answer.err_code
        if code in REFUSALS:
            raise Refused(
                f"The restore of {self.sealed.url}",
                f"the server takes no more after position {batch.first - 1:,}: {answer.description} ({code})",
                "Make room, or fix the limit that it names, and restore again: it goes on there.",
            )
        if code != api.WRONG_SEQUENCE:
            return None
        since = since or time.monotonic()
        if time.monotonic() - since > STALE_LEADER_S:
            reason = f"an event of positions {batch.first} to {batch.last} does not follow the one it was written after"
            raise ArchiveBroken(self.sealed.url, reason)
        return since

    def _check_end(self) -> None:
        sealed = self.sealed
        state = self._state()
        identity = state.metadata.get(IDENTITY)
        if (identity, state.first, state.last, state.messages) != (
            sealed.log,
            sealed.first,
            sealed.last,
            sealed.events,
        ):
            reason = f"it holds {state.messages} events of the log {identity} after the restore"
            raise HistoryBroken(sealed.stream, state.last, reason)

    def _compare(self) -> None:
        """Read all of it again and compare it with the archive; raises `HistoryBroken` for the first difference."""
        sealed, began = self.sealed, time.monotonic()
        stored = read_range(self.endpoint, sealed.stream, sealed.first, sealed.last + 1)
        kept = self.archive.records(sealed.first, sealed.last + 1)
        pairs = zip(chain.from_iterable(stored), chain.from_iterable(kept), strict=True)
        for count, (stored_record, sealed_record) in enumerate(pairs, 1):
            if lasting(stored_record) != lasting(sealed_record):
                raise HistoryBroken(sealed.stream, stored_record[0], "it is not the event of the archive")
            if count % 1_000 == 0 or count == sealed.events:
                self.progress("compare", count, sealed.events)
        self.seconds["compare"] = round(time.monotonic() - began, 3)

    def _refused(self, reason: str) -> Refused:
        return Refused(
            f"The restore of {self.sealed.url} into the stream {self.sealed.stream!r}",
            reason,
            "Nothing was written. Restore to another server or account, or delete that stream if nobody needs it.",
        )

    def _state(self) -> api.StreamState:
        return self._ask(api.stream_info(self.sealed.stream))

    def _ask(self, request: api.Request[T]) -> T:
        return self._link().ask(request, timeout_s=self.timeout_s)

    def _link(self) -> NatsConnection:
        if self.connection is None:
            self.connection = NatsConnection.open(self.endpoint, timeout_s=self.timeout_s)
        return self.connection

    def _drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def _metadata(sealed: Archive) -> dict[str, str]:
    """Return which log it is, and where that begins; nothing of it is missing."""
    return {IDENTITY: sealed.log, FIRST: str(sealed.first), MISSING: "0"}


def _config(sealed: Archive, replicas: int) -> dict[str, Any]:
    """Return the stream as `init` makes it, with the log's identity and start, and room for what events grow by."""
    config = stream_config(sealed.stream, replicas)
    config |= {"max_msg_size": SERVER_MESSAGE_MAX + HEADERS_ADDED, "metadata": _metadata(sealed)}
    return config if sealed.first == 1 else {**config, "first_seq": sealed.first}


@dataclass(slots=True)
class RestoreBatch:
    """Messages that follow one another in the log, stored whole or not at all."""

    records: list[RawRecord] = field(default_factory=list[RawRecord])
    blocks: list[bytes] = field(default_factory=list[bytes])
    """The headers of each as they are published, without the batch's own."""
    size: int = 0
    ids: set[str] = field(default_factory=set[str])
    lasts: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """The position of the last message of each subject in it."""

    @property
    def first(self) -> int:
        return self.records[0][0]

    @property
    def last(self) -> int:
        return self.records[-1][0]

    def frames(self, batch_id: str) -> tuple[bytes, bytes]:
        """Return (all but the last as frames, the headers of the last), which asks for an answer.

        The server stores nothing of it unless its log ends right before.
        """
        before: list[bytes] = []
        expected = b"Nats-Expected-Last-Sequence: %d\r\n" % (self.first - 1)
        name, headers = batch_id.encode(), b""
        for number, (record, block) in enumerate(zip(self.records, self.blocks, strict=True), 1):
            headers = b"%bNats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b" % (block[:-2], name, number, expected)
            expected = b""
            if number < len(self.records):
                before.append(publish_frame(record[2], record[4], headers=headers + b"\r\n"))
        return b"".join(before), headers + b"Nats-Batch-Commit: 1\r\n\r\n"


def batches(archive: ArchiveReader, start: int) -> Iterator[RestoreBatch]:
    """Yield the records from a position on; raises `ArchiveBroken` where they do not follow one another.

    They are cut in the same places whether they were published again before or not.
    """
    sealed = archive.manifest
    batch = RestoreBatch()
    for page in archive.records(start, sealed.last + 1):
        for record in page:
            _check_subject(sealed, record)
            block = _kept(record)
            bare = _EXPECTATION.sub(b"", block)
            size = len(record[2]) + len(bare) + len(record[4])
            event_id = header(bare, MSG_ID)
            # One batch cannot hold an id twice; the log can, if long enough lay between them.
            full = len(batch.records) == BATCH_MAX or batch.size + size > BATCH_BYTES or event_id in batch.ids
            if full and batch.records:
                yield batch
                batch = RestoreBatch()
            batch.records.append(record)
            batch.blocks.append(block if _may_expect(sealed, record, batch.lasts) else bare)
            batch.lasts[record[2]] = record[0]
            batch.size += size
            if event_id is not None:
                batch.ids.add(event_id)
    if batch.records:
        yield batch


def _check_subject(sealed: Archive, record: RawRecord) -> None:
    """Refuse other subjects: whoever restores may publish to any, and a record names its own."""
    position, _, subject, _, _ = record
    if not subject.startswith(f"{sealed.stream}.".encode()) or subject.count(b".") != 2:
        where = cut(subject.decode("utf-8", "replace"))
        raise ArchiveBroken(
            sealed.url, f"position {position:,} is on {where!r}, no subject of the log {sealed.stream!r}"
        )


def _may_expect(sealed: Archive, record: RawRecord, lasts: Mapping[bytes, int]) -> bool:
    """Tell whether the server can check what the record expects; `lasts` are the subjects' last positions in its batch.

    It cannot for the second message of a subject in a batch, so that is done here, and not where what is expected lies
    before the archive's first position.
    """
    position, _, subject, block, _ = record
    expected = number_of(block, EXPECTED)
    if expected is None or _OF_ANOTHER in block or 0 < expected < sealed.first:
        return False
    before = lasts.get(subject, expected)
    if expected != before:
        reason = f"position {position} was written after {expected}, but {before} came before it"
        raise ArchiveBroken(sealed.url, reason)
    return subject not in lasts


def lasting(record: RawRecord) -> tuple[int, bytes, bytes, bytes]:
    """Return (position, subject, headers, body): what is the same however often a record is published again."""
    position, _, subject, _, body = record
    return position, subject, _EXPECTATION.sub(b"", _kept(record)), body


def _kept(record: RawRecord) -> bytes:
    """Return the header block without what was for the server, and with the time."""
    block = _FOR_SERVER.sub(b"", record[3] or _NO_HEADERS)
    names = [_RECORDED, _LOGGED] if is_imported(block) else [_RECORDED]
    missing = [name for name in names if name not in block]
    kept = block.rstrip(b"\r\n")
    if missing:
        second, nanosecond = divmod(record[1], 1_000_000_000)
        time = f"{_second(second)}.{nanosecond:09d}Z".encode()
        kept += b"".join(name + time for name in missing)
    return kept + b"\r\n\r\n"


@lru_cache(maxsize=64)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
