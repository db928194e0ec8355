"""A table that would change what is declared for it stops workers and `init`; any other one is never complained of."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Connection, Engine, MetaData, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import CompileError, DBAPIError

from eventjet.errors import Unreachable
from eventjet.projections.columns import _SUPPORTED
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.rebuild import rebuild
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import DECLARED, Checkpoint
from eventjet.sql.database import Database, dialect_of
from eventjet.sql.locations import check_tables, create_tables, located
from eventjet.sql.sqlite import make_readable
from eventjet.sql.statements import Changes
from eventjet.sql.table_differences import column_differences, differences
from tests.integration import by_hand
from tests.integration.projecting import BALANCES, MOVEMENTS
from tests.integration.rebuild_log import Book

AT = datetime(2026, 1, 2, 3, 4, 5, 678_901)  # noqa: DTZ001 - a wall time

SAMPLES: list[tuple[sa.types.TypeEngine[Any], list[Any]]] = [
    (sa.String(20), ["12", "1.50", "x" * 20, "", "ü"]),
    (sa.String(10), ["007", "1e5"]),
    (sa.String(), ["12", "y" * 300]),
    (sa.Text(), ["0.10", "z" * 300]),
    (sa.SmallInteger(), [-32_768, 32_767]),
    (sa.Integer(), [-(2**31), 2**31 - 1]),
    (sa.BigInteger(), [-(2**63), 2**63 - 1]),
    (sa.Numeric(12, 2), [Decimal("9999999999.99"), Decimal("-0.01"), Decimal("5.00")]),
    (sa.Numeric(14, 4), [Decimal("9999999999.9999"), Decimal("0.0001")]),
    (sa.Numeric(12, 4), [Decimal("99999999.9999")]),
    (sa.Numeric(), [Decimal("12345678901234567890.123456789"), Decimal("0.1000")]),
    (sa.Double(), [0.1, 1e300, 16_777_217.0]),
    (sa.Boolean(), [True, False]),
    (sa.DateTime(timezone=True), [AT.replace(tzinfo=UTC)]),
    (sa.DateTime(), [AT]),
    (sa.Date(), [date(2026, 1, 2)]),
    (sa.Uuid(), [UUID(int=7), UUID(int=2**127)]),
    (sa.JSON(), ["12", {"b": [1, 2.5], "a": None}, 12]),
    (postgresql.JSONB(), [{"b": 1}]),
    (sa.LargeBinary(), [b"\0\xff", b"12"]),
    (sa.Enum("open", "shut", name="narrow"), ["open", "shut"]),
    (sa.Enum("open", "shut", "12", name="wide"), ["12"]),
]
"""Declared types, and values at the edges of what they take."""
FOREIGN: dict[str, list[str]] = {
    "postgresql": ["varchar", "char(20)", "text", "numeric", "numeric(12, 1)", "real", "double precision",
                   "timestamp(0)", "timestamptz(3)", "timestamptz", "money", "json", "jsonb", "oid", "domained"],
    "sqlite": ["", "JSON", "DATETIME", "NUMERIC", "DECIMAL(12, 2)", "REAL", "DOUBLE PRECISION", "TIMESTAMP", "DATE",
               "STRANGE", "CHAR(5)", "BLOB", "INT"],
}  # fmt: skip
"""Types that somebody's own migration could give a column."""


def every_type() -> Iterator[sa.types.TypeEngine[Any]]:
    """All that a fold may declare, plain and with their options."""
    for kind in sorted(_SUPPORTED, key=lambda one: (one.__module__, one.__name__)):
        if kind is sa.Enum:
            yield sa.Enum("a", "b", name="plain_enum")
            yield sa.Enum("a", "bcd", native_enum=False)
        elif kind in (sa.Uuid, sa.UUID, sa.Boolean, sa.BOOLEAN, sa.JSON, postgresql.JSON, postgresql.JSONB):
            yield kind()
        else:
            yield kind()
            if issubclass(kind, sa.String) and not issubclass(kind, sa.Text):
                yield kind(17)
            elif issubclass(kind, sa.Float):
                yield from (kind(53), kind(25)) if kind is sa.Float else ()
            elif issubclass(kind, sa.Numeric):
                yield from (kind(12, 2), kind(9), kind(38, 38))
            elif issubclass(kind, sa.DateTime):
                yield kind(timezone=True)
    yield sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = Database(database).sync_engine()
    create_tables(engine)
    yield engine
    engine.dispose()


def is_made(connection: Connection, table: Table) -> bool:
    try:
        with connection.begin_nested():
            table.create(connection)
    except (DBAPIError, CompileError):
        return False
    return True


def test_of_every_supported_type_what_eventjet_makes_is_no_difference(engine: Engine) -> None:
    unknown: set[str] = set()
    with engine.begin() as connection:
        for number, kind in enumerate(every_type()):
            values = Column("v", kind), Column("n", kind, nullable=False)
            declared = Table(f"t{number}", MetaData(), Column("id", sa.String(40), primary_key=True), *values)
            table = located(declared, DECLARED, dialect_of(engine))
            if not is_made(connection, table):
                unknown.add(type(kind).__name__)
                continue
            assert differences(connection, [table]) == [], kind
    assert number > 40
    assert unknown == ({"NVARCHAR", "DATETIME", "BLOB", "DOUBLE"} if engine.name == "postgresql" else set())


