"""A record of the log as it may be shown, whatever is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from eventjet.codec.headers import (
    MSG_ID,
    SCHEMA,
    TYPE,
    VERSION,
    RawRecord,
    header,
    is_imported,
    logged_at,
    metadata_of,
    number_of,
    recorded_at,
    stored_at,
    voided_by,
)
from eventjet.codec.json import read_json
from eventjet.codec.subjects import entity_of
from eventjet.errors import CodecError
from eventjet.jet import Jet

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DEPTH_SURE = 100
"""So many brackets can be printed however they are nested."""


def shown(
    jet: Jet, record: RawRecord, voids: Mapping[int, str] = MappingProxyType({}), *, personal: bool = False
) -> dict[str, Any]:
    """What can be said of a record, with the names of the vocabulary; never raises for what is in it.

    What is `personal` is hidden unless that is asked for.
    """
    position, _, subject, block, body = record
    event, optional = _told(record, voids)
    try:
        jet.decode(record)
    except CodecError as error:
        optional["fault"] = optional.get("fault") or str(error)
    kind, schema, data = event["type"], number_of(block, SCHEMA), stored_json(body)
    event["data"] = data if personal or voided_by(subject) is not None else jet.masked(kind, schema, data)
    if position in voids:
        optional.pop("fault", None)
    order = ("command_id", "metadata", "fault", "void")
    return event | {name: optional[name] for name in order if optional.get(name) is not None}


def headed(record: RawRecord, voids: Mapping[int, str] = MappingProxyType({})) -> dict[str, Any]:
    """As `shown`, of what subject and headers say: quick, however large the body is."""
    event, optional = _told(record, voids)
    return event | {name: value for name, value in optional.items() if value is not None}


def _told(record: RawRecord, voids: Mapping[int, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What subject and headers say, always and sometimes."""
    position, time_ns, subject, block, _ = record
    fault: str | None = None
    voided = voided_by(subject)
    try:
        aggregate, aggregate_id = ("void", str(voided)) if voided is not None else entity_of(subject)
    except ValueError as error:
        aggregate, aggregate_id = "?", subject.decode("utf-8", "replace")
        fault = f"the subject {aggregate_id!r} names no entity: {error}"
    when = _EPOCH + timedelta(microseconds=time_ns // 1000)
    try:
        when = recorded_at(record)
    except CodecError as error:
        fault = fault or str(error)
    command_id, metadata = None, dict[str, Any]()
    try:
        command_id, known = metadata_of(block)
        named = asdict(known)
        extra = named.pop("extra")
        metadata = {name: value for name, value in named.items() if value} | extra
    except ValueError as error:
        fault = fault or str(error)
    event: dict[str, Any] = {
        "position": position,
        "recorded_at": when.isoformat().replace("+00:00", "Z"),
        "aggregate": aggregate,
        "aggregate_id": aggregate_id,
        "version": number_of(block, VERSION),
        "event_id": header(block, MSG_ID) or "",
        "type": header(block, TYPE) or "?",
        "schema": number_of(block, SCHEMA),
    }
    void = voids.get(position)
    optional = {"command_id": command_id, "metadata": metadata or None, "fault": fault if void is None else None}
    return event, optional | {"void": void}


def logged(record: RawRecord) -> str | None:
    """When the log got an event that was recorded elsewhere, as ISO text; None for all others."""
    if not is_imported(record[3]):
        return None
    try:
        return logged_at(record).isoformat()
    except CodecError:
        return stored_at(record).isoformat()


def headers_of(record: RawRecord) -> list[tuple[str, str]]:
    """All headers of a record as they are stored, in their order."""
    lines = record[3].decode("utf-8", "replace").split("\r\n")[1:]
    return [(name, value) for name, _, value in (line.partition(": ") for line in lines if line)]


def stored_json(body: bytes) -> Any:
    """The JSON that is stored; text when it is none, or nested so deeply that it cannot be printed again."""
    try:
        value = read_json(body)
        if body.count(b"[") + body.count(b"{") > _DEPTH_SURE:
            json.dumps(value, indent=2)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "backslashreplace")
    return value
