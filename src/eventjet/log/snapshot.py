"""What a snapshot is: a folded state, where it stands, and what makes it worth believing.

The value is one JSON object: position, version, event id, recent command ids, fingerprint (format, aggregate, state's
fields, events' schemas, revision), state, and a checksum over all of it. Without a known fingerprint it is no snapshot.
"""

from __future__ import annotations

import hashlib
from typing import Any, Generic, TypeVar, cast

import orjson
from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from eventjet.codec.bodies import BodyCodec
from eventjet.codec.json import dump_json, read_json
from eventjet.codec.unions import union_faults
from eventjet.domain.aggregate import aggregate_info, event_info
from eventjet.domain.history import Commands, FoldedState
from eventjet.domain.subscription import folded_events
from eventjet.errors import DefinitionError, UnencodableEvent

S = TypeVar("S")

FORMAT = 1
_HEAD, _TAIL = b'{"checksum":"%s","snapshot":', b"}"
_HEAD_BYTES = len(_HEAD % (b"0" * 32))


class SnapshotCodec(Generic[S]):
    """Snapshots of one aggregate type; raises `DefinitionError` when its state cannot be JSON."""

    def __init__(self, cls: Any) -> None:
        info = aggregate_info(cls)
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(cls)
            self._codec = BodyCodec(cls, cast("Any", adapter.core_schema))
            shape: Any = adapter.json_schema()
        except (PydanticUserError, PydanticUndefinedAnnotation, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0]
            fault = f"the state of {info.name!r} cannot be a snapshot: {reason}; leave out snapshot_every or change it"
            raise DefinitionError([fault]) from None
        events = sorted((event_info(one).name, event_info(one).schema) for one in folded_events(cls))
        told = dump_json([FORMAT, info.name, info.revision, shape, events], orjson.OPT_SORT_KEYS)
        self.fingerprint = _digest(told)
        self._name = cls.__qualname__

    def faults(self) -> list[str]:
        """Fields of which a snapshot would not tell what they were, each as a sentence."""
        return [f"{fault}; or leave out snapshot_every" for fault in union_faults(self._codec.schema, self._name)]

    def encode(self, held: FoldedState[S]) -> bytes | None:
        """The value; None for a state that would not come back as it is."""
        try:
            state, _ = self._codec.read_back(held.state, exact=True)
        except UnencodableEvent:
            return None
        inner = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "position": held.position,
            "version": held.version,
            "event_id": held.event_id,
            "commands": held.commands.as_mapping(held.version),
            "complete": held.commands.complete,
            "state": orjson.Fragment(state),
        }
        body = orjson.dumps(inner)
        return _HEAD % _digest(body).encode() + body + _TAIL

    def decode(self, value: bytes) -> FoldedState[S] | None:
        """The folded state; None for anything that is not exactly what this codec writes."""
        try:
            body = value[_HEAD_BYTES:-1]
            if value[:_HEAD_BYTES] != _HEAD % _digest(body).encode() or value[-1:] != _TAIL:
                return None
            inner: dict[str, Any] = read_json(body)
            if inner["format"] != FORMAT or inner["fingerprint"] != self.fingerprint:
                return None
            state = cast("S", self._codec.decode(dump_json(inner["state"])))
            versions = {key: (_counted(first), _counted(last)) for key, (first, last) in inner["commands"].items()}
            commands = Commands(versions, complete=bool(inner["complete"]))
            version, position = _counted(inner["version"]), _counted(inner["position"])
            return FoldedState(state, version, position, str(inner["event_id"]), commands)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _counted(value: Any) -> int:
    """A version or a position; raises `ValueError` for what is none."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} counts nothing")
    return value


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
