"""Types that a database keeps otherwise than SQLAlchemy calls them, enums that grow, and names that it would cut."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Index, MetaData, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded, SqlProjection
from eventjet.errors import DefinitionError, Unreachable
from eventjet.projections.resolve import resolve
from eventjet.projections.sql_projection import ResolvedSql, resolve_sql
from eventjet.sql.database import Database
from eventjet.sql.locations import check_tables, create_tables
from tests.integration import by_hand
from tests.integration.projecting import CATALOG, Added
from tests.integration.projecting import balances as balances_fold
from tests.tables import execute, reading


class Guid(sa.TypeDecorator[uuid.UUID]):
    """The recipe of SQLAlchemy's documentation."""

    impl = sa.CHAR
    cache_ok = True

    def load_dialect_impl(self, dialect: Any) -> Any:
        return dialect.type_descriptor(postgresql.UUID() if dialect.name == "postgresql" else sa.CHAR(32))


class Document(sa.TypeDecorator[Any]):
    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Any) -> Any:
        return dialect.type_descriptor(postgresql.JSONB() if dialect.name == "postgresql" else sa.Text())


class Nested(sa.TypeDecorator[Any]):
    """A decorator around one that decides by the database."""

    impl = Document
    cache_ok = True


class Span(sa.TypeDecorator[timedelta]):
    impl = sa.Interval
    cache_ok = True


def by_hand_with(*columns: Column[Any], name: str = "kept", **more: Any) -> ResolvedSql:
    """A `SqlProjection` over one table with these columns."""
    table = Table(name, MetaData(), Column("id", sa.String(40), primary_key=True), *columns, **more)
    declared = SqlProjection("kept", tables=[table])

    @declared.handler
    async def note(event: Recorded[Added], connection: AsyncConnection) -> None: ...

    return by_hand.resolved(declared)


KINDS: list[Any] = [
    Guid(), Document(), Nested(), Span(), sa.Interval(), Guid().with_variant(sa.Text(), "sqlite"),
    sa.Text().with_variant(Document(), "postgresql"), sa.ARRAY(sa.JSON()).with_variant(sa.Text(), "sqlite"),
    sa.Enum("a", "b", name="letters"),
]  # fmt: skip


def test_what_eventjet_made_of_a_type_is_never_called_otherwise_than_declared(database: str) -> None:
    resolved = by_hand_with(*(Column(f"c{number}", kind) for number, kind in enumerate(KINDS)))
    engine = Database(database).sync_engine()
    assert create_tables(engine, [resolved])
    assert create_tables(engine, [resolved]) == []
    with reading(database) as connection:
        check_tables(connection, [resolved])


def test_a_decorator_whose_own_type_has_become_another_is_refused(database: str) -> None:
    engine = Database(database).sync_engine()
    create_tables(engine, [by_hand_with(Column("c", sa.BigInteger))])
    with pytest.raises(Unreachable, match=r"kept\.c is BIGINT, declared is (UUID|CHAR\(32\))"):
        create_tables(engine, [by_hand_with(Column("c", Guid()))])


@pytest.mark.parametrize("to_rebuild", [False, True])
def test_an_enum_that_lacks_a_label_is_refused_with_the_statement_that_adds_it_before_anything_is_made(
    eventjet_database: str, to_rebuild: bool
) -> None:
    engine = Database(eventjet_database).sync_engine()
    create_tables(engine, [by_hand_with(Column("c", sa.Enum("a", "b", name="letters")))])
    grown = by_hand_with(Column("c", sa.Enum("a", "b", "it's", "d", name="letters")))
    with pytest.raises(Unreachable) as caught:
        create_tables(engine, [grown], to_rebuild=to_rebuild)
    statements = "alter type \"letters\" add value 'it''s'; alter type \"letters\" add value 'd'"
    assert f"Run: {statements}." in str(caught.value)
    with pytest.raises(Unreachable, match="add value"), reading(eventjet_database) as connection:
        check_tables(connection, [grown])
    execute(eventjet_database, *statements.split("; "))
    assert create_tables(engine, [grown], to_rebuild=to_rebuild) == []


def test_an_enum_that_others_made_with_fewer_labels_is_refused_when_the_table_would_be_made(
    eventjet_database: str,
) -> None:
    execute(eventjet_database, "create type letters as enum ('a')")
    with pytest.raises(Unreachable, match="add value 'b'"):
        create_tables(
            Database(eventjet_database).sync_engine(), [by_hand_with(Column("c", sa.Enum("a", "b", name="letters")))]
        )


def test_a_schema_that_is_not_there_is_refused_with_the_statement_that_makes_it(database: str) -> None:
    table = balances_fold.table.to_metadata(MetaData(), schema='some "shop"')
    resolved = resolve(type(balances_fold)(balances_fold.name, table, balances_fold.fold), CATALOG)
    engine = Database(database).sync_engine()
    for to_rebuild in (False, True):
        with pytest.raises(Unreachable) as caught:
            create_tables(engine, [resolved], to_rebuild=to_rebuild)
        on_sqlite = database.startswith("sqlite")
        assert ("There are none here: leave it out" if on_sqlite else 'Run: create schema "some ""shop"""') in str(
            caught.value
        )
    if not on_sqlite:
        execute(database, 'create schema "some ""shop"""')
        assert create_tables(engine, [resolved])[-1] == 'some "shop".balances'


LONG, WIDE = "x" * 64, "é" * 32


@pytest.mark.parametrize("name", [LONG, WIDE])
def test_a_name_that_postgres_would_cut_by_its_bytes_is_refused_wherever_it_stands(name: str) -> None:
    size = len(name.encode())
    tables = {
        "the table": lambda: by_hand_with(name=name),
        "the column": lambda: by_hand_with(Column(name, sa.Integer)),
        "the index": lambda: by_hand_with(Column("c", sa.Integer), Index(name, "c")),
        "the constraint": lambda: by_hand_with(Column("c", sa.Integer), sa.UniqueConstraint("c", name=name)),
        "the constraint of": lambda: by_hand_with(Column("c", sa.Integer), sa.CheckConstraint("c > 0", name=name)),
        "the enum": lambda: by_hand_with(Column("c", sa.Enum("a", name=name))),
        "the index of": lambda: by_hand_with(Column("c" * 40, sa.Integer, index=True), name="t" * 40),
    }
    for what, declare in tables.items():
        with pytest.raises(DefinitionError, match=what) as caught:
            declare()
        assert "bytes in its name, and PostgreSQL cuts names after 63" in str(caught.value)
        assert what == "the index of" or f"has {size} bytes" in str(caught.value)
    by_hand_with(Column(name[:31], sa.Integer), name=name[:31])
    table = balances_fold.table.to_metadata(MetaData(), name=name)
    with pytest.raises(DefinitionError, match="cuts names after 63"):
        resolve(type(balances_fold)(balances_fold.name, table, balances_fold.fold), CATALOG)


def test_an_index_that_no_transaction_can_make_is_refused_when_it_is_declared() -> None:
    table = Table("t", MetaData(), Column("id", sa.String(40), primary_key=True), Column("c", sa.Integer))
    Index("ix_c", table.c.c, postgresql_concurrently=True)
    declared = SqlProjection("kept", tables=[table])

    @declared.handler
    async def note(event: Recorded[Added], connection: AsyncConnection) -> None: ...

    with pytest.raises(DefinitionError, match=r"the index 'ix_c' of 't' is declared with postgresql_concurrently"):
        resolve_sql(declared, CATALOG)
