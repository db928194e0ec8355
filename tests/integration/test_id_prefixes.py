"""Ids are searched by prefix among 100,000 rows: by an index, in the order of code points, or not at all."""

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
    """Return the bank with a read model whose key is the account's id."""
    table = Table("names", MetaData(), Column("account_id", String(200), primary_key=True), *indexes)

    @projection("names", table=table)
    def names(row: Named | None, event: Recorded[AccountEvent]) -> Named | None:
        return Named(event.aggregate_id)

    return App("bank", aggregates=[Account], projections=[names], upcasters=[withdrawn_has_a_reason])


@contextmanager
def filled(url: str, app: App) -> Iterator[Engine]:
    """Yield a database in which the read model has rows and a position."""
    engine = create_engine(url, poolclass=NullPool)
    try:
        with engine.begin() as connection:
            create_tables(connection, app.projections.values())
            table = app.projections["names"].tables[0]
            rows = [
                {"account_id": account_id} for account_id in (*FEW, *(f"{MANY}{number:06}" for number in range(ROWS)))
            ]
            for start in range(0, len(rows), 5_000):
                connection.execute(table.insert(), rows[start : start + 5_000])
            connection.execute(text("update eventjet_projection set position = 1, log = 'x', state = 'active'"))
        yield engine
    finally:
        engine.dispose()


def explained(connection: Connection, look: Callable[[], IdMatches]) -> tuple[IdMatches, list[str]]:
    """Return the result of a search, and the query plan of its last statement."""
    statements: list[tuple[str, Any]] = []

    def record(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        statements.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", record)
    matches = look()
    event.remove(connection, "before_cursor_execute", record)
    statement, parameters = statements[-1]
    kind = "explain query plan" if connection.dialect.name == "sqlite" else "explain"
    plan = connection.exec_driver_sql(f"{kind} {statement}", parameters)
    return matches, [" ".join(map(str, row)) for row in plan]


def check(connection: Connection, app: App) -> None:
    """Check that each prefix finds its ids in the order of code points, page by page and without a scan."""
    for prefix in ("a", "a-", "a%", "A", "ä", "", "\U0010ffff", "many-0999", "zz"):
        ids, after = list[str](), ""
        while True:
            page, plan = explained(connection, partial(ids_beginning, app, connection, "account", prefix, after))
            assert page.model == "names"
            assert not any("Seq Scan" in line or line.split()[-2:-1] == ["SCAN"] for line in plan), plan
            assert any("Index" in line or "SEARCH" in line for line in plan), plan
            assert not any("Sort" in line or "TEMP B-TREE" in line for line in plan), plan
            ids += page.ids
            after = page.more_after
            if not after or len(ids) > 3 * MATCHES_MAX:
                break
        expected = sorted(
            account_id
            for account_id in (*FEW, *(f"{MANY}{number:06}" for number in range(ROWS)))
            if account_id.startswith(prefix)
        )
        assert ids == expected[: len(ids)]
        assert len(ids) == len(expected) or len(ids) > 3 * MATCHES_MAX


@pytest.mark.slow
def test_sqlite_searches_ids_by_the_primary_key(tmp_path: Path) -> None:
    app = bank_with()
    with filled(f"sqlite:///{tmp_path}/read.db", app) as engine, engine.connect() as connection:
        check(connection, app)


@pytest.mark.slow
def test_postgresql_searches_ids_by_a_primary_key_in_code_point_order(eventjet_database: str) -> None:
    app = bank_with()
    with filled(eventjet_database, app) as engine, engine.connect() as connection:
        check(connection, app)


@pytest.mark.slow
def test_postgresql_with_another_collation_needs_and_names_a_prefix_index(
    eventjet_database: str,
) -> None:
    plain = bank_with()
    with filled(eventjet_database, plain) as engine, engine.connect() as connection:
        # The embedded server has no collation of a language; the order of a renamed collation is not known.
        connection.execute(text("create collation other (locale = 'C.utf8')"))
        connection.execute(text('alter table names alter column account_id type varchar(200) collate "other"'))
        matches = ids_beginning(plain, connection, "account", "a")
        assert matches.ids == ()
        assert "Only whole ids can be found" in matches.fault
        declared = 'Index("names_account_id_prefix", "account_id", postgresql_ops={"account_id": "text_pattern_ops"})'
        assert f"Declare {declared} in its Table and rebuild names." in matches.fault
        with_line = bank_with(eval(declared))  # the suggested line is valid Python
        (index,) = with_line.projections["names"].tables[0].indexes
        index.create(connection)
        check(connection, with_line)
        connection.execute(text("drop index names_account_id_prefix"))
        connection.execute(text("create index by_bytes on names (account_id collate \"C\") where account_id > 'a'"))
        assert ids_beginning(plain, connection, "account", "a").fault == matches.fault  # a partial index is not enough
        connection.execute(text('drop index by_bytes; create index by_bytes on names (account_id collate "C")'))
        check(connection, plain)


def test_without_a_read_model_by_id_a_prefix_search_is_refused(tmp_path: Path) -> None:
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
