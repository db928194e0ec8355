"""The arguments of a decision on the wire: an object of its parameters by name, in the profile of events. PURE."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.errors import PydanticUserError

from eventjet.codec.json import BodyCodec
from eventjet.codec.shape import shape_of
from eventjet.codec.unions import union_faults
from eventjet.domain.subscription import resolved_hint, shown_name
from eventjet.errors import DefinitionError

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Arguments:
    """Strict both ways: what a decision is not annotated with is refused, and so are names that it does not have."""

    def __init__(self, decide: Callable[..., Any]) -> None:
        """Raises `DefinitionError` for a decision whose parameters cannot travel."""
        self._signature = inspect.signature(decide)
        _, *parameters = self._signature.parameters.values()
        bare: dict[str, Any] = {"__annotations__": {}, "__module__": decide.__module__}
        for one in parameters:
            if one.kind in _VARIADIC:
                raise DefinitionError([f"{shown_name(decide)} takes *{one.name}, which cannot be served"])
            bare["__annotations__"][one.name] = resolved_hint(decide, one.name)
            if one.default is not one.empty:
                bare[one.name] = one.default
        made = pydantic_dataclass(
            frozen=True, kw_only=True, config={"strict": True, "extra": "forbid", "hide_input_in_errors": True}
        )
        try:
            self._type: Any = made(type(str(getattr(decide, "__name__", "arguments")), (), bare))
            self._codec = BodyCodec(self._type)
        except (PydanticUserError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise DefinitionError([f"{shown_name(decide)} cannot be served: {reason}"]) from None
        if faults := union_faults(self._codec.schema, shown_name(decide)):
            raise DefinitionError(faults)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """A call's arguments; raises `TypeError`, `ValueError` and `UnencodableEvent` for what does not fit."""
        bound = self._signature.bind(None, *args, **kwargs).arguments
        named = dict(list(bound.items())[1:])
        return self._codec.read_back(self._type(**named))[0]

    def decode(self, body: bytes) -> dict[str, Any]:
        """Arguments by name; raises `ValueError` for a body that does not say them, or one of them twice."""
        json.loads(body or b"{}", object_pairs_hook=_check_names)
        told = self._codec.decode(body or b"{}")
        return {one.name: getattr(told, one.name) for one in fields(told)}

    def schema(self) -> dict[str, Any]:
        """JSON Schema, with the profile's leaves: a Decimal is a string."""
        return shape_of(self._type)


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    """Readers of JSON do not agree which value of a name counts (RFC 8259, section 4)."""
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"the name {name[:100]!r} comes twice")
        names.add(name)


@lru_cache(maxsize=1_000)
def arguments_of(decide: Callable[..., Any]) -> Arguments:
    """Made once for each decision; raises `DefinitionError`."""
    return Arguments(decide)
