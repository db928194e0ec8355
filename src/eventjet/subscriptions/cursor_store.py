"""Cursors on the server: the key-value stream `<app>_cursors`, one value a key, replaced by compare-and-set.

`c.<name>` is a cursor. `q.<name>.<position>` is a quarantined or blocked event. `w.<name>.<owner>` announces a process
that works on a partitioned reactor, and expires with its time to live. All keys are in one stream, so that quarantining
an event and moving the cursor past it are one atomic batch. Reads return what the leader knows: a replica that lags may
not know yet which events were quarantined.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, cast

import orjson

from eventjet.codec.headers import EXPECTED, RawRecord, batch_blocks, header_lines
from eventjet.codec.subjects import cursor_bucket, declared_name
from eventjet.domain.identity import encode_id
from eventjet.domain.quarantined import BLOCKING, QUARANTINED, AggregateKey, Quarantined
from eventjet.errors import ApiRefused, CursorDamaged, CursorFenced, CursorMissing, StoreUnavailable, StreamMissing
from eventjet.jetstream.api import IN_PROCESS, WRONG_SEQUENCE, answer_in, last_message, reading_values
from eventjet.jetstream.client import Client
from eventjet.log.topology import cursors_config, explained
from eventjet.subscriptions.cursor import Cursor, declared_fields
from eventjet.subscriptions.retry import boot_clock

_LENT_S = 0.005
CHANGES_MAX = 900
"""Most quarantine changes in one write: a batch holds 1,000 messages."""
_DELETED, _TTL = ("KV-Operation", "DEL"), "Nats-TTL"
_DELETE_HEADERS = _DELETED, (_TTL, "1h")
"""Headers that delete a key: the delete marker (ADR-8) expires after an hour (ADR-43)."""
_Message: TypeAlias = tuple[str, bytes, list[tuple[str, str]]]
"""(key, body, headers)"""


@dataclass(frozen=True, slots=True)
class QuarantinedEntry:
    """One event of the quarantine of a cursor."""

    event: Quarantined
    quarantined_at: float = 0.0
    """Seconds since 1970."""
    tries: int = 0
    resolved_at: float | None = None
    """Seconds since 1970; None while nothing was resolved."""
    log: str = ""
    """Identity of the log that the event is of: another log has another event at the same position."""
    sequence: int = 0
    """Sequence of the key when the entry was read; not part of the stored value."""

    @property
    def key(self) -> AggregateKey:
        """The aggregate that this entry blocks or is blocked with."""
        return self.event.aggregate, self.event.aggregate_id

    @property
    def position(self) -> int:
        return self.event.position

    @property
    def is_open(self) -> bool:
        """Whether the event is still quarantined, blocked, or to be retried."""
        return self.event.resolution in BLOCKING

    def resolved(self, resolution: str) -> QuarantinedEntry:
        """Return the entry with a resolution that an operator or a worker decided just now."""
        return replace(self, event=replace(self.event, resolution=resolution), resolved_at=time.time())

    def encoded(self) -> bytes:
        value = asdict(self)
        del value["event"]["payload"], value["sequence"]  # the log keeps the payload, the server the sequence
        return orjson.dumps(value)

    @classmethod
    def decoded(cls, body: bytes, sequence: int = 0) -> QuarantinedEntry:
        """Return the entry in a stored value, without fields of a later release; raises `CursorDamaged`."""
        try:
            values = cast("dict[str, Any]", orjson.loads(body))
            _rename_parked(values)
            values |= {"event": Quarantined(**declared_fields(Quarantined, values["event"])), "sequence": sequence}
            return cls(**declared_fields(cls, values))
        except (ValueError, TypeError, KeyError) as error:
            raise CursorDamaged(body, str(error)) from None


def _rename_parked(values: dict[str, Any]) -> None:
    """Give the entry of an older eventjet today's words, as migration 0003 does for the tables."""
    if "parked" in values:
        values |= {"event": values["parked"], "quarantined_at": values["parked_at"]}
        if values["event"]["resolution"] == "parked":
            values["event"]["resolution"] = QUARANTINED


class StoredCursor:
    """A cursor and the sequence that its next write expects.

    The event loop and the thread of `LoopWatch` both write it. So its value is replaced as a whole, and the loop's
    writes wait while the thread has it.
    """

    __slots__ = ("lent_until", "value")

    def __init__(self, cursor: Cursor, sequence: int, written_at: float = 0.0) -> None:
        self.value = cursor, sequence, written_at
        self.lent_until = 0.0
        """How long at most the thread writes it, by the monotonic clock; 0 when it does not."""

    @property
    def cursor(self) -> Cursor:
        return self.value[0]

    @property
    def sequence(self) -> int:
        return self.value[1]

    @property
    def written_at(self) -> float:
        """When the last successful write began, in seconds by this process's clock; 0 before."""
        return self.value[2]

    async def returned(self) -> None:
        """Wait until the thread of `LoopWatch` does not write it."""
        while time.monotonic() < self.lent_until:  # noqa: ASYNC110  a thread clears it, and cannot set an event of the loop
            await asyncio.sleep(_LENT_S)


