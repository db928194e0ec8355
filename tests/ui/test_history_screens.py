"""Aggregates, one aggregate and one event: in a browser, and with ids and bodies that are made to break pages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from urllib.parse import unquote_plus, urlencode

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from playwright.sync_api import Page, expect
from sqlalchemy import text

from eventjet import App, Metadata, Personal, aggregate, event
from eventjet.codec.headers import RawRecord, header_block
from eventjet.codec.subjects import subject_of
from eventjet.console import console
from eventjet.dev.nats import NatsServer
from eventjet.errors import Refused
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.examples.bank.read_models import balances
from eventjet.jetstream.client import Client, connected
from eventjet.log.topology import declare
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.hostile_ids import hostile_ids
from tests.hostile_records import records
from tests.logs import fresh_name
from tests.ui.conftest import in_thread, serving
from tests.ui.shelf import PatientClient

SCRIPT = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
TRANSFERS = "eventjet.examples.transfer.app:transfers"


@event("person.joined")
class Joined:
    email: Personal[str]
    plan: str = "free"


@aggregate("person")
class Person:
    email: Personal[str] = ""
    plan: str = ""

    def join(self, email: str) -> Joined:
        return Joined(email=email)

    def evolve(self, event: Joined) -> Person:
        if event.plan == "free" and event.email.startswith("bad"):
            raise ValueError(event.email)
        return replace(self, email=event.email, plan=event.plan)


def bank_called(name: str) -> App:
    return App(name, aggregates=[Account], projections=[balances], upcasters=[withdrawn_has_a_reason])


@asynccontextmanager
async def looking(
    app: App, nats: NatsServer, folder: Path, database: str = ""
) -> AsyncGenerator[tuple[httpx.AsyncClient, Client]]:
    """Yield a client of the app's console, and a connection of another program."""
    database = database or f"sqlite:///{folder}/read.db"
    chosen = Settings.load({"servers": nats.url, "database": database}, environ={})
    site = console(app, settings=chosen)
    async with (
        connected(chosen) as client,
        site.router.lifespan_context(site),
        PatientClient(transport=httpx.ASGITransport(site), base_url="http://console.example") as web,
    ):
        await declare(client, app.name, 1)
        create_tables(Database(chosen.database).sync_engine(), app.projections.values())
        yield web, client


async def publish(client: Client, subject: str, body: bytes, headers: bytes = b"") -> int:
    """Publish as another program does; return the position."""
    reply = await client.request(subject, body, headers)
    match = re.search(rb'"seq":\s*(\d+)', reply[4])
    assert match is not None, reply
    return int(match[1])


async def test_the_screens_show_events_of_any_program(nats: NatsServer, tmp_path: Path) -> None:
    app = bank_called(fresh_name())
    async with looking(app, nats, tmp_path) as (web, client):
        assert (await web.get("/aggregates")).status_code == 200
        async with app.connect(servers=nats.url) as jet:
            await jet.repository(Account).execute("a-1", Account.open, SCRIPT)
            once = jet.repository(Account).command("c-1", metadata=Metadata(actor=SCRIPT, correlation=SCRIPT))
            await once.execute("a-1", Account.deposit, Decimal(7))
        stranger = await publish(
            client, subject_of(app.name, "account", "a-1"), b"\xff<b>", header_block([("X", SCRIPT)])
        )
        pages = {
            "/aggregates": "Changed last",
            "/aggregates?type=account&id=a-1": "Only whole ids can be found until the read model balances has begun",
            "/aggregates/one?type=account&id=a-1": "Behind its last event are records that have no version",
            "/aggregates/one?type=account&id=a-1&version=2&with=0": "Between version 0 and version 2, 2 fields differ",
            "/aggregates/state?type=account&id=a-1&version=1": "changed 1 field",
            "/events/one?position=2": "It names none",
            f"/events/one?position={stranger}": "Unreadable for this app",
        }
        for path, part in pages.items():
            answer = await web.get(path)
            assert (answer.status_code, path) == (200, path)
            assert part in answer.text
            assert "<script>d" not in answer.text
            assert "<img" not in answer.text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/aggregates?type=A.b", 400),
        ("/aggregates?type=account&id=%00", 400),
        (f"/aggregates?type=account&id={'x' * 2_000}", 400),
        ("/aggregates/one", 400),
        ("/aggregates/one?type=account", 400),
        ("/aggregates/one?type=account&id=nobody", 404),
        ("/aggregates/one?token=account.=zz", 400),
        ("/aggregates/one?type=account&id=a&version=0", 400),
        ("/aggregates/one?type=account&id=a&version=-1", 400),
        ("/aggregates/one?type=account&id=a&upto=9999999999999999999999", 400),
        ("/events/one", 400),
        ("/events/one?position=1e3", 400),
        ("/events/one?position=²", 400),
        ("/events/one?position=9223372036854775807", 404),
    ],
)
async def test_wrong_paths_are_refused_with_a_reason(nats: NatsServer, tmp_path: Path, path: str, status: int) -> None:
    app = bank_called("asked")
    async with looking(app, nats, tmp_path) as (web, _):
        answer = await web.get(path)
        assert answer.status_code == status
        assert "A fault of eventjet" not in answer.text


