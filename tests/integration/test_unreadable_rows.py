"""Rows with values that Python cannot represent or no fold can have written are reported on both databases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Connection, MetaData, Table, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded, SqlProjection
from eventjet.dev.nats import NatsServer
from eventjet.errors import RowUnreadable
from eventjet.projections.projection import projection
from eventjet.projections.resolve import resolve
from eventjet.projections.row_codec import RowCodec
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.locations import located
from eventjet.sql.statements import Changes
from tests.integration import by_hand
from tests.integration.by_hand import QUICK
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import CATALOG, Added


class Kind(Enum):
    OLD = "old"
    NEW = "new"


@dataclass(frozen=True, slots=True)
class Thing:
    id: str
    name: str
    count: int
    price: Decimal
    exact: Decimal
    ratio: float
    ok: bool
    at: datetime
    wall: datetime
    day: date
    ref: UUID
    doc: Any
    blob: bytes
    kind: Kind


things_table = Table(
    "things",
    MetaData(),
    Column("id", sa.String(40), primary_key=True),
    Column("name", sa.String(40), nullable=False),
    Column("count", sa.Integer, nullable=False),
    Column("price", sa.Numeric(12, 2), nullable=False),
    Column("exact", sa.Numeric, nullable=False),
    Column("ratio", sa.Double, nullable=False),
    Column("ok", sa.Boolean, nullable=False),
    Column("at", sa.DateTime(timezone=True), nullable=False),
    Column("wall", sa.DateTime, nullable=False),
    Column("day", sa.Date, nullable=False),
    Column("ref", sa.Uuid, nullable=False),
    Column("doc", sa.JSON, nullable=False),
    Column("blob", sa.LargeBinary, nullable=False),
    Column("kind", sa.Enum(Kind, name="kind_of_thing"), nullable=False),
)


def thing(name: str) -> Thing:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    return Thing(
        name, "n", 1, Decimal("1.00"), Decimal("1.5"), 0.5, True, at, at.replace(tzinfo=None), at.date(), UUID(int=1),
        {"a": 1}, b"x", Kind.OLD,
    )  # fmt: skip


@projection("things", table=things_table)
def things(row: Thing | None, event: Recorded[Added]) -> Thing:
    return replace(row, count=row.count + 1) if row else thing(event.aggregate_id)


THINGS = resolve(things, CATALOG)

POSTGRES = [
    ("at", "'infinity'"), ("at", "'-infinity'"), ("at", "'0044-03-15 BC'"), ("at", "'12000-01-01'"),
    ("wall", "'infinity'"), ("wall", "'12000-01-01'"), ("day", "'infinity'"), ("day", "'0044-03-15 BC'"),
    ("price", "'NaN'"), ("exact", "'NaN'"), ("exact", "'Infinity'"), ("ratio", "'NaN'"),
    ("doc", "'\"\\u0000\"'"), ("doc", f"'{'9' * 5000}'"), ("kind", "'NEWER'"),
]  # fmt: skip
SQLITE = [
    ("name", "cast(x'ff' as text)"), ("name", "x'00'"), ("count", "'many'"), ("count", "1 << 40"), ("price", "'dear'"),
    ("price", "'NaN'"), ("price", "x'31'"), ("ratio", "'half'"), ("ratio", "'nan'"), ("ok", "2"), ("ok", "'true'"),
    ("at", "'yesterday'"), ("at", "5"), ("at", "'2030-01-01 00:00:00'"), ("at", "'9999-12-31 23:59:59-12:00'"),
    ("wall", "'12000-01-01 00:00:00'"), ("day", "'soon'"), ("day", "20300101"), ("ref", "'zz'"), ("ref", "x'01'"),
    ("doc", "'{'"), ("doc", "'NaN'"), ("blob", "'text'"), ("kind", "'NEWER'"), ("kind", "3"),
]  # fmt: skip


@pytest.fixture
def things_app(nats: NatsServer, database: str) -> Ledger:
    """Return an app with `things`, whose enum has an additional label in the database."""
    app = Ledger(Settings(servers=(nats.url,), database=database), projections={"things": THINGS})
    app.create()
    app.init()
    if database.startswith("postgresql"):
        app.execute("alter type kind_of_thing add value 'NEWER'")
    return app


def change_row(things_app: Ledger, column: str, value: str, key: str = "a") -> None:
    with things_app.where.sync_engine().begin() as connection:
        connection.exec_driver_sql(f"update things set {column} = {value} where id = '{key}'")


def test_an_unreadable_value_is_reported_with_its_row_and_column(things_app: Ledger) -> None:
    dialect = things_app.where.dialect
    codec = RowCodec(THINGS.table, THINGS.row_type, dialect)
    statements = dialect.statements(located(THINGS.table, DECLARED, dialect), codec)
    advance = (0, "", 1.0, "things", 1, 0, 0)
    wrong = POSTGRES if dialect.name == "postgresql" else SQLITE

    def read(connection: Connection, *keys: str) -> Any:
        return statements.read(connection, [(key,) for key in keys])

    with things_app.where.sync_engine().begin() as connection:
        assert statements.write(connection, advance, Changes(upserts=[thing("a"), thing("b")]))
    with things_app.where.sync_engine().connect() as connection:
        assert read(connection, "a", "b") == {("a",): thing("a"), ("b",): thing("b")}
        connection.rollback()
        for column, value in wrong:
            connection.exec_driver_sql(f"update things set {column} = {value.replace('%', '%%')} where id = 'a'")
            with pytest.raises(RowUnreadable) as caught:
                read(connection, "a", "b")
            error = caught.value
            assert (error.table, error.key, error.column, error.has_key) == ("things", ("a",), column, True), value
            assert f"things.{column} holds" in str(error)
            assert "Run `eventjet rebuild`" in str(error)
            assert read(connection, "b") == {("b",): thing("b")}
            connection.rollback()


async def test_an_unreadable_row_stops_its_worker_is_a_difference_and_is_replaced_by_a_rebuild(
    things_app: Ledger,
) -> None:
    last = things_app.append([(name, Added(amount=Decimal(1))) for name in ("a", "b", "c")])
    async with things_app.working(options=QUICK):
        await things_app.caught_up(last, THINGS)
    wrong = ("at", "'infinity'") if things_app.where.dialect.name == "postgresql" else ("at", "'yesterday'")
    change_row(things_app, *wrong)
    report = await verify(things_app, "things", things_app.settings, engine="local")
    assert (report.rows, report.differences, [example.key for example in report.examples]) == (3, 1, [("a",)])
    assert report.examples[0].columns == ("at",)
    assert str(report.examples[0].live["at"]) == wrong[1].strip("'")
    last = things_app.append([("a", Added(amount=Decimal(1))), ("b", Added(amount=Decimal(1)))])
    async with things_app.working(options=QUICK):
        stopped = await things_app.failed()
    assert "The row 'a' of the table 'things' cannot be read: things.at holds" in str(stopped.reason)
    await rebuild(things_app, ["things"], things_app.settings, engine="local")
    assert (await verify(things_app, "things", things_app.settings, engine="local")).differences == 0
    async with things_app.working(options=QUICK):
        await things_app.caught_up(things_app.append([("a", Added(amount=Decimal(1)))]), THINGS)


spans_table = Table(
    "spans",
    MetaData(),
    Column("id", sa.String(40), primary_key=True),
    Column("span", sa.Interval().with_variant(sa.Text(), "sqlite")),
    Column("sum", sa.Numeric().with_variant(sa.Text(), "sqlite")),
    Column("ratio", sa.Double),
    Column("at", sa.DateTime(timezone=True).with_variant(sa.Text(), "sqlite")),
    Column("name", sa.Text(collation=None)),
    Column("docs", postgresql.ARRAY(sa.JSON()).with_variant(sa.Text(), "sqlite")),
    Column("doc", postgresql.JSONB().with_variant(sa.Text(), "sqlite")),
)


async def handler(event: Recorded[Added], connection: AsyncConnection) -> None:
    if connection.dialect.name == "postgresql":
        await connection.execute(
            text(
                "insert into spans values (:id, '30 days', 1.0, 0.0, '2030-01-01', 'a', "
                "array['{\"a\": 1}'::json], '{\"a\": 1.0}')"
            ),
            {"id": event.aggregate_id},
        )
    else:
        await connection.execute(
            text("insert into spans values (:id, '30', '1.0', 0.5, '2030-01-01', 'a', '[]', '{}')"),
            {"id": event.aggregate_id},
        )


EQUAL_TO_POSTGRES = [
    ("span", "interval '1 month'"), ("sum", "1.00"), ("ratio", "'-0.0'"), ("doc", "'{\"a\": 1.00}'"),
    ("docs", "array['{\"a\":1}'::json]"), ("at", "'infinity'"), ("span", "'10000000 years'"),
]  # fmt: skip
EQUAL_TO_SQLITE = [("name", "'A'"), ("span", "cast('30' as blob)"), ("ratio", "'half'"), ("at", "cast(x'ff' as text)")]


async def test_a_verification_of_sql_projections_distinguishes_values_that_are_equal_in_sql(
    nats: NatsServer, database: str
) -> None:
    is_postgres = database.startswith("postgresql")
    declared = SqlProjection("spans", tables=[spans_table])
    declared.handler(handler)
    app = Ledger(Settings(servers=(nats.url,), database=database), projections={"spans": by_hand.resolved(declared)})  # type: ignore[dict-item]
    app.create()
    app.init()
    if not is_postgres:
        columns = "span text, sum text, ratio double, at text, name text collate nocase, docs text, doc text"
        app.execute("drop table spans", f"create table spans (id varchar(40) not null primary key, {columns})")
    last = app.append([(name, Added(amount=Decimal(1))) for name in ("a", "b")])
    async with app.working(options=QUICK):
        await app.caught_up(last, app.projections["spans"])
    assert (await verify(app, "spans", app.settings, engine="local")).differences == 0
    for column, value in EQUAL_TO_POSTGRES if is_postgres else EQUAL_TO_SQLITE:
        with app.where.sync_engine().begin() as connection:
            connection.exec_driver_sql(f"update spans set {column} = {value} where id = 'a'")
        report = await verify(app, "spans", app.settings, engine="local")
        assert report.differences == 1, (column, value)
        assert (report.examples[0].key, report.examples[0].columns) == (("spans", "a"), (column,))
        with app.where.sync_engine().begin() as connection:
            connection.exec_driver_sql(f"update spans set {column} = (select {column} from spans where id = 'b')")
