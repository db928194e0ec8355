"""The fold that every engine uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import BigInteger, Column, Integer, MetaData, Numeric, String, Table

from eventjet.codec.catalog import Catalog
from eventjet.domain.aggregate import event
from eventjet.domain.recorded import Recorded
from eventjet.errors import HandlerFailed, RowRefused, UndecodableEvent
from eventjet.projections.fold import Fold, Rows
from eventjet.projections.projection import entries, projection
from eventjet.projections.resolve import resolve
from eventjet.projections.row_codec import RowCodec


@event("added")
class Added:
    amount: Decimal


@event("closed")
class Closed:
    pass


@event("moved")
class Moved:
    source: str
    target: str
    amount: Decimal


CATALOG = Catalog([Added, Closed, Moved])


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: str
    amount: Decimal = Decimal(0)
    seen: int = 0


TABLE = Table(
    "balances",
    MetaData(),
    Column("account_id", String(10), primary_key=True),
    Column("amount", Numeric(6, 2), nullable=False),
    Column("seen", Integer, nullable=False),
)


@projection("balances", table=TABLE)
def balances(row: Balance | None, event: Recorded[Added | Closed]) -> Balance | None:
    match event.data:
        case Added(amount=amount):
            row = row or Balance(event.aggregate_id)
            return replace(row, amount=row.amount + amount, seen=row.seen + 1)
        case Closed():
            return None


def both(event: Recorded[Moved]) -> tuple[str, str]:
    return event.data.source, event.data.target


@projection("moves", table=TABLE, keys=both)
def moves(row: Balance | None, event: Recorded[Moved], key: str) -> Balance | None:
    row = row or Balance(key)
    sign = 1 if key == event.data.target else -1
    return replace(row, amount=row.amount + sign * event.data.amount)


def a_fold(declared: Any) -> Fold:
    resolved = resolve(declared, CATALOG)
    return Fold(resolved, RowCodec(resolved.table, resolved.row_type))


def on(position: int, data: Any, aggregate_id: str = "a-1") -> Recorded[Any]:
    return Recorded(data, aggregate_id, position, position, datetime(2026, 1, 1, tzinfo=UTC))


def test_a_fold_returns_changed_rows_and_leaves_the_given_rows_unchanged() -> None:
    before: Rows = {("a-1",): Balance("a-1", Decimal("1.00"), 1), ("a-2",): Balance("a-2", Decimal("5.00"), 1)}
    original = dict(before)
    changed = a_fold(balances)(before, [on(7, Added(amount=Decimal("2.50")))])
    assert changed == {("a-1",): Balance("a-1", Decimal("3.50"), 2)}
    assert before == original


def test_a_row_is_deleted_by_none_and_can_be_made_again() -> None:
    fold = a_fold(balances)
    before: Rows = {("a-1",): Balance("a-1", Decimal("1.00"), 1)}
    assert fold(before, [on(7, Closed())]) == {("a-1",): None}
    assert fold(before, [on(7, Closed()), on(8, Added(amount=Decimal(2)))]) == {
        ("a-1",): Balance("a-1", Decimal("2.00"), 1)
    }
    assert fold({}, [on(7, Added(amount=Decimal(2))), on(8, Closed())]) == {}


def test_every_row_is_normalised_before_the_next_event_sees_it() -> None:
    changed = a_fold(balances)({}, [on(1, Added(amount=Decimal(1)))])
    assert str(changed[("a-1",)].amount) == "1.00"


def test_a_value_that_does_not_fit_names_the_event_and_the_column() -> None:
    with pytest.raises(HandlerFailed, match=r"position 2 of 'a-1'.*balances\.amount cannot hold") as raised:
        a_fold(balances)({}, [on(1, Added(amount=Decimal(1))), on(2, Added(amount=Decimal("0.005")))])
    assert raised.value.position == 2
    assert isinstance(raised.value.__cause__, RowRefused)


def test_an_error_of_a_handler_names_its_event() -> None:
    @projection("balances", table=TABLE)
    def broken(row: Balance | None, event: Recorded[Added]) -> Balance | None:
        raise LookupError("no rate")

    with pytest.raises(HandlerFailed, match="position 9 of 'x': LookupError: no rate"):
        a_fold(broken)({}, [on(9, Added(amount=Decimal(1)), "x")])


def test_a_row_of_another_type_or_key_is_reported_as_a_fault_of_the_handler() -> None:
    @projection("balances", table=TABLE)
    def stranger(row: Balance | None, event: Recorded[Added]) -> Balance | None:
        return Balance("someone else")

    @projection("balances", table=TABLE)
    def tuples(row: Balance | None, event: Recorded[Added]) -> Balance | None:
        return ("a-1", 1, 2)  # type: ignore[return-value]

    event = on(1, Added(amount=Decimal(1)))
    with pytest.raises(HandlerFailed, match="cannot hold 'someone else'"):
        a_fold(stranger)({}, [event])
    with pytest.raises(HandlerFailed, match="it returned tuple, not Balance"):
        a_fold(tuples)({}, [event])


def test_an_error_of_the_source_of_events_is_no_fault_of_the_handler() -> None:
    def source() -> Any:
        yield on(1, Added(amount=Decimal(1)))
        raise UndecodableEvent("added", 2, b"", "not JSON")

    with pytest.raises(UndecodableEvent):
        a_fold(balances)({}, source())


def test_each_of_several_keys_is_folded() -> None:
    fold = a_fold(moves)
    events = [
        on(1, Moved(source="x", target="y", amount=Decimal(3))),
        on(2, Moved(source="y", target="z", amount=Decimal(1))),
    ]
    assert sorted(set(fold.keyed(events)[1])) == [("x",), ("y",), ("z",)]
    assert {key: row.amount for key, row in fold({}, events).items()} == {("x",): -3, ("y",): 2, ("z",): 1}


def test_entries_have_their_position_and_index_as_key() -> None:
    @dataclass(frozen=True)
    class Line:
        position: int
        index: int
        who: str

    table = Table(
        "lines",
        MetaData(),
        Column("position", BigInteger, primary_key=True),
        Column("index", Integer, primary_key=True),
        Column("who", String),
    )

    @entries("lines", table=table)
    def lines(event: Recorded[Moved]) -> list[Line] | None:
        return [Line(event.position, 0, event.data.source), Line(event.position, 1, event.data.target)]

    @entries("lines", table=table)
    def wrong(event: Recorded[Moved]) -> Line | None:
        return Line(event.position, 1, "x")

    event = on(4, Moved(source="x", target="y", amount=Decimal(1)))
    assert list(a_fold(lines)({}, [event])) == [(4, 0), (4, 1)]
    with pytest.raises(HandlerFailed, match=r"key \(4, 1\) for the key \(4, 0\)"):
        a_fold(wrong)({}, [event])


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(-50, 50) | st.none()), max_size=30),
    st.integers(1, 10),
)
def test_batches_of_any_size_give_the_same_rows(history: list[tuple[str, int | None]], size: int) -> None:
    fold = a_fold(balances)
    events = [
        on(position, Closed() if amount is None else Added(amount=Decimal(amount)), aggregate_id)
        for position, (aggregate_id, amount) in enumerate(history, 1)
    ]
    expected = {key: row for key, row in fold({}, events).items() if row is not None}
    rows: Rows = {}
    for start in range(0, len(events), size):
        batch = events[start : start + size]
        rows.update(fold({key: rows[key] for key in fold.keyed(batch)[1] if rows.get(key) is not None}, batch))
    assert {key: row for key, row in rows.items() if row is not None} == expected
