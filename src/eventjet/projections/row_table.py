"""`table_of` returns the table of a projection: a given one, that of a mapped class, or the one its row class declares.

A row class declares its columns by annotation: the type of a field gives the type of its column, `Key[…]` marks the
primary key, and `Annotated[…]` takes SQLAlchemy's own words (a type, a `mapped_column` or a `Column`) for the rest.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, cast

from sqlalchemy import Column, MetaData, Table
from sqlalchemy import types as sa
from sqlalchemy.orm import MappedColumn

from eventjet.domain.state import field_names
from eventjet.domain.subscription import resolved_hint, shown_name, union_members
from eventjet.errors import DefinitionError
from eventjet.projections.columns import COLUMN_TYPES, default_type
from eventjet.projections.row_type import annotated, fits

T = TypeVar("T")

_KEY = Column[Any](primary_key=True)
Key: TypeAlias = Annotated[T, _KEY]
"""Marks a field of a row that is (a part of) the primary key of its table: `account_id: Key[str]`.

A row class with a key declares its table. The type of a field gives the type of its column, and `Annotated` takes a
type, a `mapped_column` or a `Column` of SQLAlchemy for what it does not say:
`account_id: Annotated[Key[str], String(40)]`, `owner: Annotated[str, mapped_column(index=True)]`,
`amount: Annotated[Decimal, Numeric(12, 2)]`. A field that may be None is a column that may be NULL.
"""

TableSource: TypeAlias = Table | type[Any]
"""A table, or a mapped class that has one: a `DeclarativeBase`, a `MappedAsDataclass`, an `SQLModel`."""


def table_from(source: TableSource) -> Table:
    """Return a table that was given as it is or by its mapped class; raises `DefinitionError` for anything else."""
    table: Any = source if isinstance(source, Table) else getattr(source, "__table__", None)
    if isinstance(table, Table):
        return cast("Table", table)
    raise DefinitionError(
        [f"{shown_name(source)} has no table; give a `Table`, a mapped class with `__tablename__`, or no table"]
    )


def table_of(name: str, source: TableSource | None, function: Callable[..., Any], *, is_list: bool) -> Table:
    """Return a projection's table; `is_list` if its function may return several rows. Raises `DefinitionError`."""
    return table_from(source) if source is not None else _declared_table(name, row_type_of(function, is_list=is_list))


def row_type_of(function: Callable[..., Any], *, is_list: bool) -> type:
    """Return the class of rows in a function's return annotation; raises `DefinitionError` where it is not one."""
    members = union_members(resolved_hint(function, "return"))
    row_types = {_item_type(member) if is_list else member for member in members}
    row_type = next(iter(row_types), None)
    if hasattr(row_type, "__mapper__"):
        reason = (
            f"returns {shown_name(row_type)}, a mapped class, whose objects change in place, and a row does not; "
            f"return a frozen dataclass with its columns, and give the class as table={shown_name(row_type)}"
        )
    elif len(row_types) != 1 or not isinstance(row_type, type) or not _is_record(row_type):
        reason = "must be annotated to return one dataclass (or pydantic model), or None"
    else:
        return row_type
    raise DefinitionError([f"{shown_name(function)} {reason}"])


def _is_record(cls: type) -> bool:
    return hasattr(cls, "__dataclass_fields__") or hasattr(cls, "model_fields")


def _item_type(hint: Any) -> Any:
    args = typing.get_args(hint)
    return args[0] if args and typing.get_origin(hint) in (list, tuple, Sequence) else hint


def _declared_table(name: str, row_type: type) -> Table:
    faults: list[str] = []
    columns = [_column(row_type, field_name, faults) for field_name in field_names(row_type)]
    if not any(column.primary_key for column in columns):
        first = columns[0].name
        faults.append(
            f"no field of {row_type.__qualname__} is its key; mark it, as in `{first}: Key[…]`, or give a `table`"
        )
    if faults:
        raise DefinitionError(faults)
    return Table(name, MetaData(), *columns)


def _column(row_type: type, name: str, faults: list[str]) -> Column[Any]:
    classes: list[Any] = []
    words: list[Any] = []
    _read(annotated(row_type, name, include_extras=True), classes, words)
    field = f"{row_type.__qualname__}.{name}"
    columns = [column for word in words if (column := _column_in(word)) is not None and column is not _KEY]
    # A table has columns of its own, and an annotation may stand in many classes; SQLAlchemy copies so for mixins.
    column = cast("Any", columns[-1])._copy() if columns else Column[Any]()
    column.primary_key = column.primary_key or any(word is _KEY for word in words)
    kinds = [kind for word in words if (kind := _type_in(word)) is not None]
    faults += [f"{field} {fault}" for fault in _word_faults(column, name, classes, words)]
    for noun, values in (("columns", columns), ("types", kinds)):
        if len(values) > 1:
            faults.append(f"{field} names {len(values)} {noun}; leave one")
    column.type = kinds[-1] if kinds else _default_of(classes, field, faults)
    column.name = column.key = name
    column.nullable = type(None) in classes and not column.primary_key
    if column.primary_key:
        column.autoincrement = False
    return column


