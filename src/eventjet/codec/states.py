"""`StateCodec` writes the folded state of an aggregate as JSON and reads it back exactly. PURE."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

import orjson
from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from eventjet.codec.bodies import BodyCodec
from eventjet.codec.json import dump_json
from eventjet.codec.shape import shape_of, without_docs
from eventjet.codec.unions import union_faults
from eventjet.domain.aggregate import aggregate_info
from eventjet.errors import DefinitionError

S = TypeVar("S")


class StateCodec(Generic[S]):
    """Encodes and decodes the states of one aggregate type; raises `DefinitionError` if a state cannot be JSON."""

    def __init__(self, cls: Any, use: str, remedy: str) -> None:
        """`use` says in errors what a state cannot be, as `a snapshot`, and `remedy` what else to do."""
        self.info = aggregate_info(cls)
        self._cls = cls
        self._remedy = remedy
        self._name = cls.__qualname__
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(cls)
            self._core: Any = adapter.core_schema
            self._codec = BodyCodec(cls, self._core)
            self.shape: Any = adapter.json_schema()
            """The JSON Schema of the state, as pydantic has it."""
        except (PydanticUserError, PydanticUndefinedAnnotation, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0]
            fault = f"the state of {self.info.name!r} cannot be {use}: {reason}; {remedy} or change it"
            raise DefinitionError([fault]) from None

    @cached_property
    def wire_shape(self) -> Any:
        """The JSON Schema of the state with the leaves of the wire and the names of enum members; without docs."""
        return without_docs(shape_of(self._cls, self._core))

    @cached_property
    def fingerprint(self) -> str:
        """The digest of the aggregate's name, its revision and the shape of its state, whatever docstrings say."""
        return digest(dump_json([self.info.name, self.info.revision, self.wire_shape], orjson.OPT_SORT_KEYS))

    def faults(self) -> list[str]:
        """Return an error text for each field whose type would not be read back as it was."""
        return [f"{fault}; or {self._remedy}" for fault in union_faults(self._codec.schema, self._name)]

    def encode(self, state: S) -> bytes:
        """Return the state as JSON; raises `UnencodableEvent` for one that `decode` would not restore exactly."""
        return self._codec.read_back(state, exact=True)[0]

    def decode(self, body: bytes) -> S:
        """Return the state; raises `ValueError` for JSON of another shape."""
        return cast("S", self._codec.decode(body))


def digest(body: bytes) -> str:
    """Return 32 hex digits that stand for these bytes."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()
