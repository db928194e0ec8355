"""CloudEvents 1.0, structured mode in JSON (the NATS binding's), of public events. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.envelope import MSG_ID
from eventjet.domain.identity import encode_id
from eventjet.domain.recorded import Recorded

POSITION = "Ej-Position"
"""The position in the log of the event that a message tells of."""
CONTENT_TYPE = "application/cloudevents+json"


@dataclass(frozen=True, slots=True)
class PublicMessage:
    """One message of a publication."""

    subject: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def message_of(prefix: str, source: str, event: Recorded[Any], index: int, encoded: EncodedEvent) -> PublicMessage:
    """The public event `index` of a recorded one, at `<prefix>.<encoded id>`."""
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
