"""Ids by their beginning among 100,000 on real databases: by an index, in the order of code points, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Engine, Index, MetaData, String, Table, create_engine, event, text
from sqlalchemy.pool import NullPool

from eventjet import App, Recorded, projection
from eventjet.examples.bank.account import Account, AccountEvent
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.operations.aggregates import MATCHES_MAX, IdMatches, ids_beginning
from eventjet.sql.locations import create_tables

ROWS = 100_000
FEW = ("A-1", "a", "a-1", "a%1", "a_1", "aB", "aa", "ab", "Ä", "ä-1", "\ue000x", "😀", "\U0010ffff")
MANY = "many-"


@dataclass(frozen=True, slots=True)
class Named:
    account_id: str


def bank_with(*indexes: Index) -> App:
    """The bank with one read model whose key is the account's id."""
    table = Table("names", MetaData(), Column("account_id", String(200), primary_key=True), *indexes)

    @projection("names", table=table)
    def names(row: Named | None, event: Recorded[AccountEvent]) -> Named | None:
        return Named(event.aggregate_id)

    return App("bank", aggregates=[Account], projections=[names], upcasters=[withdrawn_has_a_reason])


@contextmanager
def filled(url: str, app: App) -> Iterator[Engine]:
    """A database in which the read model has come some way."""
    engine = create_engine(url, poolclass=NullPool)
    try:
        with engine.begin() as connection:
            create_tables(connection, app.projections.values())
            table = app.projections["names"].tables[0]
            rows = [{"account_id": one} for one in (*FEW, *(f"{MANY}{number:06}" for number in range(ROWS)))]
            for start in range(0, len(rows), 5_000):
                connection.execute(table.insert(), rows[start : start + 5_000])
            connection.execute(text("update eventjet_projection set position = 1, log = 'x', state = 'active'"))
        yield engine
    finally:
        engine.dispose()


def explained(connection: Connection, look: Callable[[], IdMatches]) -> tuple[IdMatches, list[str]]:
    """What a look finds, and the plan of its last statement."""
    asked: list[tuple[str, Any]] = []

    def heard(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        asked.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", heard)
    found = look()
    event.remove(connection, "before_cursor_execute", heard)
    statement, parameters = asked[-1]
    kind = "explain query plan" if connection.dialect.name == "sqlite" else "explain"
    plan = connection.exec_driver_sql(f"{kind} {statement}", parameters)
    return found, [" ".join(map(str, row)) for row in plan]


def check(connection: Connection, app: App) -> None:
    """Every prefix finds what begins so, in the order of code points, page by page, and without a scan."""
    for prefix in ("a", "a-", "a%", "A", "ä", "", "\U0010ffff", "many-0999", "zz"):
        seen, after = list[str](), ""
        while True:
            found, plan = explained(connection, partial(ids_beginning, app, connection, "account", prefix, after))
            assert found.model == "names"
            assert not any("Seq Scan" in line or line.split()[-2:-1] == ["SCAN"] for line in plan), plan
            assert any("Index" in line or "SEARCH" in line for line in plan), plan
            assert not any("Sort" in line or "TEMP B-TREE" in line for line in plan), plan
            seen += found.ids
            after = found.more_after
            if not after or len(seen) > 3 * MATCHES_MAX:
                break
        expected = sorted(
            one for one in (*FEW, *(f"{MANY}{number:06}" for number in range(ROWS))) if one.startswith(prefix)
        )
        assert seen == expected[: len(seen)]
        assert len(seen) == len(expected) or len(seen) > 3 * MATCHES_MAX


@pytest.mark.slow
def test_sqlite_finds_by_the_primary_key(tmp_path: Path) -> None:
    app = bank_with()
    with filled(f"sqlite:///{tmp_path}/read.db", app) as engine, engine.connect() as connection:
        check(connection, app)


@pytest.mark.slow
def test_postgresql_finds_by_the_primary_key_where_it_is_in_the_order_of_code_points(eventjet_database: str) -> None:
    app = bank_with()
    with filled(eventjet_database, app) as engine, engine.connect() as connection:
        check(connection, app)


@pytest.mark.slow
def test_postgresql_with_another_collation_finds_by_an_index_that_is_declared_or_says_which(
    eventjet_database: str,
) -> None:
    plain = bank_with()
    with filled(eventjet_database, plain) as engine, engine.connect() as connection:
        # The embedded server has no collation of a language; one of another name is none whose order is known.
        connection.execute(text("create collation other (locale = 'C.utf8')"))
        connection.execute(text('alter table names alter column account_id type varchar(200) collate "other"'))
        found = ids_beginning(plain, connection, "account", "a")
        assert found.ids == ()
        assert "Only whole ids can be found" in found.fault
        declared = 'Index("names_account_id_prefix", "account_id", postgresql_ops={"account_id": "text_pattern_ops"})'
        assert f"Declare {declared} in its Table and rebuild names." in found.fault
        with_line = bank_with(eval(declared))  # what the page says can be pasted
        (index,) = with_line.projections["names"].tables[0].indexes
        index.create(connection)
        check(connection, with_line)
        connection.execute(text("drop index names_account_id_prefix"))
        connection.execute(text("create index by_bytes on names (account_id collate \"C\") where account_id > 'a'"))
        assert ids_beginning(plain, connection, "account", "a").fault == found.fault  # of some rows alone
        connection.execute(text('drop index by_bytes; create index by_bytes on names (account_id collate "C")'))
        check(connection, plain)


def test_without_a_read_model_by_id_only_whole_ids_are_found(tmp_path: Path) -> None:
    none = App("bank", aggregates=[Account], upcasters=[withdrawn_has_a_reason])
    app = bank_with()
    engine = create_engine(f"sqlite:///{tmp_path}/read.db", poolclass=NullPool)
    create_tables(engine, app.projections.values())
    with engine.connect() as connection:
        assert (
            "no read model of the app has the id of account as its key"
            in ids_beginning(none, connection, "account", "a").fault
        )
        assert "until the read model names has begun" in ids_beginning(app, connection, "account", "a").fault
    engine.dispose()
