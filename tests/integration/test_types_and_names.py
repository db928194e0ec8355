"""Types with another name in the database than in SQLAlchemy, enums that grow, and names that it would cut."""

from __future__ import annotations

import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Index, MetaData, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded, SqlProjection
from eventjet.errors import DefinitionError, Unreachable
from eventjet.projections.resolve import resolve
from eventjet.projections.sql_projection import ResolvedSql, resolve_sql
from eventjet.rebuild.shadow import Shadow
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


class Letters(sa.TypeDecorator[str]):
    """An enum of the database that only PostgreSQL's dialect is given."""

    impl = sa.String
    cache_ok = True

    def __init__(self, *labels: str) -> None:
        super().__init__(10)
        self.labels = labels

    def load_dialect_impl(self, dialect: Any) -> Any:
        return dialect.type_descriptor(sa.Enum(*self.labels, name="letters"))


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
    sa.Enum("a", "b", name="letters"), Letters("a", "b"),
    sa.ARRAY(sa.Enum("a", "b", name="letters")).with_variant(sa.Text(), "sqlite"),
    sa.Enum("a", "it's", "%", name="checked", native_enum=False, create_constraint=True),
]  # fmt: skip


def test_a_created_column_of_a_custom_type_is_accepted(database: str) -> None:
    resolved = by_hand_with(*(Column(f"c{number}", kind) for number, kind in enumerate(KINDS)))
    engine = Database(database).sync_engine()
    assert create_tables(engine, [resolved])
    assert create_tables(engine, [resolved]) == []
    with reading(database) as connection:
        check_tables(connection, [resolved])


def test_a_type_decorator_with_another_implementation_is_refused(database: str) -> None:
    engine = Database(database).sync_engine()
    create_tables(engine, [by_hand_with(Column("c", sa.BigInteger))])
    with pytest.raises(Unreachable, match=r"kept\.c is BIGINT, declared is (UUID|CHAR\(32\))"):
        create_tables(engine, [by_hand_with(Column("c", Guid()))])


GROWING: dict[str, Any] = {
    "plain": lambda *labels: sa.Enum(*labels, name="letters"),
    "in an array": lambda *labels: sa.ARRAY(sa.Enum(*labels, name="letters")),
    "of a decorator": Letters,
    "of a decorator in an array": lambda *labels: sa.ARRAY(Letters(*labels)),
    "of a variant": lambda *labels: sa.Text().with_variant(sa.Enum(*labels, name="letters"), "postgresql"),
}


@pytest.mark.parametrize("grows", GROWING.values(), ids=GROWING)
@pytest.mark.parametrize("to_rebuild", [False, True])
def test_an_enum_that_lacks_a_label_is_refused_with_the_statement_that_adds_it(
    eventjet_database: str, to_rebuild: bool, grows: Any
) -> None:
    engine = Database(eventjet_database).sync_engine()
    create_tables(engine, [by_hand_with(Column("c", grows("a", "b")))])
    grown = by_hand_with(Column("c", grows("a", "b", "it's", "d")))
    with pytest.raises(Unreachable) as caught:
        create_tables(engine, [grown], to_rebuild=to_rebuild)
    statements = "alter type \"letters\" add value 'it''s'; alter type \"letters\" add value 'd'"
    assert f"Run: {statements}." in str(caught.value)
    with pytest.raises(Unreachable, match="add value"), reading(eventjet_database) as connection:
        check_tables(connection, [grown])
    execute(eventjet_database, *statements.split("; "))
    assert create_tables(engine, [grown], to_rebuild=to_rebuild) == []


def test_an_existing_enum_with_fewer_labels_is_refused_before_its_table_is_created(
    eventjet_database: str,
) -> None:
    execute(eventjet_database, "create type letters as enum ('a')")
    with pytest.raises(Unreachable, match="add value 'b'"):
        create_tables(
            Database(eventjet_database).sync_engine(), [by_hand_with(Column("c", sa.Enum("a", "b", name="letters")))]
        )


def test_the_check_of_an_enum_that_lacks_a_label_is_refused_until_a_rebuild(database: str) -> None:
    def table_of(*labels: str) -> ResolvedSql:
        kind = sa.Enum(*labels, name="letters", native_enum=False, create_constraint=True, length=9)
        return by_hand_with(Column("c", kind))

    engine = Database(database).sync_engine()
    create_tables(engine, [table_of("a", "it's")])
    assert create_tables(engine, [table_of("a")]) == []
    with pytest.raises(Unreachable, match=r"check letters of kept lacks 'b'.*Run `eventjet rebuild kept`"):
        create_tables(engine, [table_of("a", "it's", "b")])
    assert create_tables(engine, [table_of("a", "it's", "b")], to_rebuild=True) == []


