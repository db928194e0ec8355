"""Workers and `init` refuse a table that would change declared values, and accept every other table."""

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
"""Declared types, with values at the edges of their ranges."""
FOREIGN: dict[str, list[str]] = {
    "postgresql": ["varchar", "char(20)", "text", "numeric", "numeric(12, 1)", "real", "double precision",
                   "timestamp(0)", "timestamptz(3)", "timestamptz", "money", "json", "jsonb", "oid", "domained"],
    "sqlite": ["", "JSON", "DATETIME", "NUMERIC", "DECIMAL(12, 2)", "REAL", "DOUBLE PRECISION", "TIMESTAMP", "DATE",
               "STRANGE", "CHAR(5)", "BLOB", "INT"],
}  # fmt: skip
"""Types that somebody's own migration could give a column."""


def every_type() -> Iterator[sa.types.TypeEngine[Any]]:
    """Yield every type that a fold may declare, plain and with its options."""
    for kind in sorted(_SUPPORTED, key=lambda type_: (type_.__module__, type_.__name__)):
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


def can_create(connection: Connection, table: Table) -> bool:
    try:
        with connection.begin_nested():
            table.create(connection)
    except (DBAPIError, CompileError):
        return False
    return True


def test_a_created_column_of_every_supported_type_has_no_difference(engine: Engine) -> None:
    unknown: set[str] = set()
    with engine.begin() as connection:
        for number, kind in enumerate(every_type()):
            values = Column("v", kind), Column("n", kind, nullable=False)
            declared = Table(f"t{number}", MetaData(), Column("id", sa.String(40), primary_key=True), *values)
            table = located(declared, DECLARED, dialect_of(engine))
            if not can_create(connection, table):
                unknown.add(type(kind).__name__)
                continue
            assert differences(connection, [table]) == [], kind
    assert number > 40
    assert unknown == ({"NVARCHAR", "DATETIME", "BLOB", "DOUBLE"} if engine.name == "postgresql" else set())


def test_an_accepted_column_returns_every_value_unchanged(engine: Engine) -> None:
    """Over all pairs of an existing and a declared type, no type that is accepted loses a value."""
    accepted: list[tuple[sa.types.TypeEngine[Any], str, list[Any]]] = []
    with engine.begin() as connection:
        if engine.name == "postgresql":
            connection.exec_driver_sql("create domain domained as numeric(12, 2)")
        for number, (ddl, kind, samples) in enumerate(pairs(connection)):
            table = Table(f"p{number}", MetaData(), Column("id", sa.String(40), primary_key=True), Column("v", kind))
            existing = located(table, DECLARED, dialect_of(engine))
            connection.exec_driver_sql(f"create table p{number} (id varchar(40) not null primary key, v {ddl})")
            if not any(difference.breaks for difference in column_differences(connection, [existing])):
                assert_kept(connection, table, existing, samples, f"{kind!r} in {ddl}")
                accepted.append((kind, ddl, samples))
    assert len(accepted) > 40


def pairs(connection: Connection) -> Iterator[tuple[str, sa.types.TypeEngine[Any], list[Any]]]:
    """Yield (existing type as SQL, declared type, values)."""
    ddls: list[str] = []
    for kind, _ in SAMPLES:
        stored = located(Table("x", MetaData(), Column("v", kind)), DECLARED, dialect_of(connection)).c.v.type
        if isinstance(stored, sa.Enum) and connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"create type {stored.name} as enum ({', '.join(map(repr, stored.enums))})")
        ddls.append(stored.compile(dialect=connection.dialect))
    ddls += FOREIGN[connection.dialect.name]
    for ddl in dict.fromkeys(ddls):
        for kind, samples in SAMPLES:
            yield ddl, kind, samples


def assert_kept(connection: Connection, table: Table, existing: Table, samples: list[Any], message: str) -> None:
    row_type = make_dataclass("Row", ["id", "v"], frozen=True)
    dialect = dialect_of(connection)
    codec = RowCodec(table, row_type, dialect)
    lease = take_checkpoint(connection, table)
    rows = [codec.normalise(row_type(str(number), value)) for number, value in enumerate([*samples, None])]
    mark = (
        1,
        "e-1",
        60.0,
        lease.name,
        lease.revision,
        lease.epoch,
        lease.position,
    )
    assert dialect.statements(existing, codec).write(connection, mark, Changes(inserts=rows)), message
    stored = dialect.statements(existing, codec).read(connection, [(row.id,) for row in rows])
    assert {key: (row.v, type(row.v)) for key, row in stored.items()} == {
        (row.id,): (row.v, type(row.v)) for row in rows
    }, message


def take_checkpoint(connection: Connection, table: Table) -> Checkpoint:
    checkpoint.ensure(connection, table.name, 1)
    lease = checkpoint.take(connection, table.name, 1, "w:1", 60.0)
    assert lease is not None
    return lease


def fresh(column: Column[Any]) -> Column[Any]:
    """Return the same column without a table."""
    options = {"nullable": column.nullable, "primary_key": column.primary_key, "server_default": column.server_default}
    return Column(column.name, column.type, autoincrement=False, **options)