async def test_personal_fields_are_on_no_page(nats: NatsServer, tmp_path: Path) -> None:
    app = App(fresh_name(), aggregates=[Person])
    async with looking(app, nats, tmp_path) as (web, client):
        async with app.connect(servers=nats.url) as jet:
            await jet.repository(Person).execute("p-1", Person.join, "ada@example.com")
        headers = header_block(
            [("Ej-Type", "person.joined"), ("Ej-Schema", "1"), ("Ej-Version", "2"), ("Nats-Msg-Id", "x")]
        )
        await publish(
            client, subject_of(app.name, "person", "p-1"), b'{"email":"bad@example.com","plan":"free"}', headers
        )
        for path in (
            "/aggregates/one?type=person&id=p-1",
            "/aggregates/one?type=person&id=p-1&version=1",
            "/aggregates/one?type=person&id=p-1&version=2&with=0",
            "/aggregates/state?type=person&id=p-1&version=1",
            "/events/one?position=1",
            "/events/one?position=2",
        ):
            answer = await web.get(path)
            assert answer.status_code == 200
            assert "&lt;personal&gt;" in answer.text
            assert "example.com" not in answer.text.replace("console.example", "")
        answer = await web.get("/aggregates/one?type=person&id=p-1&version=2")
        assert "Version 2, at position 2: Person.evolve raised ValueError" in answer.text
        assert "The last state before that" in answer.text


async def test_each_page_without_a_server_answers_and_says_so() -> None:
    url = "postgresql://nobody@127.0.0.1:1/read"
    nowhere = Settings.load({"servers": "nats://127.0.0.1:1", "database": url}, environ={})
    site = console(bank_called("gone"), settings=nowhere)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url="http://console.example") as web:
        for path in (
            "/aggregates",
            "/aggregates?type=account&id=a",
            "/aggregates/one?type=account&id=a",
            "/events/one?position=1",
        ):
            answer = await web.get(path)
            assert answer.status_code in (200, 502)
            assert "127.0.0.1:1" in answer.text


