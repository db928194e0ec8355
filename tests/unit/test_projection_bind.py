"""Declarations of projections, and the faults that `resolve` finds in them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from textwrap import dedent
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Boolean, Column, Computed, Float, Integer, MetaData, Numeric, String, Table, Uuid

from eventjet.codec.catalog import Catalog
from eventjet.domain.aggregate import event
from eventjet.domain.recorded import Recorded
from eventjet.errors import DefinitionError, RowRefused
from eventjet.projections.projection import entries, projection
from eventjet.projections.resolve import resolve


@event("opened")
class Opened:
    owner: str


@event("paid")
class Paid:
    source: str
    target: str
    amount: Decimal
    reference: UUID = UUID(int=0)


@event("foreign")
class Foreign:
    pass


CATALOG = Catalog([Opened, Paid])


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: str
    amount: Decimal = Decimal(0)


@dataclass(frozen=True)
class Line:
    source: str
    reference: UUID


@dataclass(frozen=True)
class Stray:
    account_id: str
    extra: int


@dataclass(frozen=True)
class Fixed:
    account_id: str
    amount: Decimal = field(init=False, default=Decimal(0))


def a_table(*columns: Column[Any], name: str = "balances") -> Table:
    table_columns = columns or (Column("account_id", String, primary_key=True), Column("amount", Numeric(12, 2)))
    return Table(name, MetaData(), *table_columns)


def recorded(data: Any, aggregate_id: str = "a-1", position: int = 1) -> Recorded[Any]:
    return Recorded(data, aggregate_id, 1, position, datetime(2026, 1, 1, tzinfo=UTC))


def faults_of(declared: Any) -> str:
    with pytest.raises(DefinitionError) as raised:
        resolve(declared, CATALOG)
    return "\n".join(raised.value.faults)


def by_source(event: Recorded[Paid]) -> str:
    return event.data.source


def both(event: Recorded[Paid]) -> tuple[str, str]:
    return event.data.source, event.data.target


def fold(row: Balance | None, event: Recorded[Opened | Paid]) -> Balance | None:
    return row or Balance(event.aggregate_id)


def test_a_fold_is_resolved_with_its_events_its_row_and_the_aggregate_id_as_key() -> None:
    resolved = resolve(projection("balances", table=a_table(), revision=3)(fold), CATALOG)
    assert resolved.events == (Opened, Paid)
    assert resolved.row_type is Balance
    assert resolved.key_columns == ("account_id",)
    assert resolved.keyed_by_aggregate
    assert resolved.durable == "balances-r3"
    assert resolved.keys_of(recorded(Opened(owner="ada"))) == (("a-1",),)


def test_a_declared_projection_can_still_be_called() -> None:
    declared = projection("balances", table=a_table())(fold)
    assert declared(None, recorded(Opened(owner="ada"))) == Balance("a-1")


def test_the_annotations_behind_a_decorator_of_another_module_are_those_of_its_function() -> None:
    elsewhere: dict[str, Any] = {}
    source = """
        import functools

        def timed(function):
            @functools.wraps(function)
            def measured(*args):
                return function(*args)
            return measured
    """
    exec(dedent(source), elsewhere)

    @projection("balances", table=a_table())
    @elsewhere["timed"]
    def balances(row: Balance | None, event: Recorded[Opened | Paid]) -> Balance | None:
        return row

    resolved = resolve(balances, CATALOG)
    assert (resolved.events, resolved.row_type) == ((Opened, Paid), Balance)


def test_a_key_function_selects_another_row() -> None:
    @projection("balances", table=a_table(), key=by_source)
    def paid(row: Balance | None, event: Recorded[Paid]) -> Balance | None:
        return row

    resolved = resolve(paid, CATALOG)
    assert not resolved.keyed_by_aggregate
    assert resolved.keys_of(recorded(Paid(source="x", target="y", amount=Decimal(1)))) == (("x",),)


def test_each_of_several_keys_is_passed_to_the_fold_once() -> None:
    @projection("balances", table=a_table(), keys=both)
    def paid(row: Balance | None, event: Recorded[Paid], key: str) -> Balance | None:
        return replace(row or Balance(key), amount=event.data.amount)

    resolved = resolve(paid, CATALOG)
    event = recorded(Paid(source="x", target="y", amount=Decimal(1)))
    assert resolved.keys_of(event) == (("x",), ("y",))
    assert resolved.apply(None, event, ("y",)) == Balance("y", Decimal(1))
    assert resolved.keys_of(recorded(Paid(source="x", target="x", amount=Decimal(1)))) == (("x",),)


def test_a_key_of_several_columns_is_a_tuple() -> None:
    def line(event: Recorded[Paid]) -> tuple[str, UUID]:
        return event.data.source, event.data.reference

    table = a_table(Column("source", String, primary_key=True), Column("reference", Uuid, primary_key=True))

    @projection("lines", table=table, key=line)
    def lines(row: Line | None, event: Recorded[Paid]) -> Line | None:
        return row

    event = recorded(Paid(source="x", target="y", amount=Decimal(1)))
    assert resolve(lines, CATALOG).keys_of(event) == (("x", UUID(int=0)),)


def test_all_faults_of_a_projection_are_reported_at_once() -> None:
    @projection("Bad-Name", table=a_table(Column("account_id", String, primary_key=True), Column("x", Float(24))))
    def bad(row: Stray | None, event: Recorded[Foreign]) -> Stray | None:
        return row

    faults = faults_of(bad)
    assert "projection 'Bad-Name': its name is not [a-z]" in faults
    assert "it takes Foreign, which no aggregate of the app folds" in faults
    assert "the table has no column 'extra'" in faults
    assert "the row has no field 'x'" in faults
    assert "column balances.x is a Float of at most 24 bits" in faults


def test_a_fold_that_does_not_return_a_dataclass_is_refused() -> None:
    def returns_text(row: str | None, event: Recorded[Opened]) -> str | None:
        return row

    assert "annotated to return one dataclass" in faults_of(projection("b", table=a_table())(returns_text))


def test_a_fold_without_annotations_is_refused_with_its_line() -> None:
    def bare(row, event):  # type: ignore[no-untyped-def]
        return row

    faults = faults_of(projection("b", table=a_table())(bare))
    assert "`event` has no annotation" in faults
    assert "`return`" not in faults, "nobody writes a parameter of that name"
    line = bare.__code__.co_firstlineno
    assert "its return annotation is missing; say what it returns" in faults
    assert f"(test_projection_bind.py, line {line})" in faults


def test_the_primary_key_must_be_the_key() -> None:
    numbered = a_table(Column("account_id", Integer, primary_key=True), Column("amount", Numeric(12, 2)))
    assert "the primary key of 'balances' is (int), and the projection's key is (str)" in faults_of(
        projection("b", table=numbered)(fold)
    )
    keyless = a_table(Column("account_id", String), Column("amount", Numeric(12, 2)))
    assert "is missing" in faults_of(projection("b", table=keyless)(fold))
    money = a_table(Column("account_id", String), Column("amount", Numeric, primary_key=True))
    assert "a Numeric without a precision, in which 1.0 and 1.00 may be one key or two" in faults_of(
        projection("b", table=money)(fold)
    )
    flag = a_table(Column("account_id", String), Column("amount", Boolean, primary_key=True))
    assert "not text, integer, UUID, date, datetime, Decimal or enum" in faults_of(projection("b", table=flag)(fold))
    loose = a_table(
        Column("account_id", String(collation="NOCASE"), primary_key=True), Column("amount", Numeric(12, 2))
    )
    assert "may take two keys for one" in faults_of(projection("b", table=loose)(fold))


def test_a_key_must_be_given_for_every_event() -> None:
    @projection("b", table=a_table(), key=by_source)
    def wider(row: Balance | None, event: Recorded[Opened | Paid]) -> Balance | None:
        return row

    assert "by_source gives no key for 'Opened'" in faults_of(wider)


def test_a_computed_column_is_refused() -> None:
    table = a_table(Column("account_id", String, primary_key=True), Column("amount", Numeric(12, 2), Computed("1")))
    assert "made by the database" in faults_of(projection("b", table=table)(fold))


def test_entries_must_be_keyed_by_position() -> None:
    @entries("payments", table=a_table())
    def payments(event: Recorded[Paid]) -> Balance | None:
        return None

    assert "must be the position, a BigInteger" in faults_of(payments)


def test_a_row_with_a_field_outside_of_its_constructor_is_refused() -> None:
    @projection("b", table=a_table())
    def bad(row: Fixed | None, event: Recorded[Opened]) -> Fixed | None:
        return row

    assert "cannot be made with 'amount'" in faults_of(bad)


@pytest.mark.parametrize(
    ("key", "reason"),
    [("a\0b", "NUL"), ("x" * 3_000, "2600 bytes"), (None, "None"), (3, "not int"), (("x", "y"), "2 parts")],
)
def test_a_key_that_a_database_cannot_store_is_refused(key: Any, reason: str) -> None:
    def odd(event: Recorded[Paid]) -> str:
        return key  # type: ignore[no-any-return]

    @projection("b", table=a_table(), key=odd)
    def paid(row: Balance | None, event: Recorded[Paid]) -> Balance | None:
        return row

    with pytest.raises((RowRefused, ValueError), match=reason):
        resolve(paid, CATALOG).keys_of(recorded(Paid(source="x", target="y", amount=Decimal(1))))