def test_a_column_that_is_not_complained_of_gives_every_value_back(engine: Engine) -> None:
    """A law over all pairs of a type that is there and one that is declared: no loss is let pass."""
    taken: list[tuple[sa.types.TypeEngine[Any], str, list[Any]]] = []
    with engine.begin() as connection:
        if engine.name == "postgresql":
            connection.exec_driver_sql("create domain domained as numeric(12, 2)")
        for number, (ddl, kind, samples) in enumerate(pairs(connection)):
            table = Table(f"p{number}", MetaData(), Column("id", sa.String(40), primary_key=True), Column("v", kind))
            there = located(table, DECLARED, dialect_of(engine))
            connection.exec_driver_sql(f"create table p{number} (id varchar(40) not null primary key, v {ddl})")
            if not any(one.breaks for one in column_differences(connection, [there])):
                assert_kept(connection, table, there, samples, f"{kind!r} in {ddl}")
                taken.append((kind, ddl, samples))
    assert len(taken) > 40


def pairs(connection: Connection) -> Iterator[tuple[str, sa.types.TypeEngine[Any], list[Any]]]:
    """(what is there as SQL, what is declared, values)."""
    there: list[str] = []
    for kind, _ in SAMPLES:
        stored = located(Table("x", MetaData(), Column("v", kind)), DECLARED, dialect_of(connection)).c.v.type
        if isinstance(stored, sa.Enum) and connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"create type {stored.name} as enum ({', '.join(map(repr, stored.enums))})")
        there.append(stored.compile(dialect=connection.dialect))
    there += FOREIGN[connection.dialect.name]
    for ddl in dict.fromkeys(there):
        for kind, samples in SAMPLES:
            yield ddl, kind, samples


def assert_kept(connection: Connection, table: Table, there: Table, samples: list[Any], told: str) -> None:
    row_type = make_dataclass("Row", ["id", "v"], frozen=True)
    dialect = dialect_of(connection)
    codec = RowCodec(table, row_type, dialect)
    held = held_for(connection, table)
    rows = [codec.normalise(row_type(str(number), one)) for number, one in enumerate([*samples, None])]
    mark = (1, "e-1", 60.0, held.name, held.revision, held.epoch, held.position)
    assert dialect.statements(there, codec).write(connection, mark, Changes(inserts=rows)), told
    found = dialect.statements(there, codec).read(connection, [(row.id,) for row in rows])
    assert {key: (row.v, type(row.v)) for key, row in found.items()} == {
        (row.id,): (row.v, type(row.v)) for row in rows
    }, told


def held_for(connection: Connection, table: Table) -> Checkpoint:
    checkpoint.ensure(connection, table.name, 1)
    held = checkpoint.take(connection, table.name, 1, "w:1", 60.0)
    assert held is not None
    return held


def fresh(column: Column[Any]) -> Column[Any]:
    """The same one, of no table."""
    given = {"nullable": column.nullable, "primary_key": column.primary_key, "server_default": column.server_default}
    return Column(column.name, column.type, autoincrement=False, **given)


def before(*changed: Column[Any]) -> ResolvedProjection:
    """The balances as they were declared once, when these columns were otherwise, or there."""
    columns = {one.name: one for one in BALANCES.table.columns} | {one.name: one for one in changed}
    return replace(BALANCES, table=Table("balances", MetaData(), *map(fresh, columns.values())))


WRITTEN = {
    "postgresql": {"money": "NUMERIC(12, 2)", "kept": "NUMERIC(12, 2)", "double": "DOUBLE PRECISION"},
    "sqlite": {"money": "NUMERIC(12, 2), kept as TEXT", "kept": "TEXT", "double": "DOUBLE"},
}
CHANGES = [
    (Column("amount", sa.Integer, nullable=False), "amount is INTEGER, declared is {money} (values may be rounded"),
    (Column("amount", sa.Double, nullable=False), "amount is {double}, declared is {money} (values may be rounded"),
    (Column("events", sa.Numeric(12, 2), nullable=False), "events is {kept}, declared is INTEGER (values may be"),
    (Column("events", sa.Integer), "events may be null, and is declared NOT NULL (rows may lack"),
    (Column("owner", sa.String(20), nullable=False), "owner may not be null, and is declared otherwise (rows may be"),
    (Column("note", sa.String(20), nullable=False), "note is not declared, and must have a value (no row"),
]
NARROWER = [
    (Column("owner", sa.String(10)), "owner is VARCHAR(10), declared is VARCHAR(20)"),
    (Column("owner", sa.CHAR(20)), "owner is CHAR(20), declared is VARCHAR(20)"),
    (Column("amount", sa.Numeric(12, 1), nullable=False), "amount is NUMERIC(12, 1), declared is NUMERIC(12, 2)"),
    (Column("last", sa.Integer, nullable=False), "last is INTEGER, declared is BIGINT"),
]
HARMLESS = [
    Column("owner", sa.String(30)),
    Column("owner", sa.Text),
    Column("events", sa.BigInteger, nullable=False),
    Column("note", sa.String(20)),
    Column("note", sa.Integer, server_default="7", nullable=False),
]


