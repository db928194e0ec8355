"""Read models, their tables and their rows, as the console shows them, on both databases."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from sqlalchemy import event as listening

from eventjet import App
from eventjet.dev.nats import NatsServer
from eventjet.domain.identity import encode_id
from eventjet.errors import Refused
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.lake import sync
from eventjet.operations import rows
from eventjet.operations.tables import revision_tables
from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY
from tests.hostile_ids import hostile_ids
from tests.tables import execute
from tests.ui.shelf import Person, begun, letters, looking, register, settings_of, shelf

pytestmark = pytest.mark.slow

MANY = 100_000


@pytest.fixture
def nats() -> Iterator[NatsServer]:
    """A server of the test's own: the apps here have names that others would share."""
    with NatsServer(sync_interval="1m") as server:
        yield server


def row_url(name: str, *key: Any, **more: Any) -> str:
    return f"/models/row?{urlencode({'name': name, 'key': json.dumps(key), **more})}"


def links(answer: httpx.Response, label: str) -> list[str]:
    """Return the targets of the links with this text."""
    targets = re.findall(rf'<a href="([^"]*)"[^>]*>{label}</a>', answer.text)
    return [unescape(target) for target in targets]


def text_of(answer: httpx.Response) -> str:
    """Return the text of a page."""
    assert answer.status_code == 200, answer.text
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.text.partition("<main")[2])).split())


def is_id(aggregate_id: str) -> bool:
    """Return whether an aggregate may have this id."""
    try:
        encode_id(aggregate_id)
    except (Refused, ValueError):
        return False
    return True


async def test_a_read_model_without_a_server_has_its_position_and_no_lag(nats: NatsServer, tmp_path: Path) -> None:
    settings = settings_of(nats, f"sqlite:///{tmp_path}/read.db")
    async with begun(shelf, settings) as jet:
        await jet.repository(Account).execute("a-1", Account.open, "ada")
    async with looking(shelf, settings) as client:
        nats.stop()
        page = text_of(await client.get("/models/one?name=balances"))
    assert "Position 1 Lag not known" in page
    assert "1 of 0" not in page


async def test_the_pages_of_a_table_show_each_row_once(nats: NatsServer, database: str) -> None:
    settings = settings_of(nats, database)
    async with begun(shelf, settings) as jet:
        for number in range(130):
            await jet.repository(Account).execute(f"a-{number:03}", Account.open, f"owner {number}")
    async with looking(shelf, settings) as client:
        for name, table, per_row in (("balances", "balances", 1), ("book", "book_lines", 0)):
            path = f"/models/one?name={name}&table={table}"
            accounts: list[str] = []
            while path:
                answer = await client.get(path)
                answer_from = re.findall(r">(a-\d{3})<", answer.text)
                assert 0 < len(answer_from) <= 50
                accounts += answer_from
                path = (links(answer, "Next rows") or [""])[0].partition("#")[0]
            assert accounts == [f"a-{number:03}" for number in range(130)], name
            assert len(links(await client.get(f"/models/one?name={name}"), ".*a-000.*")) == per_row
        answer_from = await client.get("/models/one?name=balances&start=a-12")
        assert re.findall(r">(a-\d{3})<", answer_from.text) == [f"a-{number}" for number in range(120, 130)]
        assert "written by a SQL projection" in text_of(await client.get("/models/one?name=book"))
        assert "written by a SQL projection" in text_of(await client.get(row_url("book", "a-1", 1)))


async def test_a_row_altered_by_hand_is_reported_with_its_first_wrong_position(nats: NatsServer, database: str) -> None:
    settings = settings_of(nats, database)
    async with begun(shelf, settings) as jet:
        accounts = jet.repository(Account)
        await accounts.execute("ada", Account.open, "Ada")
        await accounts.execute("bob", Account.open, "Bob")
        for _ in range(3):
            await accounts.execute("ada", Account.deposit, Decimal(5))  # positions 3, 4, 5
    async with looking(shelf, settings) as client:
        assert "Right: the live row is what the log says, at position 5" in text_of(
            await client.get(row_url("balances", "ada"))
        )
        execute(database, "update balances set amount = '5.00' where account_id = 'ada'")
        text = text_of(await client.get(row_url("balances", "ada")))
        assert "Wrong: the live row is not what the log says at position 5. It is missed since position 4" in text
        assert "amount 5.00 15.00 differs" in text
        execute(database, "update balances set amount = '7.00' where account_id = 'ada'")
        text = text_of(await client.get(row_url("balances", "ada")))
        assert "It never was what the log says, since its first event at position 1" in text
        execute(database, "delete from balances where account_id = 'bob'")
        assert "missed since position 2" in text_of(await client.get(row_url("balances", "bob")))
        execute(database, "insert into balances (account_id, owner, amount) values ('eve', 'Eve', '1.00')")
        assert "The log has no event of it" in text_of(await client.get(row_url("balances", "eve")))
        execute(database, "update letters set events = 3 where letter = 'a'")
        assert "missed since position 5" in text_of(await client.get(row_url("letters", "a")))
        execute(database, "update postings set amount = '6.00' where position = 4")
        assert "since its first event at position 4" in text_of(await client.get(row_url("postings", 4)))


