"""`RowCodec` converts rows (instances of a dataclass) to and from the values of a table, exactly. Pure."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import reduce
from operator import attrgetter
from typing import Any, NoReturn, Protocol, TypeAlias, cast

from sqlalchemy import JSON, Column, Table
from sqlalchemy import types as sa

from eventjet.domain.personal import MASK, field_hint, is_private
from eventjet.domain.state import is_fixed
from eventjet.errors import RowRefused, RowUnreadable
from eventjet.projections.columns import Convert, Unread, dumps, normaliser, way_out_of
from eventjet.projections.row_type import annotated
from eventjet.text import shown

Normalise: TypeAlias = Callable[..., Any]
"""Takes (row, row before or None) and returns the row in its normal form."""


class ColumnValues(Protocol):
    """How a database's driver takes and gives the values of column types."""

    def dumper(self, kind: sa.TypeEngine[Any], /) -> Convert | None:
        """Return the conversion from the normal form to what the driver takes; None where they are the same."""
        ...

    def loader(self, kind: sa.TypeEngine[Any], /) -> Convert | None:
        """Return the conversion from what the driver gives to the normal form; None where they are the same."""
        ...


class RowCodec:
    """Checks, dumps and loads the rows of one table. Values are always in the order of the table's columns.

    Without `values` it converts nothing for a driver: it dumps and loads values in their normal form.

    `normalise` does not depend on the database: `load(dump(normalise(row)))` equals `normalise(row)` on each of them.
    """

    __slots__ = (
        "_checks", "_dumps", "_key_dumps", "_key_places", "_loaders", "_loads", "_make", "_open", "_values",
        "columns", "fields", "is_open", "key", "normalise", "row_type", "table_name",
    )  # fmt: skip

    def __init__(self, table: Table, row_type: type, values: ColumnValues | None = None) -> None:
        declared = list(table.columns)
        names = tuple(column.key for column in declared)
        self.table_name = table.name
        self.row_type = row_type
        self.columns = tuple(column.name for column in declared)
        """The names of the columns in SQL."""
        self.fields = names
        """The names of a row's fields, in the order of the columns."""
        self.key: Callable[[Any], tuple[Any, ...]] = _values_of([column.key for column in table.primary_key.columns])
        """Returns the key of a row, always a tuple."""
        self._values = _values_of(names)
        dumps = [values.dumper(column.type) for column in declared] if values else []
        self._dumps = _conversions(dumps)
        self._key_dumps = _conversions([values.dumper(key.type) for key in table.primary_key.columns] if values else [])
        hints = {name: annotated(row_type, name) for name in names}
        forms = [_form(hints[column.key]) if isinstance(column.type, JSON) else None for column in declared]
        loaders = [values.loader(column.type) if values else None for column in declared]
        self._loaders = list(map(_composed, loaders, forms)) if values else loaders
        self._loads = _conversions(self._loaders)
        self._checks = [_check(column, form) for column, form in zip(declared, forms, strict=True)]
        self._key_places = [place for place, column in enumerate(declared) if column.primary_key]
        self._make = _maker(row_type, names)
        self._open = [
            column.key for column in declared if isinstance(column.type, JSON) and not is_fixed(hints[column.key])
        ]
        self.is_open = bool(self._open)
        """Whether a row may hold lists or dicts, which the application could change in place."""
        self.normalise = _normaliser_of(
            row_type,
            table.name,
            [(column.key, column.name, check) for column, check in zip(declared, self._checks, strict=True)],
            self._make,
            shares=not any(isinstance(column.type, JSON) for column in declared),
        )
        """Takes (row, row before or None) and returns the row as it will be read back; raises `RowRefused` for a value
        that would not be read back equal. The row before is normalised; the new row may share values with it."""

    def dump(self, row: Any) -> tuple[Any, ...]:
        """Return the values of a normalised row as the driver takes them, for an insert or `COPY`."""
        values = self._values(row)
        return tuple(_converted(values, self._dumps)) if self._dumps else values

    def dump_keys(self, keys: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
        """Return normalised keys as the driver takes them; it sorts them as the database does."""
        conversions = self._key_dumps
        return [tuple(_converted(key, conversions)) for key in keys] if conversions else keys

    def is_same(self, row: Any, before: Any) -> bool:
        """Whether the values of a normalised row that could be changed in place still equal those of `before`."""
        try:
            return all(dumps(getattr(row, name)) == dumps(getattr(before, name)) for name in self._open)
        except (TypeError, ValueError, RecursionError):
            return False  # it now has a value that is not JSON

    def load(self, values: Sequence[Any]) -> Any:
        """Return the row of the values that the driver gave; raises `RowUnreadable` for values that no fold writes."""
        try:
            row = self._make(_converted(values, self._loads) if self._loads else values)
            self.normalise(row)
        except Exception as error:
            raise self._unreadable(values, error) from error
        return row

    def _unreadable(self, values: Sequence[Any], error: Exception) -> RowUnreadable:
        """Return the error for a row that cannot be read, with the first column at fault."""
        parts = [self._loaded_part(place, values[place]) for place in self._key_places]
        key, has_key = tuple(part for part, _ in parts), all(is_valid for _, is_valid in parts)
        values_by_field = dict(zip(self.fields, values, strict=True))
        for field, column, value, load, check in zip(
            self.fields, self.columns, values, self._loaders, self._checks, strict=True
        ):
            try:
                check(value if value is None or load is None else load(value))
            except Exception as fault:  # noqa: BLE001 - as above
                private = is_private(field_hint(self.row_type, field))
                shown_value = MASK if private else shown(str(value) if isinstance(value, Unread) else value)
                return RowUnreadable(
                    self.table_name,
                    key,
                    column,
                    _reason(value, fault, private=private),
                    values_by_field,
                    given=shown_value,
                    has_key=has_key,
                )
        reason = f"{self.row_type.__name__} cannot be made of it ({type(error).__name__})"
        return RowUnreadable(self.table_name, key, "", reason, values_by_field, has_key=has_key)

    def _loaded_part(self, place: int, value: Any) -> tuple[Any, bool]:
        """Return (the loaded part of a key, True), or (the driver's value, False) where no fold can have written it."""
        load = self._loaders[place]
        try:
            return self._checks[place](value if load is None else load(value)), value is not None
        except Exception:  # noqa: BLE001 - as above
            return value, False


def _reason(value: Any, fault: Exception, *, private: bool) -> str:
    """Return why no fold can have written this value."""
    if value is None:
        return "it is NOT NULL"
    if isinstance(value, Unread):
        return "Python has no such value"
    return str(fault) if isinstance(fault, ValueError) and not private else "no fold writes such a value"


def _normaliser_of(
    row_type: type,
    table_name: str,
    columns: Sequence[tuple[str, str, Convert]],
    make: Callable[[Sequence[Any]], Any],
    *,
    shares: bool,
) -> Normalise:
    """Generate the function that normalises a row, with code for each column: the hottest code of a fold.

    `columns` are (attribute of the row, name in SQL, check). With `shares`, a value that is the same object as in the
    row before is not checked again.
    """

    def stray(row: Any) -> NoReturn:
        raise TypeError(f"it returned {type(row).__name__}, not {row_type.__name__}")

    def refuse(row: Any, index: int, error: ValueError) -> NoReturn:
        attribute, name, _ = columns[index]
        value = getattr(row, attribute)
        private = is_private(field_hint(row_type, attribute))
        reason, way_out = ("it would not come back equal" if private else str(error)), way_out_of(error)
        if value is None:
            reason, way_out = "it is NOT NULL", "Give it a value, or declare a column that may be NULL."
        given = MASK if private else ""
        raise RowRefused(table_name, name, given or value, reason, way_out, given=given) from None

    namespace = {"row_type": row_type, "make": make, "stray": stray, "refuse": refuse}
    namespace |= {f"check{index}": check for index, (_, _, check) in enumerate(columns)}
    exec(_source([attribute for attribute, _, _ in columns], shares=shares), namespace)  # noqa: S102 - of a dataclass's field names
    return namespace["normalise"]


def _source(attributes: Sequence[str], *, shares: bool) -> str:
    indexes = range(len(attributes))
    values = [f"value{index}" for index in indexes]
    fitted = [f"fitted{index}" for index in indexes]
    checked = [f"{fitted[index]} = check{index}({values[index]})" for index in indexes]
    checked_if_changed = [
        f"if {values[index]} is not before.{attributes[index]}: {checked[index]}" if shares else checked[index]
        for index in indexes
    ]
    return "\n".join((
        "def normalise(row, before=None):",
        " if type(row) is not row_type: stray(row)",
        *(f" {values[index]} = {fitted[index]} = row.{attributes[index]}" for index in indexes),
        " try:",
        "  if before is None:",
        *(f"   at = {index}; {checked[index]}" for index in indexes),
        "  else:",
        *(f"   at = {index}\n   {checked_if_changed[index]}" for index in indexes),
        " except ValueError as error:",
        "  refuse(row, at, error)",
        f" if {' and '.join(f'{fitted[index]} is {values[index]}' for index in indexes)}: return row",
        f" return make(({', '.join(fitted)},))",
    ))  # fmt: skip


def _converted(values: Sequence[Any], conversions: Sequence[tuple[int, Convert]]) -> list[Any]:
    converted = list(values)
    for index, convert in conversions:
        value = converted[index]
        if value is not None:
            converted[index] = convert(value)
    return converted


def _check(column: Column[Any], form: Convert | None) -> Convert:
    """Return a column's check, with the `form` of its JSON; None passes only where the column is nullable."""
    plain = normaliser(column.type)
    check: Convert = plain if form is None else lambda value: form(plain(listed(value)))
    return (lambda value: None if value is None else check(value)) if column.nullable else check


def _form(hint: Any) -> Convert | None:
    """Return the conversion of JSON for a row; only tuples, and no lists, where the annotation allows no changes."""
    form = json_form(hint)
    return _frozen if form is not None and is_fixed(hint) else form


def json_form(hint: Any) -> Convert | None:
    """Return how JSON lists become tuples where an annotation asks for tuples; None where it asks for none."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if type(hint).__name__ == "TypeAliasType":
        return json_form(hint.__value__)
    if isinstance(hint, typing.NewType):
        return json_form(hint.__supertype__)
    if origin in (typing.Annotated, typing.Final):
        return json_form(parts[0])
    if origin in (typing.Union, types.UnionType):
        return reduce(_composed, map(json_form, parts))
    kind: Any = origin or hint
    if kind is tuple:
        return _tuple_form([json_form(part) for part in parts if part is not Ellipsis], is_row=Ellipsis not in parts)
    form = json_form(parts[-1]) if parts and isinstance(kind, type) else None
    if form is None:
        return None

    def convert(value: Any) -> Any:
        is_dict, is_list = isinstance(value, dict), isinstance(value, list)
        if is_dict and issubclass(kind, Mapping):
            return {name: form(item) for name, item in cast("dict[str, Any]", value).items()}
        if is_list and not issubclass(kind, Mapping):
            return [form(item) for item in cast("list[Any]", value)]
        return value

    return convert


def _frozen(value: Any) -> Any:
    """Turn all lists into tuples, for an annotation that allows no changes; raises `ValueError` for a dict."""
    if isinstance(value, dict):
        raise ValueError("its annotation has no Mapping, and a dict can be changed in place")
    return tuple(map(_frozen, cast("list[Any]", value))) if isinstance(value, list) else value


def _tuple_form(forms: list[Convert | None], *, is_row: bool) -> Convert:
    """Return how a list becomes a tuple, by a form for each item (`is_row`), or by the same one for all."""

    def convert(value: Any) -> Any:
        if type(value) is not list:
            return value
        items = cast("list[Any]", value)
        item_forms = forms if is_row else forms[:1] * len(items)
        if len(item_forms) != len(items):
            return tuple(items)
        return tuple([item if form is None else form(item) for item, form in zip(items, item_forms, strict=True)])

    return convert


def _composed(first: Convert | None, second: Convert | None) -> Convert | None:
    if first is None or second is None:
        return first or second
    inner, outer = first, second
    return lambda value: outer(inner(value))


def listed(value: Any) -> Any:
    """Return a row's JSON with lists in the place of tuples."""
    if type(value) is tuple or type(value) is list:
        return [listed(item) for item in cast("Sequence[Any]", value)]
    if type(value) is dict:
        return {name: listed(item) for name, item in cast("dict[Any, Any]", value).items()}
    return value


def _values_of(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads these fields of a row as a tuple, also where there is only one field."""
    if len(names) > 1:
        return attrgetter(*names)
    namespace: dict[str, Any] = {}
    # Called for every event; an `attrgetter` would take twice as long.
    exec(f"def value(row): return (row.{names[0]},)", namespace)  # noqa: S102 - of a dataclass's field name
    return namespace["value"]


def _maker(row_type: type, names: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    row_fields = () if hasattr(row_type, "model_fields") else fields(cast("Any", row_type))
    if tuple(field.name for field in row_fields) == tuple(names) and not any(field.kw_only for field in row_fields):
        return lambda values: row_type(*values)
    return lambda values: row_type(**dict(zip(names, values, strict=True)))


def _conversions(conversions: Sequence[Convert | None]) -> list[tuple[int, Convert]]:
    return [(index, convert) for index, convert in enumerate(conversions) if convert is not None]
