"""The check of a whole row, written out for its columns as `dataclasses` does: the hottest code of a fold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from eventjet.errors import RowRefused
from eventjet.projections.values import Convert

Normalise: TypeAlias = Callable[..., Any]
"""(row, row before or None) → the row in its normal form."""


def normaliser_of(
    row_type: type,
    table_name: str,
    columns: Sequence[tuple[str, str, Convert]],
    make: Callable[[Sequence[Any]], Any],
    *,
    shares: bool,
) -> Normalise:
    """For columns of (attribute of the row, name in SQL, check).

    With `shares`, a value that is the very object of the row before is not checked again.
    """

    def stray(row: Any) -> NoReturn:
        raise TypeError(f"it returned {type(row).__name__}, not {row_type.__name__}")

    def refuse(row: Any, index: int, error: ValueError) -> NoReturn:
        attribute, name, _ = columns[index]
        value = getattr(row, attribute)
        raise RowRefused(table_name, name, value, "it is NOT NULL" if value is None else str(error)) from None

    known = {"row_type": row_type, "make": make, "stray": stray, "refuse": refuse}
    known |= {f"check{index}": check for index, (_, _, check) in enumerate(columns)}
    exec(_source([attribute for attribute, _, _ in columns], shares=shares), known)  # noqa: S102 - of a dataclass's field names
    return known["normalise"]


def _source(attributes: Sequence[str], *, shares: bool) -> str:
    every = range(len(attributes))
    values = [f"value{index}" for index in every]
    fitted = [f"fitted{index}" for index in every]
    fresh = [f"{fitted[index]} = check{index}({values[index]})" for index in every]
    changed = [
        f"if {values[index]} is not before.{attributes[index]}: {fresh[index]}" if shares else fresh[index]
        for index in every
    ]
    return "\n".join((
        "def normalise(row, before=None):",
        " if type(row) is not row_type: stray(row)",
        *(f" {values[index]} = {fitted[index]} = row.{attributes[index]}" for index in every),
        " try:",
        "  if before is None:",
        *(f"   at = {index}; {fresh[index]}" for index in every),
        "  else:",
        *(f"   at = {index}\n   {changed[index]}" for index in every),
        " except ValueError as error:",
        "  refuse(row, at, error)",
        f" if {' and '.join(f'{fitted[index]} is {values[index]}' for index in every)}: return row",
        f" return make(({', '.join(fitted)},))",
    ))  # fmt: skip
