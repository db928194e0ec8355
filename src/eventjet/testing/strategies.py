"""Hypothesis strategies for events and for the arguments of decisions, from their own annotations."""

from __future__ import annotations

import types
import typing
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, cast
from uuid import UUID

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from eventjet.domain.blob import Blob
from eventjet.errors import UsageError


@dataclass(frozen=True, slots=True)
class Values:
    """The user's strategies and the default limits for generated values."""

    strategies: Mapping[Any, SearchStrategy[Any]] = field(default_factory=dict[Any, SearchStrategy[Any]])
    """Strategies by type; they take precedence over the built-in ones."""
    text_max: int = 20
    """The most characters of a text without a limit in its annotation."""
    number_max: int = 10**6
    """The largest magnitude of a number without a limit in its annotation."""
    places: int = 2
    """Decimal places of a `Decimal` whose annotation does not set them."""

    @classmethod
    def within(cls, strategies: Mapping[Any, SearchStrategy[Any]], tables: Iterable[Any], events_max: int) -> Values:
        """Return limits so that values, and sums of `events_max` of them, fit every column of these tables."""
        defaults = cls(strategies)
        texts, numbers, places = [defaults.text_max], [defaults.number_max], [defaults.places]
        for kind in (column.type for table in tables for column in table.columns):
            length, precision, scale = (getattr(kind, name, None) for name in ("length", "precision", "scale"))
            if length and not hasattr(kind, "enums"):
                texts.append(length)
            if precision is not None and scale is not None:
                numbers.append(10 ** (precision - scale) // (2 * events_max))
                places.append(scale)
            elif kind.__visit_name__.lower() in ("small_integer", "smallint"):
                numbers.append(2**15 // (2 * events_max))
        return cls(strategies, min(texts), max(1, min(numbers)), min(places))


_ITEMS_MAX = 4
_TEXT = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
_PLAIN: dict[Any, SearchStrategy[Any]] = {
    bool: st.booleans(),
    Blob: st.binary(max_size=20).map(Blob.of),
    bytes: st.binary(max_size=20),
    date: st.dates(date(1970, 1, 1), date(2199, 12, 31)),
    datetime: st.datetimes(datetime(1970, 1, 1), datetime(2199, 12, 31), timezones=st.just(UTC)),  # noqa: DTZ001
    time: st.times(),
    timedelta: st.integers(-(10**6), 10**6).map(lambda seconds: timedelta(seconds=seconds)),
    UUID: st.uuids(),
    types.NoneType: st.none(),
}
_EACH: dict[Any, Callable[..., Any]] = {
    list: st.lists,
    abc.Sequence: st.lists,
    set: st.sets,
    frozenset: st.frozensets,
    abc.Set: st.frozensets,
}


def values_of(hint: Any, where: str, options: Values) -> SearchStrategy[Any]:
    """Return a strategy for an annotation; raises `UsageError`, which names `where`, for a type without a strategy."""
    return _values(hint, [], where, options)


def instances_of(cls: Any, options: Values) -> SearchStrategy[Any]:
    """Return a strategy for instances of an event, a dataclass or a pydantic model that pydantic accepts."""
    if cls in options.strategies:
        return options.strategies[cls]
    required, optional = dict[str, SearchStrategy[Any]](), dict[str, SearchStrategy[Any]]()
    for name, hint, limits, is_required in _fields_of(cls):
        (required if is_required else optional)[name] = _values(hint, limits, f"{cls.__qualname__}.{name}", options)

    def make(values: dict[str, Any]) -> Any:
        try:
            return cls(**values)
        except ValidationError:
            reject()

    return st.fixed_dictionaries(required, optional=optional).map(make)


def _fields_of(cls: Any) -> list[tuple[str, Any, list[Any], bool]]:
    """Return (name, annotation, limits, whether it is required) of each argument of the constructor."""
    model_fields: dict[str, FieldInfo] = getattr(cls, "__pydantic_fields__", {})
    if model_fields:
        init_fields = {name: info for name, info in model_fields.items() if info.init is not False}
        return [(name, info.annotation, list(info.metadata), info.is_required()) for name, info in init_fields.items()]
    hints = typing.get_type_hints(cls, include_extras=True)
    return [
        (info.name, hints[info.name], [], info.default is MISSING and info.default_factory is MISSING)
        for info in fields(cls)
        if info.init
    ]


def _values(hint: Any, limits: Sequence[Any], where: str, options: Values) -> SearchStrategy[Any]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        base, *metadata = parts
        unpacked = [limit for item in metadata for limit in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _values(base, [*limits, *unpacked], where, options)
    if hint in options.strategies:
        return options.strategies[hint]
    if isinstance(hint, typing.NewType):
        return _values(hint.__supertype__, limits, where, options)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_values(part, limits, where, options) for part in parts])
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is not None:
        return _container(origin, parts, limits, where, options)
    return _scalar(hint, limits, where, options)


def _container(
    origin: Any, parts: Sequence[Any], limits: Sequence[Any], where: str, options: Values
) -> SearchStrategy[Any]:
    min_size, max_size = _sizes(limits, _ITEMS_MAX)
    if origin is tuple and parts[-1:] != (Ellipsis,):
        return st.tuples(*(_values(part, [], where, options) for part in parts))
    items = _values(parts[0], [], where, options)
    if origin is tuple:
        return st.lists(items, min_size=min_size, max_size=max_size).map(tuple)
    if origin in _EACH:
        return cast("SearchStrategy[Any]", _EACH[origin](items, min_size=min_size, max_size=max_size))
    if origin in (dict, abc.Mapping):
        return st.dictionaries(items, _values(parts[1], [], where, options), min_size=min_size, max_size=max_size)
    raise _unknown(origin, where)


def _scalar(hint: Any, limits: Sequence[Any], where: str, options: Values) -> SearchStrategy[Any]:
    if (plain := _PLAIN.get(hint)) is not None:
        return plain
    if hint is str:
        return _texts(limits, options.text_max)
    if hint in (int, float, Decimal):
        return _numbers(hint, limits, options)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from([*hint])
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, BaseModel)):
        return st.deferred(lambda: instances_of(hint, options))
    raise _unknown(hint, where)


