"""Features and dependents of a table that is moved, swapped or dropped are carried over, or named in a refusal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Computed,
    Connection,
    Engine,
    Enum,
    ForeignKey,
    Identity,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)
from sqlalchemy.exc import DBAPIError

from eventjet.dev.nats import NatsServer
from eventjet.errors import PromotionRefused, RebuildRefused, UsageError
from eventjet.rebuild import rebuild
from eventjet.rebuild.workspace import leftovers, remove_leftovers
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.database import Database, dialect_of
from eventjet.sql.dialect import Feature, TableName, TableRef, verbatim
from eventjet.sql.locations import create_tables, located
from eventjet.sql.revisions import promote, reset, retire
from eventjet.sql.table_moves import dependents, undeclared
from tests.integration.deploys import NEWER
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import BALANCES
from tests.integration.rebuild_log import Book, remains
from tests.integration.revision_log import init, old_deploy

TABLE = Table(
    "plain",
    MetaData(),
    Column("id", String(60), primary_key=True),
    Column("a", Integer),
    Column("b", Integer, nullable=False, server_default="1"),
    UniqueConstraint("a", "b", name="pair"),
    Index("ix_b", "b"),
)
NAME = (None, "plain")

DEPENDENTS = [
    ("create view v as select * from plain", "the view public.v"),
    ("create materialized view v as select count(*) from plain", "the materialized view public.v"),
    ("create rule r as on delete to plain do instead nothing", "the rule r"),
    ("create table o (id int); create rule r as on insert to o do also delete from plain", "the rule r on table o"),
    ("create function f(plain) returns text language sql as 'select $1.id'", "the function f(plain)"),
    ("create function f(plain[]) returns int language sql as 'select 1'", "the function f(plain[])"),
    ("create function f() returns setof plain language sql as 'select * from plain'", "the function f()"),
    (
        "create function f() returns bigint language sql begin atomic select count(*) from plain; end",
        "the function f()",
    ),
    ("create domain d as plain", "the type d"),
    ("create type t as (chosen plain)", "the column chosen of composite type t"),
    ("create table o (chosen plain)", "the column chosen of table o"),
    ("create table o (chosen plain[])", "the column chosen of table o"),
    ("create table o () inherits (plain)", "the table o"),
    ("create table o (id text references plain)", "the foreign key o_id_fkey of o"),
    ("create table o (id int); create policy p on o using (exists (select from plain))", "the policy p on table o"),
    ("create policy p on plain using (true)", "the policy p"),
    ("alter table plain enable row level security", "row-level security"),
    ("alter table plain force row level security", "row-level security"),
    ("create publication p for table plain", "the publication p"),
    ("create statistics s on a, b from plain", "the statistics object s"),
    (
        (
            "create function t() returns trigger language plpgsql as 'begin return new; end'; "
            "create trigger seen before insert on plain for each row execute function t()"
        ),
        "the trigger seen",
    ),
    (
        (
            "create function t() returns trigger language plpgsql as 'begin return new; end'; create table o (id int); "
            "create constraint trigger seen after insert on o from plain for each row execute function t()"
        ),
        "the trigger seen on table o",
    ),
    (
        (
            "create function f(int) returns plain language sql as 'select null::plain'; create cast (int as plain) "
            "with function f(int)"
        ),
        "the cast from integer to plain",
    ),
    (
        (
            "create function f(plain, plain) returns bool language sql as 'select true'; "
            "create operator === (leftarg = plain, rightarg = plain, function = f)"
        ),
        "the operator ===(plain,plain)",
    ),
    (
        "create sequence s owned by plain.a; create table o (id int default nextval('s'))",
        "the default value for column id of table o",
    ),
]
"""(statement of a user, name in the refusal) on PostgreSQL."""

UNDECLARED = [
    ("alter table plain add column note text", "the column note"),
    ("alter table plain add constraint positive check (a > 0)", "the constraint positive"),
    ("alter table plain add constraint positive check (a > 0) not valid", "the constraint positive"),
    ("alter table plain add constraint once unique nulls not distinct (a)", "the constraint once"),
    ("alter table plain add constraint apart exclude using btree (a with =)", "the constraint apart"),
    ("alter table plain add constraint own foreign key (id) references plain", "the foreign key own"),
    ("create index by_hand on plain (lower(id)) include (a) where a > 0", "the index by_hand"),
    ("alter table plain alter column a set not null", "NOT NULL of the column a"),
    ("alter table plain alter column a set default 5", "the default of the column a"),
    ("alter table plain alter column b drop default, alter column b add generated always as identity",
     "the identity of the column b"),
    ("alter table plain add column c int generated always as (a + 1) stored", "how it generates the column c"),
    ('alter table plain alter column id type varchar(60) collate "C"', "the collation of the column id"),
    ("alter table plain set unlogged", "being UNLOGGED"),
    ("create sequence s owned by plain.a", "the sequence s of the column a"),
    ("alter table plain rename constraint pair to two; comment on constraint two on plain is 'why'",
     "the comment of the constraint two"),
    ("comment on constraint plain_b_not_null on plain is 'why'", "the comment of the constraint plain_b_not_null"),
    ("alter index plain_pkey rename to own; comment on index own is 'why'", "the comment of the index own"),
    ("alter index plain_pkey rename to own; alter index own set (fillfactor = 50)",
     "the option fillfactor=50 of the index own"),
    ("alter index plain_pkey rename to own; alter table plain cluster on own", "CLUSTER ON the index own"),
    ("alter index plain_pkey rename to own; alter table plain replica identity using index own",
     "the replica identity by the index own"),
    (("grant select on plain to pg_monitor with grant option; set local role pg_monitor; "
      "grant select on plain to public; reset role"),
     "the right SELECT of public that pg_monitor has passed on"),
]  # fmt: skip

SQLITE_UNDECLARED = [
    ("id varchar(60) not null primary key, a integer, b integer default '1' not null, note text", "the column note"),
    (
        "id varchar(60) not null primary key, a integer check (a > 0), b integer default '1' not null",
        "the constraint CHECK ( a > 0 )",
    ),
    (
        "id varchar(60) not null primary key, a integer, b integer default '1' not null, check (a > ')')",
        "the constraint CHECK ( a > ')' )",
    ),
    (
        "id varchar(60) not null primary key, a integer unique, b integer default '1' not null",
        "the constraint UNIQUE (a)",
    ),
    ("id varchar(60) not null primary key, a integer default 5, b integer default '1' not null", "the default of the"),
    ("id varchar(60) not null primary key, a integer not null, b integer default '1' not null", "NOT NULL of the"),
    (
        "id varchar(60) not null primary key, a integer, b integer default '1' not null, c as (a + 1)",
        "how it generates the column c",
    ),
    (
        "id varchar(60) collate nocase not null primary key, a integer, b integer default '1' not null",
        "the collation of the column id",
    ),
    (
        "id varchar(60) not null primary key on conflict replace, a integer, b integer default '1' not null",
        "ON CONFLICT REPLACE of id",
    ),
    (
        "id varchar(60) not null primary key references plain, a integer, b integer default '1' not null",
        "the foreign key of the column id",
    ),
]
"""(columns of a table, name in the refusal) on SQLite."""


REDEFINED = [
    ("alter table plain alter b set default 2", "the default of the column b", "b default 2", "b default 1"),
    (
        "alter table plain drop constraint pair, add constraint pair check (a > 0)",
        "the constraint pair",
        "CHECK ((a > 0))",
        "UNIQUE (a, b)",
    ),
    (
        "alter table plain drop constraint pair, add constraint pair unique (a, b) deferrable",
        "the constraint pair",
        "UNIQUE (a, b) DEFERRABLE",
        "UNIQUE (a, b)",
    ),
    (
        "drop index ix_b; create unique index ix_b on plain (b) where a > 0",
        "the index ix_b",
        "CREATE UNIQUE INDEX ix_b ON plain USING btree (b) WHERE a > 0",
        "CREATE INDEX ix_b ON plain USING btree (b)",
    ),
    (
        "drop index ix_b; create index ix_b on plain (b desc) with (fillfactor = 70)",
        "the index ix_b",
        "CREATE INDEX ix_b ON plain USING btree (b DESC)",
        "CREATE INDEX ix_b ON plain USING btree (b)",
    ),
]
"""(statement of a user, name in the refusal, definition, declared definition) on PostgreSQL."""

RULED = Table(
    "ruled",
    MetaData(),
    Column("id", Integer, Identity(), primary_key=True),
    Column("kind", Enum("small", "large", name="kind_of_ruled"), server_default="small"),
    Column("n", BigInteger, server_default="1"),
    Column("word", String(60), CheckConstraint("word in ('a', 'b')", name="known"), server_default="none"),
    Column("other", Integer, ForeignKey("ruled.id")),
    Column("more", BigInteger, Computed("n + 1")),
    Index("ix_word", text("lower(word)"), postgresql_where=text("word <> 'b'")),
)

SQLITE_RULED = [
    "id integer not null primary key",
    "n integer default '1'",
    "u text unique",
    "c text check (c > 'A')",
    "g integer generated always as (n + 1) stored",
    "other integer references plain (id) on delete cascade",
]
"""Columns as they are declared, on SQLite."""

SQLITE_REDEFINED = [
    (1, "n integer default 2", "the default of the column n", "n default 2"),
    (2, "u text unique collate nocase", "the constraint UNIQUE (u)", "unique (u collate nocase)"),
    (3, "c text check (c > 'a')", "the constraint CHECK ( c > 'a' )", ""),
    (3, "c text constraint c_known check (c > 'a')", "the constraint CHECK ( c > 'a' )", ""),
    (4, "g integer generated always as (n + 2) stored", "how it generates the column g", "g stored as ( n + 2 )"),
    (4, "g integer generated always as (n + 1) virtual", "how it generates the column g", "g virtual as ( n + 1 )"),
    (5, "other integer references plain (id) on delete set null", "the foreign key of the column other", "set null"),
    (
        5,
        "other integer references plain (id) on delete cascade deferrable initially deferred",
        "DEFERRABLE INITIALLY DEFERRED of the foreign key of other",
        "",
    ),
]
"""(index in `SQLITE_RULED`, other definition of the column, name in the refusal, definition in the refusal)."""


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    yield from engine_with_table(database)


@pytest.fixture
def postgres(eventjet_database: str) -> Iterator[Engine]:
    yield from engine_with_table(eventjet_database)


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Engine]:
    yield from engine_with_table(f"sqlite:///{tmp_path}/read.db")


def engine_with_table(database: str) -> Iterator[Engine]:
    engine = Database(database).sync_engine()
    with engine.begin() as connection:
        located(TABLE, DECLARED, dialect_of(engine)).create(connection)
    yield engine
    engine.dispose()


def table_ref(connection: Connection, location: str = DECLARED) -> TableRef:
    table = dialect_of(connection).find_table(connection, NAME, location)
    assert table is not None
    return table


def lost_features(connection: Connection) -> list[str]:
    """Return the features that a table made from the declaration would lack."""
    dialect = dialect_of(connection)
    location = DECLARED if connection.dialect.name == "sqlite" else "ej_model"
    with dialect.modelled(connection, [located(TABLE, location, dialect)]) as model:
        return undeclared(
            dialect.features(connection, table_ref(connection)),
            dialect.features(model, table_ref(model, location)),
        )


def test_a_declared_table_has_nothing_that_a_move_would_lose(engine: Engine) -> None:
    with engine.connect() as connection:
        assert dependents(connection, {NAME: table_ref(connection)}, for_good=True) == []
        assert lost_features(connection) == []


def test_every_dependent_of_a_table_is_named(postgres: Engine) -> None:
    with postgres.connect() as connection:
        for statement, named in DEPENDENTS:
            with connection.begin_nested() as savepoint:
                connection.execute(verbatim(statement))
                assert f"{named} on plain" in dependents(connection, {NAME: table_ref(connection)}), statement
                savepoint.rollback()
        assert dependents(connection, {NAME: table_ref(connection)}) == []


def test_every_undeclared_feature_of_a_table_is_named(postgres: Engine) -> None:
    with postgres.connect() as connection:
        for statement, named in UNDECLARED:
            with connection.begin_nested() as savepoint:
                connection.execute(verbatim(statement))
                assert named in lost_features(connection), statement
                savepoint.rollback()
            connection.commit()
        assert lost_features(connection) == []


def test_every_undeclared_feature_of_an_sqlite_table_is_named(sqlite: Engine) -> None:
    rest = ", constraint pair unique (a, b)"
    with sqlite.connect() as connection:
        for columns, named in SQLITE_UNDECLARED:
            connection.exec_driver_sql("drop table plain")
            connection.exec_driver_sql(f'create table "plain" ({columns}{rest} /* check (1) */)')
            assert [feature for feature in lost_features(connection) if feature.startswith(named)], columns
        for option, named in {"strict": "being STRICT", "without rowid": "being WITHOUT ROWID"}.items():
            connection.exec_driver_sql("drop table plain")
            connection.exec_driver_sql(
                f"create table plain (id text not null primary key, a integer, b integer default '1' not null{rest}) "
                f"{option}"
            )
            assert lost_features(connection) == [named]


def test_a_feature_with_another_definition_is_named_with_both_definitions(postgres: Engine) -> None:
    with postgres.connect() as connection:
        for statement, named, definition, declared in REDEFINED:
            with connection.begin_nested() as savepoint:
                connection.execute(verbatim(statement))
                feature = f"{named} (its definition `{definition}` differs from the declared `{declared}`)"
                assert lost_features(connection) == [feature], statement
                savepoint.rollback()
        connection.exec_driver_sql("alter table plain rename constraint pair to other")
        connection.exec_driver_sql("alter table plain alter b set default '1'")
        assert lost_features(connection) == []


def test_definitions_are_equal_in_every_schema_and_for_every_column_type(postgres: Engine) -> None:
    with postgres.connect() as connection:
        dialect = dialect_of(connection)

        def lost_of_ruled(schema: str) -> list[str]:
            table = dialect.find_table(connection, (None, "ruled"), DECLARED if schema == "public" else schema)
            assert table is not None
            with dialect.modelled(connection, [located(RULED, "ej_model", dialect)]) as model:
                declared = dialect.find_table(model, (None, "ruled"), "ej_model")
                assert declared is not None
                return undeclared(dialect.features(connection, table), dialect.features(model, declared))

        path = connection.exec_driver_sql("show search_path").scalar_one()
        located(RULED, DECLARED, dialect).create(connection)
        connection.commit()
        assert lost_of_ruled("public") == []
        for statement in (
            "alter table ruled alter n type integer",
            "alter table ruled alter n set default 1",
            "alter table ruled drop constraint known, add constraint known check (word in ('a', 'b')) not valid",
        ):
            with connection.begin_nested() as savepoint:
                if "type integer" in statement:
                    connection.exec_driver_sql("alter table ruled drop column more")
                connection.exec_driver_sql(statement)
                assert lost_of_ruled("public") == [], statement
                savepoint.rollback()
        with connection.begin_nested() as savepoint:
            connection.exec_driver_sql("drop index ix_word")
            connection.exec_driver_sql("alter table ruled alter word type text")
            connection.exec_driver_sql("create index ix_word on ruled (lower(word)) where word <> 'b'")
            assert lost_of_ruled("public") == []
            connection.exec_driver_sql("alter table ruled alter word set default 'some'")
            (feature,) = lost_of_ruled("public")
            assert feature.startswith(
                "the default of the column word (its definition `word default 'some'::text` differs"
            )
            savepoint.rollback()
        connection.exec_driver_sql("alter sequence ruled_id_seq increment 5")
        (feature,) = lost_of_ruled("public")
        assert feature.startswith("the sequence ruled_id_seq of the column id (its definition")
        connection.exec_driver_sql("alter sequence ruled_id_seq increment 1")
        connection.exec_driver_sql('create schema "Apart"')
        connection.exec_driver_sql('alter table ruled set schema "Apart"')
        assert lost_of_ruled("Apart") == []
        assert connection.exec_driver_sql("show search_path").scalar_one() == path


def test_a_publication_of_all_tables_or_of_the_schema_is_no_dependent(
    postgres: Engine,
) -> None:
    with postgres.connect() as connection:
        for statement in (
            "create publication p for all tables",
            "create publication p for tables in schema public",
            "create table o (id int); create publication p for tables in schema public, table o",
        ):
            with connection.begin_nested() as savepoint:
                connection.execute(verbatim(statement))
                assert dependents(connection, {NAME: table_ref(connection)}) == [], statement
                savepoint.rollback()


def test_a_feature_with_another_definition_is_named_on_sqlite(sqlite: Engine) -> None:
    def features(connection: Connection, columns: Sequence[str], *indexes: str) -> list[Feature]:
        connection.exec_driver_sql("drop table if exists plain")
        connection.exec_driver_sql(f"create table plain ({', '.join(columns)})")
        for index in indexes:
            connection.exec_driver_sql(index)
        return dialect_of(connection).features(connection, TableRef(None, None, "plain"))

    index = "create index ix on plain (u) where u <> 'A'"
    with sqlite.connect() as connection:
        declared = features(connection, SQLITE_RULED, index)
        equal = ["ID integer NOT NULL primary key", "n integer DEFAULT 1", *SQLITE_RULED[2:]]
        assert (
            undeclared(features(connection, equal, 'create index IX on "plain" ("U" ASC) WHERE U<>\'A\''), declared)
            == []
        )
        for number, column, named, definition in SQLITE_REDEFINED:
            columns = [column if at == number else original for at, original in enumerate(SQLITE_RULED)]
            problems = undeclared(features(connection, columns, index), declared)
            assert [problem for problem in problems if problem.startswith(named) and definition in problem], (
                column,
                problems,
            )
        for other in (
            "create unique index ix on plain (u) where u <> 'A'",
            "create index ix on plain (u) where u <> 'a'",
            "create index ix on plain (u desc) where u <> 'A'",
            "create index ix on plain (u)",
        ):
            (problem,) = undeclared(features(connection, SQLITE_RULED, other), declared)
            assert problem.startswith("the index ix (its definition `"), problem
            assert problem.endswith("differs from the declared `index ix ( u ) where u < > 'A'`)"), problem


def test_triggers_block_a_move_and_references_block_a_drop_of_an_sqlite_table(
    sqlite: Engine,
) -> None:
    with sqlite.begin() as connection:
        for statement in (
            'create view v as select * from "PLAIN"',
            "create view over_v as select id from v",
            "create view of_none as select nobodys(id) from main.[Plain]",
            "create table o (id text references plain, n int, twice int generated always as (n * 2))",
            "create trigger seen after insert on o begin delete from plain; end",
            "create trigger changed after update of n on o begin insert into `plain` (id) values (new.id); end",
            "create trigger instead instead of delete on v begin update plain set a = 1; end",
            "create trigger own after insert on plain begin select 1; end",
        ):
            connection.exec_driver_sql(statement)
        tables: dict[TableName, TableRef] = {NAME: table_ref(connection)}
        assert dependents(connection, tables) == ["the trigger own on plain"]
        assert dependents(connection, tables, for_good=True) == [
            "the trigger own on plain",
            "the trigger changed on plain",
            "the trigger instead on plain",
            "the trigger seen on plain",
            "the view of_none on plain",
            "the view over_v on plain",
            "the view v on plain",
            "a foreign key of o on plain",
        ]


def test_an_unrelated_use_of_the_name_does_not_block_a_drop_of_an_sqlite_table(sqlite: Engine) -> None:
    with sqlite.begin() as connection:
        for statement in (
            "create table o (plain int, n int generated always as (plain + 1))",
            "create view other as select 'plain' as kind, \"plain\" from o as plain -- of plain",
            "create view named as with plain as (select 1) select count(*) from plain",
            "create trigger seen after update on o begin select plain from o where plain = 'plain'; end",
            "create trigger instead instead of insert on other begin insert into o (plain) values (new.plain); end",
            "create view broken as select 1 from nowhere",
        ):
            connection.exec_driver_sql(statement)
        assert dependents(connection, {NAME: table_ref(connection)}, for_good=True) == []


CARRIED = """
comment on table plain is 'it''s 100% :plain %TABLE%';
comment on column plain.a is 'a column';
comment on constraint pair on plain is 'a rule';
comment on index ix_b is 'an index';
comment on type plain is 'a row';
alter table plain set (fillfactor = 70, autovacuum_enabled = false, toast.autovacuum_enabled = false);
alter index ix_b set (fillfactor = 60);
alter index plain_pkey set (fillfactor = 50);
alter table plain alter column a set statistics 7, alter column a set (n_distinct = 9);
alter table plain alter column id set storage external;
alter table plain alter column id set compression pglz;
alter table plain replica identity full;
alter table plain cluster on ix_b;
"""
DESCRIBED = """
select jsonb_build_object(
  'comments', (select jsonb_agg(description order by classoid, objsubid, description) from pg_description
                where objoid in (c.oid, c.reltype)
                   or objoid in (select indexrelid from pg_index where indrelid = c.oid)
                   or objoid in (select oid from pg_constraint where conrelid = c.oid)),
  'columns', (select jsonb_agg(jsonb_build_array(attname, attstattarget, attoptions, attstorage::text,
                attcompression::text, attacl) order by attnum) from pg_attribute where attrelid = c.oid and attnum > 0),
  'table', jsonb_build_array(reloptions, relreplident::text, relowner, (select reloptions from pg_class t
             where t.oid = c.reltoastrelid)),
  'rights', (select jsonb_agg(jsonb_build_array(grantee, privilege_type, is_grantable) order by grantee,
               privilege_type) from aclexplode(coalesce(c.relacl, acldefault('r', c.relowner)))),
  'indexes', (select jsonb_agg(jsonb_build_array(relname, reloptions, indisclustered) order by relname)
                from pg_index join pg_class i on i.oid = indexrelid where indrelid = c.oid))
  from pg_class c where c.oid = to_regclass('{}')
