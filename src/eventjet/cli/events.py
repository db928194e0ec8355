"""Stored events as a person reads them, and as JSON; one that the app cannot read is shown with the reason."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from eventjet.cli.failure import printable
from eventjet.codec.envelope import MSG_ID, SCHEMA, TYPE, VERSION, RawRecord, header, metadata_of, recorded_at
from eventjet.codec.subjects import entity_of
from eventjet.errors import CodecError
from eventjet.jet import Jet

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INDENT = " " * 9


@dataclass(frozen=True, slots=True)
class ShownEvent:
    """One record of the log, its body as it is stored."""

    position: int
    recorded_at: datetime
    aggregate: str
    aggregate_id: str
    version: int | None
    type_name: str
    schema: int | None
    event_id: str
    command_id: str | None
    metadata: Mapping[str, str]
    body: Any
    """The stored JSON; text when it is none."""
    fault: str | None
    """Why the app cannot read it."""

    def as_json(self) -> dict[str, Any]:
        """For programs; names as in the vocabulary."""
        value: dict[str, Any] = {
            "position": self.position,
            "recorded_at": self.recorded_at.isoformat().replace("+00:00", "Z"),
            "aggregate": self.aggregate,
            "aggregate_id": self.aggregate_id,
            "version": self.version,
            "event_id": self.event_id,
            "type": self.type_name,
            "schema": self.schema,
            "data": self.body,
        }
        if self.command_id is not None:
            value["command_id"] = self.command_id
        if self.metadata:
            value["metadata"] = dict(self.metadata)
        if self.fault is not None:
            value["fault"] = self.fault
        return value

    def line(self, width: int, *, named: bool) -> str:
        """One event in one line, or more where the width asks for it; `named` says whose it is."""
        when = self.recorded_at.strftime("%Y-%m-%d %H:%M:%SZ")
        whose = f"{self.aggregate} {self.aggregate_id}  " if named else ""
        version = "v?" if self.version is None else f"v{self.version}"
        schema = "" if self.schema in (None, 1) else f" (schema {self.schema})"
        data = self.body if isinstance(self.body, str) else _compact(self.body)
        head = printable(f"{self.position:>7}  {when}  {whose}{version}  {self.type_name}{schema}")
        rest = printable(data) + ("" if self.fault is None else f"  unreadable: {printable(self.fault)}")
        if len(head) + 2 + len(rest) <= width:
            return f"{head}  {rest}"
        lines = [_filled(head, width, ""), _filled(rest, width, _INDENT)]
        return "\n".join(line for line in lines if line)


def shown(jet: Jet, record: RawRecord) -> ShownEvent:
    """What can be said of a record; never raises for what is in it."""
    position, time_ns, subject, block, body = record
    aggregate, aggregate_id, fault = _named(subject)
    when = _EPOCH + timedelta(microseconds=time_ns // 1000)
    try:
        when = recorded_at(record)
        jet.decode(record)
    except CodecError as error:
        fault = fault or str(error)
    try:
        command_id, metadata = metadata_of(block)
    except ValueError as error:
        command_id, metadata, fault = None, None, fault or str(error)
    values = {} if metadata is None else {name: getattr(metadata, name) for name in _METADATA}
    return ShownEvent(
        position=position,
        recorded_at=when,
        aggregate=aggregate,
        aggregate_id=aggregate_id,
        version=_number(block, VERSION),
        type_name=header(block, TYPE) or "?",
        schema=_number(block, SCHEMA),
        event_id=header(block, MSG_ID) or "",
        command_id=command_id,
        metadata={name: value for name, value in values.items() if value} | dict(metadata.extra if metadata else {}),
        body=_body(body),
        fault=fault,
    )


_METADATA = ("correlation", "causation", "actor", "traceparent")


def _named(subject: bytes) -> tuple[str, str, str | None]:
    """(aggregate, its id, what is wrong with the subject)."""
    try:
        return *entity_of(subject), None
    except ValueError as error:
        text = subject.decode("utf-8", "replace")
        return "?", text, f"the subject {text!r} names no entity: {error}"


def _number(block: bytes, name: str) -> int | None:
    text = header(block, name)
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _filled(text: str, width: int, indent: str) -> str:
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=_INDENT, break_on_hyphens=False)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _body(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "backslashreplace")
