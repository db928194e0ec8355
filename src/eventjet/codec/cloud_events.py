"""Encode public events as CloudEvents, and decode the messages of inboxes. PURE.

CloudEvents 1.0 in structured mode, as JSON (NATS protocol binding).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import orjson
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaValidator

from eventjet.codec.bodies import BodyCodec, readable
from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.headers import MSG_ID, RawRecord
from eventjet.codec.json import dump_json, read_json
from eventjet.codec.reasons import reason_of
from eventjet.domain.aggregate import event_info
from eventjet.domain.identity import encode_id
from eventjet.domain.personal import is_private
from eventjet.domain.reactor import Incoming
from eventjet.domain.recorded import Recorded
from eventjet.errors import DefinitionError, UndecodableMessage

POSITION = "Ej-Position"
"""The header with the position in the log of the event that a message was translated from."""
CONTENT_TYPE = "application/cloudevents+json"
_REQUIRED = {"specversion", "id", "source", "type"}
"""Attributes that every CloudEvent has."""


@dataclass(frozen=True, slots=True)
class PublicMessage:
    """A message of a publication, ready to be published."""

    subject: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def message_of(prefix: str, source: str, event: Recorded[Any], index: int, encoded: EncodedEvent) -> PublicMessage:
    """Return the message of the public event `index` of a recorded event, on `<prefix>.<encoded id>`."""
    name = f"{event.event_id}.{index}"
    body = orjson.dumps(
        {
            "specversion": "1.0",
            "id": name,
            "source": source,
            "type": encoded.type_name,
            "subject": event.aggregate_id,
            "time": event.recorded_at,
            "datacontenttype": "application/json",
            "sequence": f"{event.position:020d}",
            "data": orjson.Fragment(encoded.body),
        }
    )
    headers = ((MSG_ID, name), ("Content-Type", CONTENT_TYPE), (POSITION, str(event.position)))
    return PublicMessage(f"{prefix}.{encode_id(event.aggregate_id)}", headers, body)


class IncomingDecoder:
    """Decodes messages of another stream to `Incoming`.

    Event classes are decoded by the JSON profile of events, all other types by pydantic. A message may be a CloudEvent
    in structured mode, whose `data` is validated, or the JSON itself.
    """

    def __init__(self, kind: Any, created: str) -> None:
        """Prepare the decoder of one type; raises `DefinitionError` for a type that pydantic cannot validate.

        `created` is the time at which the stream was created, part of the ids of messages that are not CloudEvents.
        """
        self._created = created
        self._is_private = is_private(kind)
        try:
            event_info(kind)
        except DefinitionError:
            try:
                schema = readable(kind, cast("Any", TypeAdapter(kind).core_schema))
                self._read: Any = SchemaValidator(schema, _use_prebuilt=False).validate_json
            except (PydanticUserError, TypeError) as error:
                raise DefinitionError([f"nothing can be validated as {kind!r}: {error}"]) from None
        else:
            self._read = BodyCodec(kind).decode

    def __call__(self, record: RawRecord) -> Incoming[Any]:
        """Return the decoded message; raises `UndecodableMessage` for a message that the inbox does not take."""
        position, time_ns, subject, _, body = record
        try:
            message: Any = read_json(body)
            name, source, data = f"{self._created}/{position}", "", body
            if (
                isinstance(message, dict)
                and {"specversion", "id", "source", "type"} <= cast("dict[str, Any]", message).keys()
            ):
                event = cast("dict[str, Any]", message)
                name, source, data = str(event["id"]), str(event["source"]), dump_json(event.get("data"))
            at = datetime.fromtimestamp(time_ns // 1_000_000_000, UTC) + timedelta(microseconds=time_ns // 1000 % 10**6)
            return Incoming(self._read(data), name, source, subject.decode("utf-8", "replace"), position, at)
        except (ValueError, RecursionError) as error:
            raise UndecodableMessage(
                subject.decode("utf-8", "replace"), position, body, reason_of(error, private=self._is_private)
            ) from None
