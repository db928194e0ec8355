"""Declarations of projections that would fail later, or overwrite each other, are refused with all faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any, Literal, NewType
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, MetaData, String, Table

from eventjet import App, Recorded, SqlProjection, aggregate, event, projection
from eventjet.errors import DefinitionError
from eventjet.projections.row_type import row_faults

Owner = NewType("Owner", str)


class Kind(Enum):
    CASH = "cash"


class Colour(StrEnum):
    RED = "red"


@event("opened")
class Opened:
    owner: str


@aggregate("account")
class Account:
    owner: str = ""

    def evolve(self, event: Opened) -> Account:
        return self


@dataclass(frozen=True)
class Row:
    id: str
    owner: str


def a_table(name: str = "rows", *, schema: str | None = None) -> Table:
    metadata = MetaData()
    return Table(name, metadata, Column("id", String, primary_key=True), Column("owner", String), schema=schema)


def faults_of(*declared: Any) -> str:
    with pytest.raises(DefinitionError) as raised:
        App("bank", aggregates=[Account], projections=declared)
    return "\n".join(raised.value.faults)


def fold(row: Row | None, event: Recorded[Opened]) -> Row | None:
    return row


def owner_of(event: Recorded[Opened]) -> list[str]:
    return [event.data.owner]


@pytest.mark.parametrize("other", [a_table(), a_table("ROWS")], ids=["another object", "other capitals"])
def test_two_projections_on_one_table_are_refused(other: Table) -> None:
    by_hand = SqlProjection("third", tables=[other])

    @by_hand.handler
    async def opened(event: Recorded[Opened], connection: Any) -> None:
        pass

    faults = faults_of(projection("first", table=a_table())(fold), projection("second", table=other)(fold), by_hand)
    for pair in ("'first' and 'second'", "'first' and 'third'", "'second' and 'third'"):
        assert f"belongs to the projections {pair}; give each its own" in faults


def test_tables_with_the_same_name_in_two_schemas_are_allowed() -> None:
    folds = [projection(name, table=a_table(schema=name))(fold) for name in ("first", "second")]
    assert len(App("bank", aggregates=[Account], projections=folds).projections) == 2


def test_a_table_name_of_eventjet_is_refused() -> None:
    assert "'eventjet_rebuild' is eventjet's own" in faults_of(
        projection("first", table=a_table("eventjet_rebuild"))(fold)
    )


def types_of(hint: Any, kind: sa.types.TypeEngine[Any]) -> list[str]:
    row = dataclass(frozen=True)(type("Typed", (), {"__annotations__": {"value": hint}, "__module__": __name__}))
    return list(row_faults(row, Table("typed", MetaData(), Column("value", kind))))


@pytest.mark.parametrize(
    ("hint", "kind", "takes"),
    [
        (int, sa.String(), "str"),
        ("int | None", sa.Text(), "str"),
        (str | int, sa.String(10), "str"),
        (str, sa.Integer(), "int"),
        (bool, sa.BigInteger(), "int"),
        (float, sa.Integer(), "int"),
        (int, sa.Boolean(), "bool"),
        (float, sa.Numeric(12, 2), "Decimal or int"),
        (Decimal, sa.Double(), "float or int"),
        (datetime, sa.Date(), "date"),
        (date, sa.DateTime(), "datetime"),
        (str, sa.Uuid(), "UUID"),
        (UUID, sa.String(), "str"),
        (str, sa.LargeBinary(), "bytes"),
        (bytearray, sa.LargeBinary(), "bytes"),
        (str, sa.Enum(Kind), "Kind"),
        (Kind, sa.Enum("cash", name="kind"), "str"),
        (Kind, sa.String(), "str"),
        (Literal["a", 1], sa.String(), "str"),
        (set[str], sa.JSON(), "str or int or float or bool or tuple or Sequence or Mapping"),
        (Decimal, sa.JSON(), "str or int or float or bool or tuple or Sequence or Mapping"),
        (list[str], sa.String(), "str"),
    ],
    ids=str,
)
def test_a_field_that_its_column_cannot_store_is_refused(hint: Any, kind: sa.types.TypeEngine[Any], takes: str) -> None:
    (fault,) = types_of(hint, kind)
    assert fault.startswith("Typed.value is ")
    assert f"and column typed.value ({kind!r}) takes {takes}" in fault


@pytest.mark.parametrize(
    ("hint", "kind"),
    [
        (str | None, sa.String()),
        (Owner, sa.String()),
        (Colour, sa.String()),
        (Literal["a", None], sa.String()),
        (int, sa.Double()),
        (int, sa.Numeric(12, 2)),
        (Kind, sa.Enum(Kind)),
        (str, sa.Enum("cash", name="kind")),
        (Sequence[str], sa.JSON()),
        (Mapping[str, Any] | tuple[Any, ...], sa.JSON()),
        (Any, sa.Integer()),
        (object, sa.Integer()),
        ("Unknown", sa.Integer()),
    ],
    ids=str,
)
def test_a_field_that_its_column_can_store_is_accepted(hint: Any, kind: sa.types.TypeEngine[Any]) -> None:
    assert types_of(hint, kind) == []