"""


def test_comments_options_and_statistics_are_carried_over(postgres: Engine) -> None:
    with postgres.begin() as connection:
        dialect = dialect_of(connection)
        connection.execute(verbatim(CARRIED))
        dialect.ensure_location(connection, "ej_heir")
        located(TABLE, "ej_heir", dialect).create(connection)
        connection.execute(verbatim("alter table ej_heir.plain alter column b set statistics 3"))
        before = connection.exec_driver_sql(DESCRIBED.format("plain").replace("%", "%%")).scalar_one()
        assert lost_features(connection) == []
        dialect.inherit(connection, table_ref(connection), table_ref(connection, "ej_heir"))
        connection.execute(verbatim("alter table ej_heir.plain alter column b set statistics -1"))
        assert connection.exec_driver_sql(DESCRIBED.format("ej_heir.plain")).scalar_one() == before


def test_rights_are_carried_over_exactly_despite_default_privileges(postgres: Engine) -> None:
    roles = [f"{name}_{postgres.url.database}" for name in ("reader", "writer", "owner")]
    reader, writer, owner = roles
    with postgres.connect() as connection:
        dialect = dialect_of(connection)
        for statement in (
            *(f"create role {role}" for role in roles),
            f"alter default privileges grant select, delete on tables to {reader}, public",
            f"grant select on plain to {writer} with grant option",
            f"grant update (a) on plain to {reader}",
            f"alter table plain owner to {owner}",
            f"revoke delete, truncate on plain from {owner}",
        ):
            connection.execute(verbatim(statement))
        dialect.ensure_location(connection, "ej_heir")
        connection.execute(verbatim(f"grant all on schema ej_heir to {owner}"))
        located(TABLE, "ej_heir", dialect).create(connection)
        connection.execute(verbatim(f"grant select (b) on ej_heir.plain to {reader}"))
        before = connection.exec_driver_sql(DESCRIBED.format("plain")).scalar_one()
        dialect.inherit(connection, table_ref(connection), table_ref(connection, "ej_heir"))
        assert connection.exec_driver_sql(DESCRIBED.format("ej_heir.plain")).scalar_one() == before
        connection.rollback()


async def test_a_revoked_right_does_not_come_back_by_a_rebuild(postgres_book: Book) -> None:
    postgres_book.fill(50)
    await rebuild_balances(postgres_book)
    postgres_book.execute(
        "alter default privileges grant select on tables to public", "comment on table balances is 'of money'"
    )
    await rebuild_balances(postgres_book)
    query = "select has_table_privilege('public', 'balances', 'select'), obj_description('balances'::regclass)"
    assert [tuple(row) for row in postgres_book.execute(query.replace("'public', ", "'pg_monitor', "))] == [
        (False, "of money")
    ]


async def test_a_rebuild_creates_every_declared_feature(postgres_book: Book) -> None:
    postgres_book.fill(200)
    app = postgres_book.altered(
        ("from sqlalchemy import String, Table", ("from sqlalchemy import String, Table, text, UniqueConstraint\n"
         "from sqlalchemy.dialects.postgresql import ExcludeConstraint")),
        ('CheckConstraint("events >= 0"),',
         ('CheckConstraint("events >= 0"), ExcludeConstraint((text("account_id"), "="), using="btree", name="apart"),'
         'UniqueConstraint("account_id", "owner", name="once", deferrable=True, postgresql_include=["kind"]),'
         'Index("ix_few", text("lower(owner)"), postgresql_where=text("events > 3")), prefixes=["UNLOGGED"],'
         'comment="declared", postgresql_with={"fillfactor": 70},')),
        ('Column("kind", Enum', 'Column("kind", comment="its kind", type_=Enum'),
    )  # fmt: skip
    query = """
        select relpersistence, reloptions, obj_description(oid), col_description(oid, 4),
               (select array_agg(pg_get_constraintdef(oid) order by conname) from pg_constraint
                 where conrelid = c.oid and contype <> 'n'),
               (select array_agg(indexdef order by indexname) from pg_indexes where tablename = relname)
          from pg_class c where oid = 'balances'::regclass
    """
    loaded_app: Any = app.load()
    create_tables(postgres_book.where.sync_engine(), [loaded_app.projections["balances"]])
    before = [tuple(row) for row in postgres_book.execute(query)]
    await rebuild(app, ["balances"], postgres_book.settings, engine="local")
    assert [tuple(row) for row in postgres_book.execute(query)] == before
    assert before[0][:4] == ("u", ["fillfactor=70"], "declared", "its kind")


async def test_a_rebuild_refuses_an_index_of_another_definition_until_it_is_as_declared(
    book: Book,
) -> None:
    last = book.fill(50)
    await rebuild_balances(book)
    app = book.altered(('CheckConstraint("events >= 0"),', 'CheckConstraint("events >= 0"), Index("ix_few", "owner"),'))
    book.execute("create unique index ix_few on balances (owner, account_id) where events > 3")
    with pytest.raises(RebuildRefused, match=r"(?s)the index ix_few \(its definition .*differs from the declared"):
        await rebuild(app, ["balances"], book.settings, engine="local")
    assert book.rows() == book.folded(last)
    book.execute("drop index ix_few")
    await rebuild(app, ["balances"], book.settings, engine="local")
    assert book.rows() == book.folded(last)


async def test_a_rebuild_refuses_features_that_an_event_trigger_adds_and_names_them(postgres_book: Book) -> None:
    last = postgres_book.fill(50)
    await rebuild_balances(postgres_book)
    postgres_book.execute(
        "create function guarded() returns event_trigger language plpgsql as $$ declare made record; begin "
        "for made in select * from pg_event_trigger_ddl_commands() where object_identity like '%.balances' loop "
        "execute format('alter table %s enable row level security', made.object_identity); end loop; end $$",
        "create event trigger guarded on ddl_command_end when tag in ('CREATE TABLE') execute function guarded()",
    )
    with pytest.raises(RebuildRefused, match="row-level security on balances would come with the table"):
        await rebuild_balances(postgres_book)
    assert postgres_book.rows() == postgres_book.folded(last)
    postgres_book.execute("drop event trigger guarded")
    await rebuild_balances(postgres_book)


@pytest.mark.parametrize("scope", ["all tables", "tables in schema public"])
async def test_a_rebuild_swaps_a_table_published_with_its_schema_or_with_all_tables(
    postgres_book: Book, scope: str, caplog: pytest.LogCaptureFixture
) -> None:
    """FOR ALL TABLES also publishes the tables in the run's own schema: the log says so."""
    last = postgres_book.fill(200)
    await rebuild_balances(postgres_book)
    postgres_book.execute(f"create publication everything for {scope}")
    await rebuild_balances(postgres_book)
    assert ("is published by everything FOR ALL TABLES" in caplog.text) == (scope == "all tables")
    assert postgres_book.rows() == postgres_book.folded(last)
    published = postgres_book.execute("select 1 from pg_publication_tables where tablename = 'balances'")
    assert [tuple(row) for row in published] == [(1,)]