@contextmanager
def made(engine: Engine, was: ResolvedProjection) -> Generator[Connection]:
    """Tables of another declaration, gone after the block."""
    with engine.connect() as connection, connection.begin() as transaction:
        create_tables(connection, [was])
        yield connection
        transaction.rollback()


def refusals(engine: Engine, was: ResolvedProjection) -> Iterator[str]:
    """What a worker and `init` say of tables that were made for another declaration."""
    with made(engine, was) as connection:
        for look in (check_tables, create_tables):
            with pytest.raises(Unreachable) as refused:
                look(connection, [BALANCES])
            yield str(refused.value)


def test_a_declaration_that_changed_alone_is_refused_by_column(engine: Engine) -> None:
    for was, told in [*CHANGES, *(NARROWER if engine.name == "postgresql" else [])]:
        for said in refusals(engine, before(was)):
            assert f"the column balances.{told.format(**WRITTEN[engine.name])}" in said
            assert "projection 'balances' is declared otherwise than its table is" in said
            assert "Run `eventjet rebuild balances`" in said


def test_one_refusal_names_all_columns_and_is_short(engine: Engine) -> None:
    extra = [Column(f"n{number}", sa.Integer, nullable=False) for number in range(8)]
    for said in refusals(engine, before(*extra)):
        assert said.count("is not declared, and must have a value") == 5
        assert "; and 3 more. Run" in said


def test_columns_that_hold_more_and_columns_of_others_are_let_be(engine: Engine) -> None:
    for was in [*HARMLESS, *([column for column, _ in NARROWER[:1]] if engine.name == "sqlite" else [])]:
        with made(engine, before(was)) as connection:
            assert create_tables(connection, [BALANCES]) == []
            check_tables(connection, [BALANCES])


def test_tables_that_a_migration_of_the_applications_own_made_are_taken(engine: Engine) -> None:
    """From the declared metadata, and not through eventjet."""
    tables = [BALANCES.table, MOVEMENTS.table, *by_hand.metadata.tables.values()]
    with engine.begin() as connection:
        for table in tables:
            make_readable(table)
        for metadata in (BALANCES.table.metadata, by_hand.metadata):
            metadata.create_all(connection)
    every = [
        BALANCES,
        MOVEMENTS,
        by_hand.LEDGER,
        by_hand.bound_with(by_hand.opened, tables=[by_hand.kinds_table], name="kinds"),
    ]
    create_tables(engine, every)
    with engine.connect() as connection:
        check_tables(connection, every)


def test_sql_by_hand_is_held_to_its_declaration_too(engine: Engine) -> None:
    was = Table("totals", MetaData(), Column("name", sa.String(20), primary_key=True), Column("n", sa.Double))
    with engine.begin() as connection:
        was.create(connection)
    with pytest.raises(Unreachable, match=r"column totals.n is DOUBLE.* declared is INTEGER .*totals.n may be null"):
        create_tables(engine, [by_hand.LEDGER])


def test_a_revision_aside_is_compared_where_it_is(engine: Engine) -> None:
    newer = replace(BALANCES, revision=2)
    create_tables(engine, [BALANCES])
    create_tables(engine, [newer])
    aside = "ej_balances_r2.balances" if engine.name == "postgresql" else "balances__r2"
    with engine.begin() as connection:
        connection.exec_driver_sql(f"alter table {aside} add column note text not null default 'x'")
        check_tables(connection, [newer])
        connection.exec_driver_sql(f"alter table {aside} rename column amount to amounts")
    with engine.connect() as connection, pytest.raises(Unreachable, match=r"amount is missing .*amounts is not decl"):
        check_tables(connection, [newer])


async def test_a_worker_does_not_start_and_a_rebuild_mends_it(book: Book) -> None:
    resolved = book.projections["balances"]
    columns = [fresh(one) for one in resolved.table.columns if one.name != "amount"]
    was = Table("balances", MetaData(), *columns, Column("amount", sa.Double, nullable=False))
    create_tables(book.where.sync_engine(), [replace(resolved, table=was)])
    create_tables(book.where.sync_engine(), [one for name, one in book.projections.items() if name != "balances"])
    last = book.fill(200)
    with pytest.raises(Unreachable, match=r"the column balances\.amount is DOUBLE.*declared is NUMERIC"):
        async with book.working("balances"):
            pass
    await rebuild(book.ref, ["balances"], book.settings, engine="local")
    async with book.working("balances"):
        await book.caught_up(last, resolved)
    assert book.rows() == book.folded(last)