@dataclass(frozen=True, slots=True)
class CursorEntry:
    """A cursor as it is stored under its name."""

    name: str
    sequence: int
    cursor: Cursor | None
    """None for a value that cannot be read."""


class Cursors:
    """The cursors and quarantines of one app, for any number of tasks of one loop."""

    def __init__(self, client: Client, app: str, clock: Callable[[], float] = boot_clock) -> None:
        """Use the cursors of an app; `clock` is the clock of leases, in seconds."""
        self.clock = clock
        self._bucket = bucket = cursor_bucket(app)
        self.app = app
        self._client = client
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def read(self, name: str) -> StoredCursor:
        """Return the cursor of a name as the leader has it; raises `CursorMissing` where `init` has not created it."""
        stored = await self.find(name)
        if stored is None:
            raise CursorMissing(self.app, name)
        return stored

    async def find(self, name: str) -> StoredCursor | None:
        """Return what `read` does, or None where there is no cursor."""
        try:
            record = await self._last(f"c.{name}")
        except StreamMissing:
            return None
        return StoredCursor(Cursor.decoded(record[4]), record[0]) if record is not None and record[4] else None

    async def sequence(self, name: str) -> int:
        """Return the sequence that the next write of a cursor must expect, whether or not its value can be read."""
        record = await self._last(f"c.{name}")
        return 0 if record is None else record[0]

    async def _last(self, key: str) -> RawRecord | None:
        return await self._client.ask(last_message(self._stream, self._prefix + key))

    async def write(
        self,
        stored: StoredCursor,
        cursor: Cursor,
        to_write: Sequence[QuarantinedEntry] = (),
        to_delete: Sequence[QuarantinedEntry] = (),
    ) -> None:
        """Replace the cursor and change its quarantine in one atomic write.

        `to_write` and `to_delete` are entries of the quarantine, at most `CHANGES_MAX` together. Raises `CursorFenced`
        when the cursor has changed since it was read, and `StoreUnavailable` when no answer came: the write may have
        happened then.
        """
        name = cursor.name
        changes: list[_Message] = [(_key(name, entry), entry.encoded(), []) for entry in to_write]
        changes += [(_key(name, entry), b"", list(_DELETE_HEADERS)) for entry in to_delete]
        await self._replace(stored, cursor, changes)

    async def decide(self, stored: StoredCursor, cursor: Cursor, entries: Sequence[QuarantinedEntry]) -> None:
        """Replace the cursor, and entries read before it; raises as `write`, also where an entry has changed."""
        name = cursor.name
        expecting = [(_key(name, entry), entry.encoded(), [(EXPECTED, str(entry.sequence))]) for entry in entries]
        await self._replace(stored, cursor, expecting)

    async def adopt(self, stored: StoredCursor, cursor: Cursor) -> None:
        """Replace a cursor and its quarantine by one of the log that continues its own; repeatable (ADR 0071)."""
        entries = [
            replace(entry, log=cursor.log)
            for entry in await self.quarantined(cursor.name, resolved=True)
            if entry.log == stored.cursor.log
        ]
        while len(entries) > CHANGES_MAX:
            await self.decide(stored, stored.cursor, entries[:CHANGES_MAX])
            entries = entries[CHANGES_MAX:]
        await self.decide(stored, cursor, entries)

    async def _replace(self, stored: StoredCursor, cursor: Cursor, changes: Sequence[_Message]) -> None:
        base = stored.value  # what `cursor` was made from
        while True:
            await stored.returned()
            before, base = base, stored.value
            if base is not before:  # `LoopWatch` renewed the cursor meanwhile, and may have counted a try
                for tried in set(base[0].tries) - set(before[0].tries):
                    cursor = cursor.tried(*tried)
            began = self.clock()
            replacement = (f"c.{cursor.name}", cursor.encoded(), [(EXPECTED, str(base[1]))])
            try:
                last = await self._send(cursor.name, [replacement, *changes])
            except CursorFenced:
                await stored.returned()
                if stored.value is base:
                    raise
                continue  # `LoopWatch` wrote first, for the same session
            if stored.value is base:  # else `LoopWatch` has written after this
                stored.value = cursor, last - len(changes), began
            return

    async def of(self, name: str) -> list[CursorEntry]:
        """Return all cursors of a declared name, however many partitions it was divided into."""
        entries: list[CursorEntry] = []
        for sequence, _, subject, _, body in await self._client.run(reading_values(self._bucket, "c.*")):
            cursor_name = subject.decode().removeprefix(f"{self._prefix}c.")
            if declared_name(cursor_name) == name:
                cursor = None
                with suppress(CursorDamaged):
                    cursor = Cursor.decoded(body)
                entries.append(CursorEntry(cursor_name, sequence, cursor))
        return entries

    async def divide(
        self,
        existing: Sequence[CursorEntry],
        cursors: Sequence[Cursor],
        moved: Sequence[tuple[str, str, QuarantinedEntry]],
    ) -> None:
        """Replace the cursors that were read (`existing`) with these cursors in one atomic write; raises as `write`.

        `moved` are quarantined events, each with the name of the cursor that had it and of the cursor that gets it.
        Cursors and events may be `CHANGES_MAX` messages together; an event that gets another cursor takes two messages.
        """
        sequences = {cursor_entry.name: cursor_entry.sequence for cursor_entry in existing}
        messages: list[_Message] = []
        for cursor in cursors:
            expected = sequences.pop(cursor.name, None)
            if expected is None:
                record = await self._last(f"c.{cursor.name}")
                if record is not None and record[4]:
                    raise CursorFenced(cursor.name)  # somebody has created it
                expected = 0 if record is None else record[0]
            messages.append((f"c.{cursor.name}", cursor.encoded(), [(EXPECTED, str(expected))]))
        messages += [
            (f"c.{name}", b"", [(EXPECTED, str(sequence)), *_DELETE_HEADERS]) for name, sequence in sequences.items()
        ]
        for old_name, new_name, entry in moved:
            messages.append((_key(new_name, entry), entry.encoded(), []))
            if old_name != new_name:
                messages.append((_key(old_name, entry), b"", list(_DELETE_HEADERS)))
        await self._send(cursors[0].name, messages)

    async def drop(self, stored: StoredCursor, entries: Sequence[QuarantinedEntry]) -> None:
        """Remove a cursor and its quarantine entries; raises as `write`.

        Of more than `CHANGES_MAX` entries the first are removed before the cursor, so an interrupted removal can be
        repeated.
        """
        while len(entries) > CHANGES_MAX:
            await self.write(stored, stored.cursor.released(), to_delete=entries[:CHANGES_MAX])
            entries = entries[CHANGES_MAX:]
        name = stored.cursor.name
        messages: list[_Message] = [(f"c.{name}", b"", [(EXPECTED, str(stored.sequence)), *_DELETE_HEADERS])]
        messages += [(_key(name, entry), b"", list(_DELETE_HEADERS)) for entry in entries]
        await self._send(name, messages)

    async def beat(self, name: str, owner: str, partitions: int, ttl_s: float) -> int:
        """Announce for `ttl_s` seconds that a process works on a partitioned reactor.

        Returns the number of processes, this one included, that announce the same number of partitions. The time to
        live is rounded up to whole seconds.
        """
        body = str(partitions).encode()
        ttl = f"{max(1, math.ceil(ttl_s))}s"
        await self._send(name, [(f"w.{name}.{encode_id(owner)}", body, [(_TTL, ttl)])])
        return sum(record[4] == body for record in await self._client.run(reading_values(self._bucket, f"w.{name}.*")))

    async def leave(self, name: str, owner: str) -> None:
        """Withdraw the announcement of `beat`."""
        await self._send(name, [(f"w.{name}.{encode_id(owner)}", b"", [_DELETED, (_TTL, "1s")])])

    async def _send(self, name: str, messages: Sequence[_Message]) -> int:
        """Send messages as one atomic batch and return the sequence of the last; raises as `write`."""
        blocks = batch_blocks([header_lines(headers) for _, _, headers in messages])
        *before, (key, body, block) = [
            (self._prefix + key, body, block) for (key, body, _), block in zip(messages, blocks, strict=True)
        ]
        try:
            frame = await self._client.request(key, body, block, earlier_messages=before, stream=self._stream)
            answer = answer_in(frame, f"The cursor {name}")
        except (ApiRefused, StoreUnavailable) as error:
            code = error.err_code if isinstance(error, ApiRefused) else None
            if code == IN_PROCESS or (code == WRONG_SEQUENCE and await self._was_changed(messages)):
                raise CursorFenced(name) from None
            if code == WRONG_SEQUENCE:
                reason = "the server says that somebody changed it, and nobody has"
                raise StoreUnavailable(f"The cursor {name}", reason) from None
            raise await explained(self._client, cursors_config(self.app, 1), error) from error
        return int(answer["seq"])

    async def _was_changed(self, messages: Sequence[_Message]) -> bool:
        """Return whether somebody wrote one of these keys since it was read; the server's error does not say so."""
        for key, _, headers in messages:
            expected = dict(headers).get(EXPECTED)
            if expected is not None:
                record = await self._last(key)
                if str(0 if record is None else record[0]) != expected:
                    return True
        return False

    async def quarantined(
        self, name: str, *, resolved: bool = False, limit: int | None = None
    ) -> list[QuarantinedEntry]:
        """Return the quarantined and blocked events of a cursor, by position.

        `resolved` includes events that were retried or dropped. At most `limit` entries are read, those that were
        written first.
        """
        records = await self._client.run(reading_values(self._bucket, f"q.{name}.*", limit))
        entries = [QuarantinedEntry.decoded(record[4], record[0]) for record in records]
        return sorted((entry for entry in entries if resolved or entry.is_open), key=lambda entry: entry.position)


def _key(name: str, entry: QuarantinedEntry) -> str:
    return f"q.{name}.{entry.position}"