@pytest.mark.parametrize("statement", ["create view seen as select * from balances", "create table seen (b balances)"])
async def test_a_dependent_created_during_a_rebuild_keeps_the_old_table(postgres_book: Book, statement: str) -> None:
    last = postgres_book.fill(300)
    await rebuild_balances(postgres_book)
    identity = "select 'balances'::regclass::oid"
    before = [tuple(row) for row in postgres_book.execute(identity)]
    statements = [statement]

    def progress(_: Any) -> None:
        while statements:
            postgres_book.execute(statements.pop())

    with pytest.raises(RebuildRefused, match="seen on balances would be lost"):
        await rebuild(postgres_book.ref, ["balances"], postgres_book.settings, engine="local", progress=progress)
    assert [tuple(row) for row in postgres_book.execute(identity)] == before
    assert postgres_book.rows() == postgres_book.folded(last)
    assert remains(postgres_book.where) == []


def test_dropping_a_table_does_not_drop_its_dependents(postgres: Engine) -> None:
    with postgres.begin() as connection:
        connection.exec_driver_sql("create table seen (one plain)")
    with pytest.raises(DBAPIError, match="other objects depend on it"), postgres.begin() as connection:
        dialect_of(connection).drop(connection, [table_ref(connection)])


def test_foreign_objects_in_the_schema_of_a_run_are_kept(postgres_book: Book, caplog: pytest.LogCaptureFixture) -> None:
    where, schema = postgres_book.where, "ej_0123456789abcdef"
    create_tables(where.sync_engine())
    postgres_book.execute(
        f"create schema {schema}",
        f"comment on schema {schema} is '[\"balances\"]'",
        f"create table {schema}.balances (id int)",
        f"create view seen as select * from {schema}.balances",
        f"create table {schema}.mine (id int)",
    )
    for reason, remedy in {"view seen": "drop view seen", "table ej_": f"drop table {schema}.mine"}.items():
        caplog.clear()
        assert remove_leftovers(where) == []
        assert reason in caplog.text
        with where.sync_engine().begin() as connection:
            assert leftovers(connection, where) == [schema]
        postgres_book.execute(remedy)
    assert remove_leftovers(where) == [schema]


