"""Hypothesis strategies for events and for the arguments of decisions, from their own annotations."""

from __future__ import annotations

import math
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
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
_BYTES_MAX = 20
_TEXT = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
_PLAIN: dict[Any, SearchStrategy[Any]] = {
    bool: st.booleans(),
    Blob: st.binary(max_size=20).map(Blob.of),
    time: st.times(),
    UUID: st.uuids(),
    types.NoneType: st.none(),
}


def _instants(low: datetime, high: datetime) -> SearchStrategy[datetime]:
    first, last = (at.astimezone(UTC).replace(tzinfo=None) for at in (low, high))
    return st.datetimes(first, last, timezones=st.just(UTC))


_SPANS: dict[Any, tuple[Any, Any, Callable[[Any, Any], SearchStrategy[Any]]]] = {
    date: (date(1970, 1, 1), date(2199, 12, 31), st.dates),
    datetime: (datetime(1970, 1, 1, tzinfo=UTC), datetime(2199, 12, 31, tzinfo=UTC), _instants),
    timedelta: (timedelta(seconds=-(10**6)), timedelta(seconds=10**6), st.timedeltas),
}
"""(the first and the last value without limits in the annotation, the strategy of values between two)."""
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
    if model_fields and cls.__pydantic_complete__:
        init_fields = {name: info for name, info in model_fields.items() if info.init is not False}
        return [(name, info.annotation, list(info.metadata), info.is_required()) for name, info in init_fields.items()]
    hints = typing.get_type_hints(cls, include_extras=True)
    if model_fields:  # a model that names a class which is declared after it
        return [(name, hints[name], [], info.is_required()) for name, info in model_fields.items()]
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
    if type(hint).__name__ == "TypeAliasType":
        return _values(hint.__value__, limits, where, options)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_values(part, limits, where, options) for part in parts])
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is not None:
        return _container(hint, parts, limits, where, options)
    return _scalar(hint, limits, where, options)


def _container(
    hint: Any, parts: Sequence[Any], limits: Sequence[Any], where: str, options: Values
) -> SearchStrategy[Any]:
    origin = typing.get_origin(hint)
    min_size, max_size = _sizes(limits, _ITEMS_MAX)
    if origin is tuple and parts[-1:] != (Ellipsis,):
        return st.tuples(*(_values(part, [], where, options) for part in parts))
    if origin is not tuple and origin not in (*_EACH, dict, abc.Mapping):
        raise _unknown(hint, where)
    items = _values(parts[0], [], where, options)
    if origin is tuple:
        return st.lists(items, min_size=min_size, max_size=max_size).map(tuple)
    if origin in _EACH:
        return cast("SearchStrategy[Any]", _EACH[origin](items, min_size=min_size, max_size=max_size))
    return st.dictionaries(items, _values(parts[1], [], where, options), min_size=min_size, max_size=max_size)


def _scalar(hint: Any, limits: Sequence[Any], where: str, options: Values) -> SearchStrategy[Any]:
    if (plain := _PLAIN.get(hint)) is not None:
        return plain
    if hint is str:
        return _texts(limits, options.text_max)
    if hint is bytes:
        min_size, max_size = _sizes(limits, _BYTES_MAX)
        return st.binary(min_size=min_size, max_size=max_size)
    if hint in _SPANS:
        first, last, between = _SPANS[hint]
        low, high, is_inside = _range(limits, first, last)
        return between(low, high).filter(is_inside)
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
    far: Any = options.number_max
    places: Any = _limit(limits, "decimal_places")
    if kind is Decimal:
        if places is None:
            places = max([options.places, *(_places(Decimal(bound)) for bound in _bounds(limits).values())])
        if (digits := _limit(limits, "max_digits")) is not None:
            far = min(far, 10 ** max(digits - places, 0) - Decimal(1).scaleb(-places))
    low, high, is_inside = _range(limits, -far, far)
    step = _limit(limits, "multiple_of")
    if step is not None and kind is not float:
        first, last = math.ceil(Fraction(low) / Fraction(step)), math.floor(Fraction(high) / Fraction(step))
        return st.integers(first, last).map(lambda count: kind(count * step)).filter(is_inside)
    if kind is int:
        return st.integers(int(low), int(high)).filter(is_inside)
    if kind is float:
        return st.floats(float(low), float(high), allow_nan=False, allow_infinity=False).filter(is_inside)
    return st.decimals(low, high, places=places, allow_nan=False, allow_infinity=False).filter(is_inside)


def _bounds(limits: Sequence[Any]) -> dict[str, Any]:
    return {name: bound for name in ("gt", "ge", "lt", "le") if (bound := _limit(limits, name)) is not None}


def _range(limits: Sequence[Any], first: Any, last: Any) -> tuple[Any, Any, Callable[[Any], bool]]:
    """Return the least and the largest value within the limits, and whether a value between them is inside.

    `first` and `last` count where there is no limit.
    """
    bounds = _bounds(limits)
    lower, upper = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    low = lower if lower is not None else min(first, upper) if upper is not None else first
    high = upper if upper is not None else max(last, lower) if lower is not None else last

    def is_inside(value: Any) -> bool:
        return ("gt" not in bounds or value > bounds["gt"]) and ("lt" not in bounds or value < bounds["lt"])

    return low, high, is_inside


def _places(number: Decimal) -> int:
    """Return the decimal places of a number."""
    exponent = number.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _sizes(limits: Sequence[Any], most: int) -> tuple[int, int]:
    min_size = max((limit.min_length for limit in limits if _has(limit, "min_length")), default=0)
    max_size = min((limit.max_length for limit in limits if _has(limit, "max_length")), default=most)
    return min_size, max(min_size, min(max_size, most))


def _has(limit: object, name: str) -> bool:
    return getattr(limit, name, None) is not None


def _limit(limits: Sequence[Any], name: str) -> Any:
    return next((getattr(limit, name) for limit in limits if _has(limit, name)), None)


def _unknown(hint: Any, where: str) -> UsageError:
    type_name = _hint_text(hint)
    return UsageError(
        f"{where} is of the type {type_name}, of which no values can be made up. "
        f"Say how: `strategies = {{{type_name}: …}}` with a strategy of Hypothesis, in the class of laws."
    )


def _hint_text(hint: Any) -> str:
    """Return an annotation as the application's code names it, such as `Box[int]`."""
    name = str(getattr(typing.get_origin(hint) or hint, "__qualname__", hint))
    parts = typing.get_args(hint)
    return f"{name}[{', '.join(map(_hint_text, parts))}]" if parts else name
