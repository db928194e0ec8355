"""Encode public events as CloudEvents, and decode the messages of inboxes. PURE.

CloudEvents 1.0 in structured mode, as JSON (NATS protocol binding).
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaValidator

from eventjet.codec.bodies import BodyCodec, reading_schema
from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.headers import MSG_ID, RawRecord, header, stored_time
from eventjet.codec.json import dump_json, read_json
from eventjet.codec.reasons import reason_of
from eventjet.domain.aggregate import event_info, is_event
from eventjet.domain.identity import encode_id
from eventjet.domain.personal import is_private
from eventjet.domain.reactor import Incoming, Origin
from eventjet.domain.recorded import Recorded
from eventjet.domain.subscription import union_members
from eventjet.errors import DefinitionError, UndecodableMessage

POSITION = "Ej-Position"
"""The header with the position in the log of the event that a message was translated from."""
_STREAM_SOURCE = "Nats-Stream-Source"
"""The header that the server adds to a gathered message: stream, sequence, filter, transform, subject, and identity."""
_SOURCE_WORDS = 5
"""Words of that header before the identity of the origin, which servers write from 2.15 on."""
CONTENT_TYPE = "application/cloudevents+json"
_REQUIRED = {"specversion", "id", "source", "type"}
"""Attributes that every CloudEvent has."""


@dataclass(frozen=True, slots=True)
class PublicMessage:
    """A message of a publication, ready to be published."""

    subject: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def message_of(
    stream: str, publication: str, source: str, event: Recorded[Any], index: int, encoded: EncodedEvent
) -> PublicMessage:
    """Return the message of the public event `index` of a recorded event, on `<stream>.<publication>.<encoded id>`.

    Its id names the publication. Otherwise two publications of one event would have equal ids: their common stream
    would drop the second message, and a reader of a common source would take it for a repetition.
    """
    name = f"{event.event_id}.{publication}.{index}"
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
    return PublicMessage(f"{stream}.{publication}.{encode_id(event.aggregate_id)}", headers, body)


class IncomingDecoder:
    """Decodes messages of another stream to `Incoming`.

    Event classes are decoded by the JSON profile of events, all other types by pydantic. A message may be a CloudEvent
    in structured mode, whose `data` is validated, or the JSON itself. The type of a CloudEvent has to be the name of an
    event class that is taken, since the fields of another event may fit.
    """

    def __init__(self, kind: Any, created: str, sources: Mapping[str, tuple[str, str]] | None = None) -> None:
        """Prepare the decoder of one type; raises `DefinitionError` for a type that pydantic cannot validate.

        `created` is the time at which the stream was created, part of the ids of messages that are not CloudEvents.
        `sources` has (stream, API prefix) of each source of a gathered stream, by its name in the header; None for a
        stream that is not gathered, in which whoever publishes might write that header.
        """
        self._created = created
        self._sources = sources
        bare = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
        members = union_members(bare)
        self._by_type: dict[str, Any] = {}
        if all(map(is_event, members)):
            for member in members:
                info = event_info(member)
                self._by_type |= dict.fromkeys((info.name, *info.formerly), BodyCodec(member).decode)
        self._is_private = is_private(kind)
        try:
            event_info(bare)
        except DefinitionError:
            try:
                schema = reading_schema(kind, cast("Any", TypeAdapter(kind).core_schema))
                self._read: Any = SchemaValidator(schema, _use_prebuilt=False).validate_json
            except (PydanticUserError, TypeError) as error:
                raise DefinitionError([f"nothing can be validated as {kind!r}: {error}"]) from None
        else:
            self._read = BodyCodec(bare).decode

    def __call__(self, record: RawRecord) -> Incoming[Any]:
        """Return the decoded message; raises `UndecodableMessage` for a message that the inbox does not take."""
        position, time_ns, subject, _, body = record
        try:
            message: Any = read_json(body)
            origin = None if self._sources is None else origin_of(record, self._sources)
            name = f"{self._created}/{position}"
            if origin is not None and origin.made:  # without it, the id would be that of a stream made again, too
                name = f"{origin.api}/{origin.stream}/{origin.made}/{origin.position}"
            source, data, read = "", body, self._read
            if isinstance(message, dict) and cast("dict[str, Any]", message).keys() >= _REQUIRED:
                event = cast("dict[str, Any]", message)
                name, source, data = _id_of(event["id"]), str(event["source"]), dump_json(event.get("data"))
                if not source and "/" in name:
                    raise ValueError(f"its source is empty, and its id {name!r} might be that of another message")
                read = self._read_of(event["type"])
            subject_text = subject.decode("utf-8", "replace")
            return Incoming(read(data), name, source, subject_text, position, stored_time(time_ns), origin)
        except (ValueError, RecursionError) as error:
            raise UndecodableMessage(
                subject.decode("utf-8", "replace"), position, body, reason_of(error, private=self._is_private)
            ) from None

    def _read_of(self, type_name: Any) -> Any:
        """Return the decoder of a CloudEvent's data: for event classes, that of the event with its type.

        Raises `ValueError` for a type that none of them has.
        """
        if not self._by_type:
            return self._read
        if not isinstance(type_name, str) or type_name not in self._by_type:
            raise ValueError(f"its type {type_name!r} is none of {', '.join(sorted(self._by_type))}")
        return self._by_type[type_name]


def _id_of(value: Any) -> str:
    """Return the id of a CloudEvent; raises `ValueError` for one that cannot tell its message from the next."""
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise ValueError(f"its id is {value!r}, and each CloudEvent needs text of its own as id")
    return str(value)


def origin_of(record: RawRecord, sources: Mapping[str, tuple[str, str]]) -> Origin | None:
    """Return where a message of a gathered stream was published; None for one that was published in it.

    `sources` has (stream, API prefix) of each source by its name in the header. A source that is no longer one of the
    stream has its name in the header as its stream.
    """
    words = (header(record[3], _STREAM_SOURCE) or "").split(" ")
    if len(words) < _SOURCE_WORDS or not words[1].isdigit():
        return None
    stream, api = sources.get(words[0], (words[0], ""))
    return Origin(stream, int(words[1]), words[_SOURCE_WORDS] if len(words) > _SOURCE_WORDS else "", api)