@pytest.mark.slow
async def test_no_hostile_id_breaks_a_screen(nats: NatsServer, tmp_path: Path) -> None:
    app = bank_called(fresh_name())
    known = list(dict.fromkeys(hostile_ids(300, seed=11)))
    async with looking(app, nats, tmp_path) as (web, _), app.connect(servers=nats.url) as jet:
        for account in known:
            try:
                await jet.repository(Account).execute(account, Account.open, "x")
            except Refused:
                continue
            answer = await web.get(f"/aggregates/one?{urlencode({'type': 'account', 'id': account})}")
            assert answer.status_code == 200, ascii(account)
            # By its token, as forms send it, and by its prefix.
            token = re.search(r'name="token" value="([^"]*)"', answer.text)
            assert token is not None
            by_token = await web.get("/aggregates/one", params={"token": token[1], "version": "1"})
            assert by_token.status_code == 200
            matches = await web.get(f"/aggregates?{urlencode({'type': 'account', 'id': account})}")
            assert urlencode({"type": "account", "id": account}).replace("&", "&amp;") in matches.text, ascii(account)
        answer = await web.get("/aggregates")
        assert answer.status_code == 200
        assert not any("\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069" for char in answer.text)


@pytest.mark.slow
@seed(5)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(record=records(("account", "other"), ("account.opened", "account.deposited")))
def test_no_hostile_record_breaks_a_screen(nats: NatsServer, tmp_path: Path, record: RawRecord) -> None:
    async def look() -> None:
        app = bank_called("hostile")
        async with looking(app, nats, tmp_path) as (web, client):
            block = record[3] if record[3].startswith(b"NATS/1.0\r\n") and record[3].endswith(b"\r\n\r\n") else b""
            # Headers that the server itself reads are left out: it refuses them.
            lines = [line for line in block.split(b"\r\n") if not line.lower().startswith(b"nats-")]
            block = b"\r\n".join(lines) if block and len(lines) > 3 else b""
            position = await publish(client, subject_of(app.name, "account", "a"), record[4], block)
            for path in (
                f"/events/one?position={position}",
                "/aggregates/one?type=account&id=a",
                "/aggregates/one?type=account&id=a&version=1",
                "/aggregates",
            ):
                answer = await web.get(path)
                assert answer.status_code == 200, (path, answer.text)

    asyncio.run(look())


async def moved(url: str) -> None:
    """Transfer from one account to the next, with a script as a name."""
    from eventjet.examples.transfer.accounts import Account as Source
    from eventjet.examples.transfer.app import transfers
    from eventjet.examples.transfer.transfers import Transfer

    async with transfers.connect(servers=url) as jet:
        await jet.init()
        for account in ("ada", "eve"):
            await jet.repository(Source).execute(account, Source.open, SCRIPT)
            await jet.repository(Source).execute(account, Source.deposit, Decimal(100))
        for _ in range(60):
            await jet.repository(Source).execute("ada", Source.deposit, Decimal(1))
        until = datetime.now(UTC) + timedelta(days=1)
        await jet.repository(Transfer).execute("t-1", Transfer.request, "t-1", "ada", "eve", Decimal(9), until=until)
        cause = [event async for event in jet.tail()][-1]
        withdrawals = jet.repository(Source).command(
            "t/1", metadata=Metadata(causation=cause.event_id, correlation="transfer:t-1", actor="process:transfer")
        )
        await withdrawals.execute("ada", Source.withdraw, Decimal(9), transfer="t-1")