def needing(need: str) -> list[Any]:
    """Return columns and indexes that need something the database does not have."""
    text = sa.Text()
    elements: dict[str, Any] = {
        "type": [Column("c", postgresql.CITEXT())],
        "collation": [Column("c", sa.Text(collation="nosuch"))],
        "operator class": [
            Column("c", text), Index("x", "c", postgresql_using="gin", postgresql_ops={"c": "gin_trgm_ops"})
        ],
        "access method": [Column("c", text), Index("x", "c", postgresql_using="nosuch")],
        "function": [Column("c", text, sa.CheckConstraint("nosuch(c)"))],
        "exclusion": [Column("c", text), postgresql.ExcludeConstraint((sa.column("c"), "="))],
        "name": [Column("c", text), Index("x", "c"), Index("x", "id")],
        "enum without a name": [Column("c", sa.Enum("a"))],
    }  # fmt: skip
    return elements[need]


WHAT_IS_LACKING = {
    "type": 'type "citext" does not exist', "collation": 'collation "nosuch"', "operator class": "gin_trgm_ops",
    "access method": 'access method "nosuch"', "function": r"function nosuch\(text\)",
    "exclusion": "no default operator class", "name": 'relation "x" already exists',
    "enum without a name": "requires a name",
}  # fmt: skip


@pytest.mark.parametrize(("need", "problem"), WHAT_IS_LACKING.items())
def test_a_table_that_the_database_refuses_is_named_with_the_databases_error(
    eventjet_database: str, need: str, problem: str
) -> None:
    database = Database(eventjet_database)
    engine = database.sync_engine()
    refusal = rf"the table kept of projection 'kept' could not be made as it is declared: .*{problem}.* Make there"
    with pytest.raises(Unreachable, match=refusal):
        create_tables(engine, [by_hand_with(*needing(need))])
    shadow = Shadow(database, by_hand_with(*needing(need)), "")
    with shadow.workspace.claimed(), pytest.raises(Unreachable, match=refusal):
        shadow.create(to_swap=False)
    create_tables(engine, [by_hand_with(Column("c", sa.Text))])
    with pytest.raises(Unreachable, match=refusal), engine.begin() as connection:
        shadow.check_swappable(connection)


@pytest.mark.parametrize("kind", [sa.Text(), sa.ARRAY(sa.Text)])
def test_a_table_that_sqlite_refuses_is_named(tmp_path: Path, kind: Any) -> None:
    engine = Database(f"sqlite:///{tmp_path}/read.db").sync_engine()
    with pytest.raises(Unreachable, match="the table kept of projection 'kept' could not be made as it is declared"):
        create_tables(engine, [by_hand_with(Column("c", kind), Index("x", sa.text("nosuch(id)")))])


def test_a_lock_timeout_is_not_reported_as_a_fault_of_the_declaration(eventjet_database: str) -> None:
    where, table = Database(eventjet_database), by_hand_with(Column("c", sa.Text))
    create_tables(where.sync_engine())
    with where.sync_engine().begin() as other, where.sync_engine().begin() as connection:
        other.execute(sa.text("create table kept (id text)"))
        connection.execute(sa.text("set local lock_timeout = '100ms'"))
        with pytest.raises(OperationalError, match="lock timeout"):
            create_tables(connection, [table])
        other.rollback()


def test_a_missing_schema_is_refused_with_the_statement_that_creates_it(database: str) -> None:
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


@pytest.mark.parametrize("grows", GROWING.values(), ids=GROWING)
def test_a_label_with_too_many_bytes_is_refused_in_the_declaration(grows: Any) -> None:
    with pytest.raises(DefinitionError, match=r"kept\.c has the label .* of 64 bytes"):
        by_hand_with(Column("c", grows("a", "é" * 32)))
    by_hand_with(Column("c", grows("a", "é" * 31)))


LONG, WIDE = "x" * 64, "é" * 32


@pytest.mark.parametrize("name", [LONG, WIDE])
def test_a_name_with_too_many_bytes_is_refused_in_every_place(name: str) -> None:
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
    for place, declare in tables.items():
        with pytest.raises(DefinitionError, match=place) as caught:
            declare()
        assert "bytes in its name, and PostgreSQL cuts names after 63" in str(caught.value)
        assert place == "the index of" or f"has {size} bytes" in str(caught.value)
    by_hand_with(Column(name[:31], sa.Integer), name=name[:31])
    table = balances_fold.table.to_metadata(MetaData(), name=name)
    with pytest.raises(DefinitionError, match="cuts names after 63"):
        resolve(type(balances_fold)(balances_fold.name, table, balances_fold.fold), CATALOG)


def test_a_concurrent_index_is_refused_in_the_declaration() -> None:
    table = Table("t", MetaData(), Column("id", sa.String(40), primary_key=True), Column("c", sa.Integer))
    Index("ix_c", table.c.c, postgresql_concurrently=True)
    declared = SqlProjection("kept", tables=[table])

    @declared.handler
    async def note(event: Recorded[Added], connection: AsyncConnection) -> None: ...

    with pytest.raises(DefinitionError, match=r"the index 'ix_c' of 't' is declared with postgresql_concurrently"):
        resolve_sql(declared, CATALOG)