def declared_before(*changed: Column[Any]) -> ResolvedProjection:
    """Return the balances as declared earlier, with these columns changed or added."""
    columns = {column.name: column for column in BALANCES.table.columns} | {column.name: column for column in changed}
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
def made_for(engine: Engine, earlier: ResolvedProjection) -> Generator[Connection]:
    """Create the tables of an earlier declaration, and drop them after the block."""
    with engine.connect() as connection, connection.begin() as transaction:
        create_tables(connection, [earlier])
        yield connection
        transaction.rollback()


def refusals(engine: Engine, earlier: ResolvedProjection) -> Iterator[str]:
    """Yield the refusals of a worker and of `init` for tables of an earlier declaration."""
    with made_for(engine, earlier) as connection:
        for check in (check_tables, create_tables):
            with pytest.raises(Unreachable) as refused:
                check(connection, [BALANCES])
            yield str(refused.value)


def test_a_changed_declaration_is_refused_and_its_column_named(engine: Engine) -> None:
    for column, problem in [*CHANGES, *(NARROWER if engine.name == "postgresql" else [])]:
        for refusal in refusals(engine, declared_before(column)):
            assert f"the column balances.{problem.format(**WRITTEN[engine.name])}" in refusal
            assert "projection 'balances' is declared otherwise than its table is" in refusal
            assert "Run `eventjet rebuild balances`" in refusal


def test_a_refusal_names_all_columns_and_is_short(engine: Engine) -> None:
    extra = [Column(f"n{number}", sa.Integer, nullable=False) for number in range(8)]
    for refusal in refusals(engine, declared_before(*extra)):
        assert refusal.count("is not declared, and must have a value") == 5
        assert "; and 3 more. Run" in refusal


def test_wider_columns_and_undeclared_columns_are_accepted(engine: Engine) -> None:
    for changed in [*HARMLESS, *([column for column, _ in NARROWER[:1]] if engine.name == "sqlite" else [])]:
        with made_for(engine, declared_before(changed)) as connection:
            assert create_tables(connection, [BALANCES]) == []
            check_tables(connection, [BALANCES])


def test_tables_made_by_the_applications_own_migration_are_accepted(engine: Engine) -> None:
    """The tables are made from the declared metadata, and not through eventjet."""
    tables = [BALANCES.table, MOVEMENTS.table, *by_hand.metadata.tables.values()]
    with engine.begin() as connection:
        for table in tables:
            make_readable(table)
        for metadata in (BALANCES.table.metadata, by_hand.metadata):
            metadata.create_all(connection)
    projections = [
        BALANCES,
        MOVEMENTS,
        by_hand.LEDGER,
        by_hand.bound_with(by_hand.opened, tables=[by_hand.kinds_table], name="kinds"),
    ]
    create_tables(engine, projections)
    with engine.connect() as connection:
        check_tables(connection, projections)


def test_tables_of_sql_projections_are_compared_with_their_declaration(engine: Engine) -> None:
    table = Table("totals", MetaData(), Column("name", sa.String(20), primary_key=True), Column("n", sa.Double))
    with engine.begin() as connection:
        table.create(connection)
    with pytest.raises(Unreachable, match=r"column totals.n is DOUBLE.* declared is INTEGER .*totals.n may be null"):
        create_tables(engine, [by_hand.LEDGER])


def test_an_inactive_revision_is_compared_with_its_own_tables(engine: Engine) -> None:
    newer = replace(BALANCES, revision=2)
    create_tables(engine, [BALANCES])
    create_tables(engine, [newer])
    inactive = "ej_balances_r2.balances" if engine.name == "postgresql" else "balances__r2"
    with engine.begin() as connection:
        connection.exec_driver_sql(f"alter table {inactive} add column note text not null default 'x'")
        check_tables(connection, [newer])
        connection.exec_driver_sql(f"alter table {inactive} rename column amount to amounts")
    with engine.connect() as connection, pytest.raises(Unreachable, match=r"amount is missing .*amounts is not decl"):
        check_tables(connection, [newer])


async def test_a_worker_refuses_a_different_table_until_a_rebuild_replaces_it(book: Book) -> None:
    resolved = book.projections["balances"]
    columns = [fresh(column) for column in resolved.table.columns if column.name != "amount"]
    table = Table("balances", MetaData(), *columns, Column("amount", sa.Double, nullable=False))
    create_tables(book.where.sync_engine(), [replace(resolved, table=table)])
    create_tables(
        book.where.sync_engine(), [projection for name, projection in book.projections.items() if name != "balances"]
    )
    last = book.fill(200)
    with pytest.raises(Unreachable, match=r"the column balances\.amount is DOUBLE.*declared is NUMERIC"):
        async with book.working("balances"):
            pass
    await rebuild(book.ref, ["balances"], book.settings, engine="local")
    async with book.working("balances"):
        await book.caught_up(last, resolved)
    assert book.rows() == book.folded(last)
