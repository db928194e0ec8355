"""What goes wrong between bytes and events."""

from __future__ import annotations

from typing import Any

from eventjet.errors.base import EventjetError


class CodecError(EventjetError):
    """Bytes and events do not convert into each other."""


class UnknownEvent(CodecError):
    """No declared event has this wire name and schema."""

    def __init__(self, type_name: str, schema: int, position: int, data: bytes) -> None:
        self.type_name = type_name
        self.schema = schema
        self.position = position
        self.data = data
        super().__init__(
            f"The event at position {position} is {type_name!r} schema {schema}, which this application does not "
            "declare. Deploy the version that declares it, or name it in `retired_events`."
        )


class UndecodableEvent(CodecError):
    """The stored bytes are not the event their headers announce."""

    def __init__(self, type_name: str, position: int, data: bytes, reason: str) -> None:
        self.type_name = type_name
        self.position = position
        self.data = data
        self.reason = reason
        super().__init__(
            f"The event at position {position} ({type_name!r}, {len(data)} bytes) cannot be decoded: {reason}. "
            "Inspect it with `eventjet tail`, then upcast it or quarantine it."
        )


class UnencodableEvent(CodecError):
    """This event would not be read back as it was given, so it is not sent."""

    def __init__(self, event: Any, reason: str) -> None:
        self.event = event
        self.reason = reason
        super().__init__(
            f"{type(event).__name__} cannot be stored: {reason}. Give its fields values that survive JSON."
        )