async def test_a_row_can_be_shown_as_of_any_position(nats: NatsServer, database: str) -> None:
    settings = settings_of(nats, database)
    async with begun(shelf, settings) as jet:
        accounts = jet.repository(Account)
        await accounts.execute("bob", Account.open, "Bob")
        await accounts.execute("ada", Account.open, "Ada")
        for amount in range(1, 231):
            await accounts.execute("ada", Account.deposit, Decimal(amount))
    async with looking(shelf, settings) as client:
        for position in (3, 100, 232, 10**15):
            amount = sum(range(1, min(position, 232) - 1))
            text = text_of(await client.get(row_url("balances", "ada", at=position)))
            assert re.search(rf"amount [\d.]+ {amount}\.00 changed", text), position
        assert "At position 1 there was no such row" in text_of(await client.get(row_url("balances", "ada", at=1)))
        assert "amount 0.00 1.00 changed" in text_of(await client.get(row_url("balances", "ada", n=2)))
        page = await client.get(row_url("balances", "ada"))
        assert "231 events changed it; these are 32 to 231" in text_of(page)
        (older,) = links(page, "Earlier events")
        assert "231 events changed it; these are 1 to 31" in text_of(await client.get(older))


async def test_the_search_for_a_rows_events_is_bounded(
    nats: NatsServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "RECORDS_MAX", 40)
    settings = settings_of(nats, database)
    async with begun(shelf, settings) as jet:
        for number in range(100):
            await jet.repository(Account).execute(f"{'ab'[number % 2]}{number}", Account.open, "x")
    async with looking(shelf, settings) as client:
        answer, reads = await client.get(row_url("letters", "b")), list[int]()
        while onward := links(answer, "Go on reading"):
            assert "Right" not in text_of(answer)
            reads.append(int(parse_qs(urlsplit(onward[0]).query)["read_to"][0]))
            answer = await client.get(onward[0])
        assert reads == [40, 80]
        assert "Right: the live row is what the log says, at position 100" in text_of(answer)
        assert "50 events changed it" in text_of(answer)
        stale = await client.get(row_url("letters", "b", read_to=40))
        assert "it began anew" in text_of(stale)


async def test_hostile_ids_and_values_are_escaped(nats: NatsServer, database: str) -> None:
    settings = settings_of(nats, database)
    ids = list(dict.fromkeys(hostile_id for hostile_id in hostile_ids(150, 4) if is_id(hostile_id)))
    assert len(ids) > 50
    evil = "<script>document.title='taken'</script>\u202e\x1b[2J" + "x" * 40
    async with begun(shelf, settings) as jet:
        for key in ids:
            await jet.repository(Account).execute(key, Account.open, evil)
    async with looking(shelf, settings) as client:
        path, keys = "/models/one?name=balances", list[str]()
        while path:
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "<script>document" not in answer.text
            assert not set(answer.text) & set("\u202e\x1b\u2066\x00")
            keys += [
                link for link in map(unescape, re.findall(r'href="([^"]*)"', answer.text)) if "/models/row" in link
            ]
            path = (links(answer, "Next rows") or [""])[0].partition("#")[0]
        assert len(keys) == len(ids)
        for key in keys:
            answer = await client.get(key)
            assert answer.status_code == 200
            assert "Right:" in answer.text, key
            assert "<script>document" not in answer.text
            assert not set(answer.text) & set("\u202e\x1b\u2066\x00")


NO_QUESTIONS = [
    "/models/one?name=balances&after=x",
    "/models/one?name=balances&after=[1,2]",
    "/models/one?name=balances&after=[null]",
    "/models/one?name=balances&revision=x",
    "/models/one?name=balances&revision=99999999999",
    "/models/one?name=balances&table=other",
    "/models/one?name=book&table=book_days&start=abc",
    "/models/one?name=book&table=book_days&start=99999999999999999999",
    "/models/one?name=balances&start=%00",
    f"/models/one?name={'x' * 100}",
    "/models/row?name=balances&key=",
    "/models/row?name=balances&key=[[[[",
    f"/models/row?name=balances&key={'[' * 4000}",
    f"/models/row?name=balances&key=[\"{'x' * 6000}\"]",
    "/models/row?name=balances&key=[\"\\ud800\"]",
    "/models/row?name=balances&key=[\"\\u0000\"]",
    "/models/row?name=postings&key=[true]",
    "/models/row?name=postings&key=[1e99]",
    "/models/row?name=balances&key=[\"a\"]&at=-1",
    "/models/row?name=balances&key=[\"a\"]&n=1.5",
]  # fmt: skip


async def test_wrong_queries_are_refused_with_a_reason(nats: NatsServer, database: str) -> None:
    settings = settings_of(nats, database)
    async with begun(shelf, settings) as jet:
        await jet.repository(Account).execute("a", Account.open, "Ada")
    async with looking(shelf, settings) as client:
        for path in NO_QUESTIONS:
            answer = await client.get(path)
            assert answer.status_code == 400, (path, answer.text)


