"""Show a record of the log, find its cause and its effects, and list the rows that it touched."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, cast
from uuid import UUID

from pydantic_core import to_json

from eventjet.app import App
from eventjet.codec.headers import (
    COMMAND,
    MSG_ID,
    SCHEMA,
    SKIP_NAME,
    TYPE,
    VERSION,
    RawRecord,
    event_id_of,
    header,
    is_imported,
    logged_at,
    metadata_of,
    number_of,
    recorded_at,
    save_of,
    skipped_by,
    stored_at,
)
from eventjet.codec.json import read_json
from eventjet.codec.reasons import reason_of
from eventjet.codec.subjects import entity_of
from eventjet.domain.blob import DIGEST
from eventjet.domain.personal import field_hint, is_private
from eventjet.domain.recorded import Recorded
from eventjet.errors import CodecError, UnexpectedExit
from eventjet.jet import Jet
from eventjet.log.store import BATCH_MAX, EventStore
from eventjet.projections.columns import key_labels
from eventjet.projections.projection import Entries
from eventjet.projections.resolve import ResolvedProjection
from eventjet.text import utc_text

_DEPTH_MAX = 100
"""How deep the JSON of a body may be nested to be shown as JSON: what shows it calls itself for each level."""


def event_view(
    jet: Jet, record: RawRecord, skipped: Mapping[int, str] = MappingProxyType({}), *, personal: bool = False
) -> dict[str, Any]:
    """Return a record as a mapping with eventjet's own names; content that cannot be read becomes a `fault`.

    `skipped` maps the positions that have a skip marker to its reason. Personal data is masked unless `personal` asks
    for it.
    """
    position, _, subject, block, body = record
    event, optional = _header_fields(record, skipped)
    try:
        jet.decode(record)
    except CodecError as error:
        optional["fault"] = optional.get("fault") or str(error)
    kind, schema, data = event["type"], number_of(block, SCHEMA), stored_json(body)
    event["data"] = data if personal or skipped_by(subject) is not None else jet.masked(kind, schema, data)
    if position in skipped:
        optional.pop("fault", None)
    order = ("command_id", "metadata", "fault", "skipped")
    return event | {name: optional[name] for name in order if optional.get(name) is not None}


def header_view(record: RawRecord, skipped: Mapping[int, str]) -> dict[str, Any]:
    """Return what `event_view` does without the body, from subject and headers alone: quick for bodies of any size."""
    event, optional = _header_fields(record, skipped)
    return event | {name: value for name, value in optional.items() if value is not None}


def _header_fields(record: RawRecord, skipped: Mapping[int, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what subject and headers say: the fields that every record has, and the optional ones."""
    position, _, subject, block, _ = record
    fault: str | None = None
    skipped_position = skipped_by(subject)
    try:
        aggregate, aggregate_id = entity_of(subject) if skipped_position is None else (SKIP_NAME, str(skipped_position))
    except ValueError as error:
        aggregate, aggregate_id = "?", subject.decode("utf-8", "replace")
        fault = f"the subject {aggregate_id!r} names no entity: {error}"
    when = stored_at(record)
    try:
        when = recorded_at(record)
    except CodecError as error:
        fault = fault or str(error)
    command_id, metadata = None, dict[str, Any]()
    try:
        command_id, parsed = metadata_of(block)
        fields = asdict(parsed)
        extra = fields.pop("extra")
        metadata = {name: value for name, value in fields.items() if value} | extra
    except ValueError as error:
        fault = fault or str(error)
    event: dict[str, Any] = {
        "position": position,
        "recorded_at": utc_text(when),
        "aggregate": aggregate,
        "aggregate_id": aggregate_id,
        "version": number_of(block, VERSION),
        "event_id": event_id_of(record),
        "type": header(block, TYPE) or "?",
        "schema": number_of(block, SCHEMA),
    }
    reason = skipped.get(position)
    optional = {"command_id": command_id, "metadata": metadata or None, "fault": fault if reason is None else None}
    return event, optional | {"skipped": reason}