def test_a_person_finds_an_aggregate_travels_in_time_and_follows_causes(page: Page, tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats", sync_interval="1m") as server:
        server.start()
        in_thread(moved(server.url))
        environ = {"EVENTJET_SERVERS": server.url, "EVENTJET_DATABASE": f"sqlite:///{tmp_path}/read.db"}
        with serving(tmp_path, environ, "--app", TRANSFERS) as url:
            for width in (400, 1600):
                page.set_viewport_size({"width": width, "height": 900})
                find(page, url)
                travel(page, url)
                follow(page, url)


def find(page: Page, url: str) -> None:
    page.goto(f"{url}/aggregates")
    page.get_by_label("type").select_option("account")
    page.get_by_label("id, or its beginning").fill("ada")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="ada", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("account ada")
    fits(page)


def travel(page: Page, url: str) -> None:
    expect(page.locator("#state")).to_contain_text("Event 63, account.withdrawn, changed 1 field")
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    expect(page.locator("#state")).to_contain_text("Event 1, account.opened, changed 1 field")
    row = page.get_by_role("row", name="owner")
    expect(row).to_contain_text("<script>")
    expect(row).to_contain_text("changed")
    slider.press("ArrowRight")
    expect(page.locator("#state")).to_contain_text("Event 2, account.deposited")
    expect(slider).to_be_focused()
    expect(page.get_by_role("spinbutton", name="version", exact=True)).to_have_value("2")
    page.get_by_role("link", name="Link to this").click()
    expect(page).to_have_url(re.compile("version=2"))
    page.get_by_label("compared with version").fill("62")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#state")).to_contain_text("Between version 62 and version 2, 1 field differs")
    page.get_by_role("link", name="Older events").click()
    expect(page.get_by_role("region", name="History").get_by_role("row")).to_have_count(1 + 13)
    fits(page)


def follow(page: Page, url: str) -> None:
    page.goto(f"{url}/aggregates/one?type=transfer&id=t-1")
    page.get_by_role("link", name="what caused it").click()
    expect(page.get_by_text("It names none")).to_be_visible()
    page.locator(".tree a").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("account.withdrawn")
    expect(page.get_by_role("link", name="transfer t-1").first).to_be_visible()
    assert page.title() != "run"
    fits(page)


def fits(page: Page) -> None:
    """Assert that nothing is wider than the page."""
    page.wait_for_load_state()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_pages_work_without_script(browser: object, nats: NatsServer, tmp_path: Path) -> None:
    from playwright.sync_api import Browser

    assert isinstance(browser, Browser)
    with NatsServer(tmp_path / "nats", sync_interval="1m") as server:
        server.start()
        in_thread(moved(server.url))
        environ = {"EVENTJET_SERVERS": server.url, "EVENTJET_DATABASE": f"sqlite:///{tmp_path}/read.db"}
        with serving(tmp_path, environ, "--app", TRANSFERS) as url:
            page = browser.new_context(java_script_enabled=False).new_page()
            page.goto(f"{url}/aggregates/one?type=account&id=ada")
            slider = page.get_by_role("slider")
            slider.focus()
            slider.press("Home")
            page.get_by_role("button", name="Show").click()
            expect(page).to_have_url(re.compile("version=1"))
            expect(page.locator("#state")).to_contain_text("Event 1, account.opened")


@pytest.mark.slow
async def test_hostile_ids_are_listed_by_prefix_on_both_databases(
    nats: NatsServer, tmp_path: Path, database: str
) -> None:
    app = bank_called(fresh_name())
    async with looking(app, nats, tmp_path, database) as (web, _), app.connect(servers=nats.url) as jet:
        known: list[str] = []
        for account in dict.fromkeys(hostile_ids(250, seed=3)):
            try:
                await jet.repository(Account).execute(account, Account.open, "x")
                known.append(account)
            except Refused:
                continue
        engine = Database(database).sync_engine()
        with engine.begin() as connection:
            rows = [{"account_id": account, "owner": "x", "amount": 0} for account in (*known, "in the table alone")]
            connection.execute(balances.table.insert(), rows)
            connection.execute(text("update eventjet_projection set position = 1, log = 'x', state = 'active'"))
        for prefix in dict.fromkeys(["", "in", *(account[: 1 + len(account) // 2] for account in known)]):
            expected = sorted(account for account in known if account.startswith(prefix))
            listed, after = list[str](), ""
            while True:
                query = urlencode({"type": "account", "id": prefix} | ({"after": after} if after else {}))
                answer = await web.get(f"/aggregates?{query}")
                assert answer.status_code == 200
                listed += [
                    unquote_plus(link) for link in re.findall(r"one\?type=account&amp;id=([^\"]*)\"", answer.text)
                ]
                more = re.search(r"after=([^\"]*)\">The next", answer.text)
                if more is None:
                    break
                after = unquote_plus(more[1])
            assert sorted(listed) == expected, ascii(prefix)
