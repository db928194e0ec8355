"""An application can read rows of eventjet on SQLite through its declared table."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

from sqlalchemy import JSON, Column, DateTime, MetaData, Numeric, String, Table, create_engine, select

from eventjet import Recorded, projection
from eventjet.codec.catalog import Catalog
from eventjet.examples.bank.account import Opened
from eventjet.projections.resolve import resolve
from eventjet.projections.row_codec import RowCodec
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.locations import located
from eventjet.sql.sqlite import SQLITE, make_readable

table = Table(
    "kinds",
    MetaData(),
    Column("id", String, primary_key=True),
    Column("amount", Numeric(12, 2)),
    Column("at", DateTime(timezone=True)),
    Column("tags", JSON),
)


@dataclass(frozen=True, slots=True)
class Kind:
    id: str
    amount: Decimal | None
    at: datetime | None
    tags: tuple[str, ...] | None


@projection("kinds", table=table)
def kinds(row: Kind | None, event: Recorded[Opened]) -> Kind | None:
    return row


def test_a_declared_table_on_sqlite_is_read_back_unchanged() -> None:
    resolved = resolve(kinds, Catalog([Opened]))
    make_readable(table)
    make_readable(table)  # a second app of the same table changes nothing more
    codec = RowCodec(resolved.table, resolved.row_type, SQLITE)
    at = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=timezone(timedelta(hours=2)))
    rows = [Kind("a", Decimal("1234567890.5"), at, ("x", "12")), Kind("b", None, None, None)]
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        located(table, DECLARED, SQLITE).create(connection)
        for row in rows:
            connection.exec_driver_sql("insert into kinds values (?, ?, ?, ?)", codec.dump(codec.normalise(row)))
        stored = connection.execute(select(table).order_by(table.c.id)).all()
        assert [tuple(stored_row) for stored_row in stored] == [
            ("a", Decimal("1234567890.50"), at.astimezone(UTC), ["x", "12"]),
            ("b", None, None, None),
        ]
        dear = select(table.c.id).where(table.c.amount == Decimal("1234567890.50"))
        assert connection.execute(dear).scalars().all() == ["a"]
    engine.dispose()