def bodies_in(data: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """Yield field, digest, size, name and media type of each large body in an event's JSON that is not masked."""
    if isinstance(data, dict):
        value = cast("dict[str, Any]", data)
        digest, size = value.get("digest"), value.get("size")
        if isinstance(digest, str) and isinstance(size, int) and DIGEST.fullmatch(digest.encode()):
            names = {name: str(value.get(name) or "") for name in ("name", "media_type")}
            yield {"path": path, "digest": digest, "size": size, **names}
            return
        for name, item in value.items():
            yield from bodies_in(item, f"{path}.{name}" if path else name)
    elif isinstance(data, list):
        for index, item in enumerate(cast("list[Any]", data)):
            yield from bodies_in(item, f"{path}[{index}]")


def import_time(record: RawRecord) -> str | None:
    """Return when an imported event entered the log, as ISO text; None for all other events."""
    if not is_imported(record[3]):
        return None
    try:
        return logged_at(record).isoformat()
    except CodecError:
        return stored_at(record).isoformat()


def headers_of(record: RawRecord) -> list[tuple[str, str]]:
    """Return all headers of a record as they are stored, in stored order."""
    lines = record[3].decode("utf-8", "replace").split("\r\n")[1:]
    return [(name, value) for name, _, value in (line.partition(": ") for line in lines if line)]


def stored_json(body: bytes) -> Any:
    """Return a body parsed as JSON; as text where it is no JSON, or nested too deeply to be shown as such."""
    with suppress(ValueError, RecursionError):
        value = read_json(body)
        if body.count(b"[") + body.count(b"{") <= _DEPTH_MAX or not _is_deep(value):
            return value
    return body.decode("utf-8", "backslashreplace")


def _is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested deeper than `_DEPTH_MAX`."""
    level: list[Any] = [value]
    for _ in range(_DEPTH_MAX + 1):
        level = [item for each in level for item in _items(each)]
        if not level:
            return False
    return True


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


NEAR = 200
"""Records on each side of an event that are read first: most causes, and the rest of its command, are among them."""
AROUND = 1_000
"""Records that are read on each side of the time in a cause's id."""
FORWARD = 2_000
"""Records that one search for effects reads at most."""
EFFECTS_MAX = 100
KEYS_MAX = 20
"""Rows of one read model that are named at most."""
_CHUNK = 200
_BYTES_MAX = 8_000_000
"""Limit on the bytes of the records that one search reads: one record may have 900,000."""
_LOOK_S = 1.2
_SKEW = timedelta(seconds=2)
"""How far the clock of a client that makes ids may be ahead of the server's."""


@dataclass(slots=True)
class Node:
    """An event in the tree of effects, with its own effects."""

    record: RawRecord
    effects: list[Node] = field(default_factory=list["Node"])


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of an event, as far as the search read."""

    nodes: Sequence[Node]
    first_searched: int
    last_searched: int
    """The last position that was read."""
    is_end: bool
    """Whether `last_searched` is the end of the log."""
    cut: bool
    """Whether there are more effects than are listed."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause that an event names, and its record."""

    id: str
    record: RawRecord | None
    """The event with this id, or the last event of the command with this id; None where neither was found."""
    searched: str = ""
    """Which records were searched, in words; empty where the record was found."""


@dataclass(frozen=True, slots=True)
class RowsTouched:
    """The rows that one read model changes for an event."""

    model: str
    keys: Sequence[str] = ()
    """The key of each row as a JSON list."""
    more: int = 0
    reason: str = ""
    """Why there are no keys; empty where there are."""


async def neighbours(store: EventStore, record: RawRecord) -> list[RawRecord]:
    """Return the other events of the same save, or adjacent events of the same command, in the order of the log."""
    position, block = record[0], record[3]
    batch, command = save_of(block), header(block, COMMAND)
    if batch is None and command is None:
        return []
    start = max(position - NEAR, 1)
    records = await _read(store, start, position + NEAR)

    def is_same(candidate: RawRecord) -> bool:
        save = save_of(candidate[3])
        return save == batch if batch is not None else save is None and header(candidate[3], COMMAND) == command

    positions = {candidate[0] for candidate in records if is_same(candidate)}
    first = last = position
    while first - 1 in positions:
        first -= 1
    while last + 1 in positions:
        last += 1
    return [candidate for candidate in records if first <= candidate[0] <= last and candidate[0] != position][
        :BATCH_MAX
    ]


async def cause_of(store: EventStore, record: RawRecord, cause: str) -> Cause:
    """Find the event before `record` whose id, or whose command's id, is `cause`. Raises what `EventStore` does."""
    position = record[0]
    nearby = await _read(store, max(position - NEAR, 1), position - 1)
    cause_record = _record_with_id(nearby, cause)
    if cause_record is not None:
        return Cause(cause, cause_record)
    created_at = made_at(cause)
    if created_at is None:
        return Cause(cause, None, f"among the {len(nearby):,} records before it; its id tells no time")
    earliest = await store.position_at(created_at - _SKEW)
    expected = await store.position_at(created_at)
    spans = {(max(expected - AROUND, 1), expected + AROUND), (earliest, earliest + AROUND)}
    for start, end in sorted(spans, reverse=True):
        cause_record = _record_with_id(await _read(store, start, min(end, position - 1)), cause)
        if cause_record is not None:
            return Cause(cause, cause_record)
    return Cause(
        cause,
        None,
        f"among the {len(nearby):,} records before it, and about {created_at.isoformat(timespec='seconds')}",
    )


async def effects_of(store: EventStore, record: RawRecord, after: int) -> Effects:
    """Return the events after `after`, of the next 2,000, whose cause is this event, its command or an effect."""
    begin = max(after, record[0]) + 1
    root = Node(record)
    nodes_by_id = dict.fromkeys(_ids(record), root)
    position, size, count, until = begin, 0, 0, time.monotonic() + _LOOK_S
    is_end = False
    while position < begin + FORWARD and size < _BYTES_MAX and time.monotonic() < until and not is_end:
        records = await store.records_from(position, min(_CHUNK, begin + FORWARD - position))
        is_end = not records
        for candidate in records:
            size += len(candidate[4])
            position = candidate[0] + 1
            _, metadata = metadata_of(candidate[3])
            parent = nodes_by_id.get(metadata.causation or "")
            if parent is None or count >= EFFECTS_MAX:
                count += parent is not None
                continue
            node = Node(candidate)
            parent.effects.append(node)
            count += 1
            nodes_by_id |= {header(candidate[3], MSG_ID) or f"at {candidate[0]}": node}
    return Effects(root.effects, begin, position - 1, is_end, count > EFFECTS_MAX)


def rows_touched(app: App, recorded: Recorded[Any]) -> list[RowsTouched]:
    """Return the keys of the rows that an event touches, by the app's functions; an error in one is its `reason`."""
    touched: list[RowsTouched] = []
    for name, resolved in app.projections.items():
        joins = resolved.joins if isinstance(resolved, ResolvedProjection) else None
        # A row that moves does so with events that the projection does not take, too.
        if type(recorded.data) not in (resolved.events if joins is None or not joins.moves else joins.decoded):
            continue
        if not isinstance(resolved, ResolvedProjection):
            touched.append(RowsTouched(name, reason="It is an SQL projection: which rows it changed is not known."))
            continue
        if joins is not None:
            reason = "Its key comes from the state of an aggregate: only the whole history says which rows it changed."
            touched.append(RowsTouched(name, reason=reason))
            continue
        if any(is_private(field_hint(resolved.row_type, key)) for key in resolved.key_columns):
            touched.append(RowsTouched(name, reason="Its key is personal, and not shown."))
            continue
        try:
            keys = _keys(resolved, recorded)
            key_columns = list(resolved.table.primary_key.columns)
            key_texts = [
                json.dumps(key_labels(key_columns, key), default=str, ensure_ascii=False) for key in keys[:KEYS_MAX]
            ]
        except BaseException as raised:  # noqa: BLE001 - whatever it is, it is the application's
            error = UnexpectedExit.instead_of(raised)
            reason = reason_of(error, private=app.catalog.is_private)
            touched.append(RowsTouched(name, reason=f"Its key could not be computed: {reason}"))
            continue
        touched.append(RowsTouched(name, key_texts, len(keys) - len(key_texts)))
    return touched


def made_at(event_id: str) -> datetime | None:
    """Return the time in an id; None for an id that is no UUIDv7 (RFC 9562, section 5.7)."""
    try:
        uuid = UUID(event_id)
    except ValueError:
        return None
    if uuid.version != 7 or str(uuid) != event_id:
        return None
    try:
        return datetime.fromtimestamp((uuid.int >> 80) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


async def _read(store: EventStore, start: int, end: int) -> list[RawRecord]:
    """Return the records from `start` to `end`, fewer where they exceed the limit on bytes."""
    records: list[RawRecord] = []
    size = 0
    while start <= end and size < _BYTES_MAX:
        page = [record for record in await store.records_from(start, min(_CHUNK, end - start + 1)) if record[0] <= end]
        if not page:
            break
        records += page
        size += sum([len(record[4]) for record in page])
        start = page[-1][0] + 1
    return records


def _record_with_id(records: Sequence[RawRecord], cause_id: str) -> RawRecord | None:
    by_id = next((record for record in records if header(record[3], MSG_ID) == cause_id), None)
    return by_id or next((record for record in reversed(records) if metadata_of(record[3])[0] == cause_id), None)


def _ids(record: RawRecord) -> list[str]:
    """Return the ids by which effects may name a record as cause: the event's and its command's."""
    command, _ = metadata_of(record[3])
    return [name for name in (header(record[3], MSG_ID), command) if name]


def _keys(resolved: ResolvedProjection, recorded: Recorded[Any]) -> Sequence[tuple[Any, ...]]:
    if not isinstance(resolved.declared, Entries):
        return resolved.keys_of(recorded)
    rows = resolved.entries(recorded)
    return [tuple(getattr(row, key) for key in resolved.key_columns) for row in rows]


def plain_json(value: Any) -> Any:
    """Return a value as plain JSON: times and decimals become text, a state an object."""
    try:
        return read_json(to_json(value, fallback=str, inf_nan_mode="strings", bytes_mode="base64"))
    except ValueError:
        return str(value)
