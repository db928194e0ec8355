"""Compare a table's columns with those that the application declares now, before anything is written. PURE.

A new column is added where earlier rows have null in it, as they would have today, and a decimal gets more digits.
Everything else is refused: rows that are in the table would not be what the log says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eventjet.lake.tables import LakeTable
from eventjet.spark.columns import pyarrow


def changes(table: LakeTable, stored: Any, *, widens_decimals: bool) -> tuple[bool, list[str]]:
    """Return whether a table of the Arrow schema `stored` has to be widened, and what forbids it, in words."""
    refusals: list[str] = []
    by_name = {field.name: field.type for field in stored}
    is_wider = False
    for field in table.schema:
        if field.name not in by_name:
            is_wider = True
            if field.name not in table.nullable:
                refusals.append(
                    f"the column {field.name} ({shown(field.type)}) is new, and its default is not None, so rows in "
                    "the table would lack its value"
                )
            continue
        for path, old, new in _differences(field.name, by_name.pop(field.name), field.type):
            if old is None:
                refusals.append(f"the field {path} ({shown(new)}) is new, inside a column")
            elif new is None:
                refusals.append(
                    f"the field {path} ({shown(old)}) is in the table, and the app declares none of this name"
                )
            elif widens_decimals and _has_more_digits(old, new):
                is_wider = True
            else:
                refusals.append(f"the column {path} is {shown(old)}, and the app declares {shown(new)}")
    refusals += [
        f"the column {name} ({shown(kind)}) is in the table, and the app declares none of this name"
        for name, kind in by_name.items()
    ]
    return is_wider, refusals


def shown(kind: Any) -> str:
    """Return an Arrow type as people write it; formats differ in how they write the same types."""
    types = pyarrow().types
    if types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {shown(field.type)}' for field in kind)}>"
    if _is_list(kind):
        return f"list<{shown(kind.value_type)}>"
    if types.is_map(kind):
        return f"map<{shown(kind.key_type)}, {shown(kind.item_type)}>"
    if types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp without zone"
    return str(kind).removeprefix("large_").removesuffix("_view")


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, type in the table, declared type) of each difference; None for a field that is missing."""
    types = pyarrow().types
    if types.is_struct(old) and types.is_struct(new):
        before, after = ({field.name: field.type for field in kind} for kind in (old, new))
        for name in {**before, **after}:
            if name in before and name in after:
                yield from _differences(f"{path}.{name}", before[name], after[name])
            else:
                yield f"{path}.{name}", before.get(name), after.get(name)
    elif _is_list(old) and _is_list(new):
        yield from _differences(f"{path}[]", old.value_type, new.value_type)
    elif types.is_map(old) and types.is_map(new):
        yield from _differences(f"{path}{{}}", old.item_type, new.item_type)
    elif shown(old) != shown(new):
        yield path, old, new


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    return types.is_list(kind) or types.is_large_list(kind)


def _has_more_digits(old: Any, new: Any) -> bool:
    types = pyarrow().types
    return types.is_decimal(old) and types.is_decimal(new) and old.scale == new.scale and old.precision < new.precision