async def test_a_value_that_no_fold_writes_is_reported_and_breaks_no_page(nats: NatsServer, tmp_path: Any) -> None:
    database = f"sqlite:///{tmp_path}/read.db"
    settings = settings_of(nats, database)
    async with begun(shelf, settings) as jet:
        await jet.repository(Account).execute("ada", Account.open, "Ada")
    execute(database, "update balances set amount = 'much' where account_id = 'ada'")
    async with looking(shelf, settings) as client:
        assert "much" in text_of(await client.get("/models/one?name=balances"))
        text = text_of(await client.get(row_url("balances", "ada")))
        assert "The live row cannot be read" in text
        assert "Wrong" in text


async def test_an_undeclared_read_model_still_shows_its_rows(nats: NatsServer, database: str) -> None:
    settings = settings_of(nats, database)
    async with begun(shelf, settings) as jet:
        await jet.repository(Account).execute("ada", Account.open, "Ada")
    later = App("shelf", aggregates=[Account], upcasters=[withdrawn_has_a_reason], projections=[letters])
    async with looking(later, settings) as client:
        assert "balances not declared" in text_of(await client.get("/models"))
        text = text_of(await client.get("/models/one?name=balances"))
        assert "no worker advances it" in text
        assert "ada Ada 0.00" in text
        execute(database, "drop table balances")
        assert "The table balances is not there" in text_of(await client.get("/models/one?name=balances"))
        assert (await client.get(row_url("balances", "ada"))).status_code == 404


async def test_personal_fields_are_on_no_page(nats: NatsServer, database: str) -> None:
    settings = settings_of(nats, database)
    async with begun(register, settings) as jet:
        await jet.repository(Person).execute("p-1", Person.rename, "Augusta")
        await jet.repository(Person).execute("p-1", Person.rename, "Augusta King")
    execute(database, "update people set name = 'Augusta Byron'")
    async with looking(register, settings) as client:
        for path in ("/models", "/models/one?name=people", row_url("people", "p-1"), row_url("people", "p-1", n=1)):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "Augusta" not in answer.text, path
        text = text_of(await client.get(row_url("people", "p-1")))
        assert "name <personal> <personal> differs" in text
        assert "never was what the log says" in text


def test_a_page_of_a_large_table_uses_the_index(database: str) -> None:
    execute(
        database,
        "create table book_lines (account_id varchar(400) not null, position bigint not null, owner text, "
        "primary key (account_id, position))",
        "create table book_days (n integer primary key)",
        "create table eventjet_projection (name varchar(48), revision integer, generation integer default 1, "
        "position bigint default 0, event_id text default '', log text default '', epoch bigint default 0, owner text, "
        "lease_until double precision default 0, lease_s double precision default 0, state varchar(16) default 'new', "
        "reason text, location text default '', tables text default '[]', takes_over boolean default false, "
        "identities text default '[]', app text default '', code text default '', primary key (name, revision))",
        "insert into eventjet_projection (name, revision) values ('book', 1)",
        "with recursive n (i) as (select 1 union all select i + 1 from n where i < " + str(MANY) + ") "
        "insert into book_lines select 'a-' || (i % 1000), i, 'x' from n",
    )
    if database.startswith("postgresql"):
        execute(database, "analyze book_lines")
    with Database(database).sync_engine().connect().execution_options(**{READ_ONLY: True}) as connection:
        statements: list[tuple[str, Any]] = []

        def on_execute(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            if "book_lines" in statement and "limit" in statement.lower():
                statements.append((statement, parameters))

        listening.listen(connection, "before_cursor_execute", on_execute)
        tables = revision_tables(connection, shelf, "book", 1, table="book_lines", after='["a-700", 50000]')
        revision_tables(connection, shelf, "book", 1, table="book_lines", start="a-7")
        listening.remove(connection, "before_cursor_execute", on_execute)
        assert tables.page is not None
        assert len(tables.page.rows) == 50
        assert len(statements) == 2
        for statement, parameters in statements:
            prefix = "explain query plan " if database.startswith("sqlite") else "explain "
            plan = " ".join(str(row) for row in connection.exec_driver_sql(prefix + statement, parameters))
            assert "book_lines_pkey" in plan or "SEARCH book_lines USING INDEX" in plan, plan
            assert "Seq Scan" not in plan, plan
            assert not re.search("TEMP B-TREE|Sort", plan), plan


async def test_the_list_shows_the_positions_of_the_lake(nats: NatsServer, database: str, tmp_path: Path) -> None:
    settings = replace(settings_of(nats, database), lake=str(tmp_path / "lake"))
    async with begun(shelf, settings) as jet:
        await jet.repository(Account).execute("a-1", Account.open, "Ada")
    await sync(shelf, str(tmp_path / "lake"), settings)
    async with looking(shelf, settings) as client:
        assert "account_opened events 1 none 1" in text_of(await client.get("/models")).replace(" 0 ", " none ")
    async with looking(shelf, replace(settings, lake="50%")) as client:
        assert "Name another folder" in text_of(await client.get("/models"))