def _word_faults(column: Any, name: str, classes: Sequence[Any], words: Sequence[Any]) -> Iterator[str]:
    """Yield what the words of `Annotated` say that its column would not do; words of other libraries are theirs."""
    may_be_none = type(None) in classes
    if column.primary_key and may_be_none:
        yield "is a key and may be None; a key has a value in each row"
    for other_name in {column.name, column.key} - {None, name}:
        yield f"names its column {other_name!r}; a column has the name of its field, so rename the field"
    nullable = column._user_defined_nullable
    if isinstance(nullable, bool) and nullable != may_be_none and not column.primary_key:
        its_type = "may be None" if may_be_none else "is never None; write `… | None` for a column that may be NULL"
        yield f"says nullable={nullable}, and by its type it {its_type}; leave `nullable` out"
    if column.autoincrement is True:
        yield "is numbered by the database (autoincrement), and a rebuild would number it anew; leave that out"
    for word in words:
        cls = word if isinstance(word, type) else cast("type[Any]", type(word))
        if cls.__module__.startswith("sqlalchemy.") and _column_in(word) is None and _type_in(word) is None:
            yield (
                f"has {cls.__name__} in its annotation, which is no column and no type; put it into "
                "`mapped_column(…)`, or beside the projection, on its `table`"
            )


def _read(hint: Any, classes: list[Any], words: list[Any]) -> None:
    """Add the classes of an annotation and the words of its `Annotated`, the outermost last, to the lists."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        _read(parts[0], classes, words)
        words += parts[1:]
    elif origin in (typing.Union, types.UnionType, typing.Final):
        for part in parts:
            _read(part, classes, words)
    elif type(hint).__name__ == "TypeAliasType":
        _read(hint.__value__, classes, words)
    elif isinstance(hint, typing.NewType):
        _read(hint.__supertype__, classes, words)
    elif origin is typing.Literal:
        classes += map(type, parts)
    else:
        classes.append(type(None) if hint is None else origin or hint)


def _column_in(word: Any) -> Column[Any] | None:
    """Return the column that a word of `Annotated` is; None for another word."""
    column: Any = cast("Any", word).column if isinstance(word, MappedColumn) else word
    return cast("Column[Any]", column) if isinstance(column, Column) else None


def _type_in(word: Any) -> sa.TypeEngine[Any] | None:
    """Return the type of column that a word of `Annotated` gives; None for a word that gives none."""
    column = _column_in(word)
    kind: Any = word if column is None else column.type
    if isinstance(kind, type) and issubclass(kind, sa.TypeEngine):
        kind = cast("Any", kind)()
    is_type = isinstance(kind, sa.TypeEngine) and not isinstance(kind, sa.NullType)
    return cast("sa.TypeEngine[Any]", kind) if is_type else None


def _default_of(classes: list[Any], field: str, faults: list[str]) -> sa.TypeEngine[Any]:
    named = list(dict.fromkeys(cls for cls in classes if cls is not type(None)))
    kind = default_type(named[0]) if len(named) == 1 else None
    if kind is None:
        names = " | ".join(map(shown_name, named)) or "None"
        if named == [Any]:
            faults.append(
                f"{field} is Any, or names what is not found in the class's module; import it for real (not under "
                "TYPE_CHECKING) and at module level"
            )
            return sa.NullType()
        fitting = [row.base.__name__ for row in COLUMN_TYPES if named and all(fits(cls, row.accepted) for cls in named)]
        if fitting:
            name = field.rpartition(".")[2]
            way_out = f"says no type of column; name it, as in `{name}: Annotated[{names}, {fitting[0]}]`"
        else:
            way_out = f"no column keeps as it is; {_INSTEAD.get(names, 'keep text, a number or JSON of it')}"
        faults.append(f"{field} is {names}, which {way_out}")
    return kind or sa.NullType()


_INSTEAD = {
    "timedelta": "keep its seconds: declare the field as `float`, and write `value.total_seconds()`",
    "time": "keep its text: declare the field as `str`, and write `value.isoformat()`",
}
"""What a field holds instead of a value for which there is no column, by the name of its type."""