def test_a_reset_keeps_columns_views_and_rights_of_the_table(ledger: Ledger) -> None:
    ledger.init()
    ledger.execute("alter table balances add column note text", "create view seen as select * from balances")
    if ledger.where.dialect.name == "postgresql":
        ledger.execute("grant select on balances to public")
    assert reset(ledger.where, BALANCES) == ["balances"]
    assert list(ledger.execute("select note from seen")) == []
    if ledger.where.dialect.name == "postgresql":
        query = "select has_table_privilege('pg_monitor', 'balances', 'select')"
        assert [tuple(row) for row in ledger.execute(query)] == [(True,)]
        ledger.execute("create table other (id text references balances)")
        with pytest.raises(UsageError, match="cannot truncate a table referenced in a foreign key constraint"):
            reset(ledger.where, BALANCES)


def test_a_retired_table_with_a_dependent_view_is_not_dropped(ledger: Ledger) -> None:
    ledger.init()
    ledger.execute("create view seen as select * from balances")
    with (
        pytest.raises(UsageError, match=r"balances:1 is not dropped: the view \S*seen on balances would be lost"),
        ledger.where.sync_engine().begin() as connection,
    ):
        retire(connection, "balances", 1, [])
    ledger.execute("drop view seen")
    with ledger.where.sync_engine().begin() as connection:
        retire(connection, "balances", 1, [])


def test_a_promotion_is_refused_when_a_view_does_not_fit_the_other_table(
    eventjet_nats: NatsServer, database: str
) -> None:
    ledger = old_deploy(eventjet_nats.url, database)
    init(ledger, "fold")
    assert promote(ledger.where, NEWER) is not None
    ledger.execute("create view seen as select cents from balances")
    with pytest.raises(PromotionRefused, match="seen"):
        promote(ledger.where, BALANCES)
    assert list(ledger.execute("select * from seen")) == []
    ledger.execute("drop view seen")
    assert promote(ledger.where, BALANCES) is not None


def test_features_that_stay_with_the_replaced_table_are_logged(
    eventjet_nats: NatsServer, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = old_deploy(eventjet_nats.url, database)
    init(ledger, "fold")
    ledger.execute("alter table balances add column note text default 'none'")
    assert promote(ledger.where, NEWER) is not None
    assert "the column note of balances, the default of the column note of balances stay with" in caplog.text


async def rebuild_balances(book: Book) -> None:
    await rebuild(book.ref, ["balances"], book.settings, engine="local")