def _texts(limits: Sequence[Any], longest: int) -> SearchStrategy[str]:
    patterns: list[str] = [limit.pattern for limit in limits if _has(limit, "pattern")]
    if patterns:
        return st.from_regex(patterns[0], fullmatch=True)
    min_size, max_size = _sizes(limits, longest)
    return st.text(_TEXT, min_size=min_size, max_size=max_size)


def _numbers(kind: Any, limits: Sequence[Any], options: Values) -> SearchStrategy[Any]:
    """Return numbers within the annotation's limits; without limits, amounts such as those of money."""
    bounds = {name: getattr(limit, name) for limit in limits for name in ("gt", "ge", "lt", "le") if _has(limit, name)}
    lower, upper = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    far = options.number_max
    low = lower if lower is not None else min(-far, upper if upper is not None else 0)
    high = upper if upper is not None else max(far, lower if lower is not None else 0)

    def inside(value: Any) -> bool:
        return ("gt" not in bounds or value > bounds["gt"]) and ("lt" not in bounds or value < bounds["lt"])

    if kind is int:
        return st.integers(int(low), int(high)).filter(inside)
    if kind is float:
        return st.floats(float(low), float(high), allow_nan=False, allow_infinity=False).filter(inside)
    places = next((limit.decimal_places for limit in limits if _has(limit, "decimal_places")), options.places)
    return st.decimals(low, high, places=places, allow_nan=False, allow_infinity=False).filter(inside)


def _sizes(limits: Sequence[Any], most: int) -> tuple[int, int]:
    min_size = max((limit.min_length for limit in limits if _has(limit, "min_length")), default=0)
    max_size = min((limit.max_length for limit in limits if _has(limit, "max_length")), default=most)
    return min_size, max(min_size, min(max_size, most))


def _has(limit: object, name: str) -> bool:
    return getattr(limit, name, None) is not None


def _unknown(hint: Any, where: str) -> UsageError:
    type_name = getattr(hint, "__qualname__", str(hint))
    return UsageError(
        f"{where} is of the type {type_name}, of which no values can be made up. "
        f"Say how: `strategies = {{{type_name}: …}}` with a strategy of Hypothesis, in the class of laws."
    )
