"""The overview in a real browser: it updates itself, and says within its bound what is away while the rest works."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from playwright.sync_api import Page, expect

from eventjet.console.screens.overview import _chart
from eventjet.console.status_poller import StatusPoller
from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.settings import Settings
from eventjet.subscriptions.supervisor import run_workers
from eventjet.subscriptions.work_status import StatusHistory, StatusSnapshot, WorkStatus
from tests.ui.acted import leaving
from tests.ui.conftest import Watched, in_thread, serving

BANK = ("--app", "eventjet.examples.bank.app:bank")
TRANSFER = ("--app", "eventjet.examples.transfer.app:transfers")


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """A server of one test alone, which stops it."""
    with closing(NatsServer(sync_interval="always")) as server:
        yield server.start()


def environ_of(server: NatsServer, database: str) -> dict[str, str]:
    return {"EVENTJET_SERVERS": server.url, "EVENTJET_DATABASE": database}


async def deposit(settings: Settings, count: int) -> None:
    """Record so many events in one account."""
    async with bank.connect(settings) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        for _ in range(count):
            await accounts.execute("a-1", Account.deposit, Decimal(1))


async def project(settings: Settings, position: int) -> None:
    """Have workers bring the read models to a position, and end them."""
    import asyncio

    stop = asyncio.Event()
    working = asyncio.ensure_future(run_workers(bank, settings, list(bank.projections), stop=stop))
    try:
        async with bank.connect(settings) as jet:
            for name in bank.projections:
                await jet.caught_up(name, position=position, timeout_s=60)
    finally:
        stop.set()
        await working


def settings_of(environ: dict[str, str]) -> Settings:
    return Settings.load(environ=environ)


def prepare(environ: dict[str, str]) -> None:
    """Make streams, tables, two events, and read models with these."""
    from eventjet.cli.main import main

    settings = settings_of(environ)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setenv("EVENTJET_APP", "eventjet.examples.bank.app:bank")
        assert in_thread(_init(main)) == 0
    in_thread(deposit(settings, 2))
    in_thread(project(settings, 2))


async def _init(main: object) -> int:
    import asyncio

    return await asyncio.to_thread(main, ["init"])  # type: ignore[arg-type]


def test_a_chart_draws_no_lag_without_a_sample() -> None:
    now, status = time.monotonic(), WorkStatus("stock", 1, "active", 9, 9, 0, 0.0, "host:1:aa")
    history = StatusHistory(120.0)
    for ago_s, lag in ((100.0, 700), (90.0, 5), (2.0, 10), (1.0, 4)):
        history.add(StatusSnapshot(now - ago_s, [replace(status, log_position=9 + lag, lag_events=lag)]))
    chart = _chart(cast("StatusPoller", SimpleNamespace(history=history)), status)
    assert chart is not None
    assert "it was 10 events, is 4, and was 10 at the most" in chart["words"]


def model(page: Page, name: str) -> str:
    return f"#models-{name}-1"


def test_it_moves_by_itself_and_focus_stays(page: Page, server: NatsServer, tmp_path: Path) -> None:
    environ = environ_of(server, f"sqlite:///{tmp_path}/read.db")
    prepare(environ)
    with serving(tmp_path, environ, *BANK) as url, leaving(page):
        page.goto(f"{url}/")
        row = page.locator("#models-balances-1")
        expect(row.locator("td").nth(1)).to_have_text("2")
        link = row.get_by_role("link", name="balances")
        link.focus()
        in_thread(deposit(settings_of(environ), 3))
        expect(page.locator("#log-part")).to_contain_text("1 to 5")
        expect(row.locator("td").nth(2)).to_have_text("3")
        in_thread(project(settings_of(environ), 5))
        expect(row.locator("td").nth(1)).to_have_text("5")
        expect(row.locator("td").nth(2)).to_have_text("0")
        expect(link).to_be_focused()
        expect(row.get_by_role("img")).to_have_attribute("aria-label", re.compile("was 3 at the most"))


def test_durability_is_as_the_monitoring_endpoint_reports_it(page: Page, server: NatsServer, tmp_path: Path) -> None:
    environ = environ_of(server, f"sqlite:///{tmp_path}/read.db")
    with serving(tmp_path, environ, *BANK) as url, leaving(page):
        page.goto(f"{url}/")
        expect(page.locator("#log-part")).to_contain_text("Run `eventjet init`")
        in_thread(deposit(settings_of(environ), 1))
        expect(page.locator("#log-part")).to_contain_text("--monitoring http://HOST:8222")
    with serving(tmp_path, environ, *BANK, "--monitoring", server.monitor_url) as url, leaving(page):
        page.goto(f"{url}/")
        expect(page.locator("#log-part")).to_contain_text("syncs what it acknowledges")


def test_deadlines_reactors_and_processes_are_there(page: Page, server: NatsServer, tmp_path: Path) -> None:
    from eventjet.examples.transfer.app import transfers

    environ = environ_of(server, f"sqlite:///{tmp_path}/read.db")

    async def init() -> None:
        async with transfers.connect(settings_of(environ)) as jet:
            await jet.init()

    in_thread(init())
    with serving(tmp_path, environ, *TRANSFER) as url, leaving(page):
        page.goto(f"{url}/")
        expect(page.locator("#followers-receipts-1")).to_contain_text("reactor")
        expect(page.locator("#followers-transfer-1")).to_contain_text("process")
        expect(page.locator("#deadlines-transfer")).to_contain_text("0")
        expect(page.locator("#models-part")).to_contain_text("declares no projections")


def fault_of(watched: Watched, part: str) -> None:
    expect(watched.page.locator(f"#{part} .fault")).to_have_count(1)


def no_fault_in(watched: Watched, part: str) -> None:
    expect(watched.page.locator(f"#{part} .fault")).to_have_count(0)


@pytest.mark.parametrize("how", ["dead", "slow"])
def test_the_log_shows_while_the_database_is_away_and_the_other_way_round(
    watched: Watched, server: NatsServer, tmp_path: Path, how: str
) -> None:
    page = watched.page
    with ExitStack() as ending:
        postgres = ending.enter_context(closing(PostgresServer())).start()
        environ = environ_of(server, postgres.create_database("console").replace("+psycopg", ""))
        prepare(environ)
        url = ending.enter_context(serving(tmp_path, environ, *BANK))
        ending.enter_context(leaving(page))
        page.goto(f"{url}/")
        row = page.locator("#models-balances-1")
        expect(row.locator("td").nth(1)).to_have_text("2")

        (postgres.kill if how == "dead" else postgres.pause)()
        fault_of(watched, "models-part")
        in_thread(deposit(settings_of(environ), 1))
        expect(page.locator("#log-part")).to_contain_text("1 to 3")
        no_fault_in(watched, "log-part")
        # A page that is requested now says the same, and does not wait for what is away.
        page.reload()
        fault_of(watched, "models-part")
        expect(page.locator("#log-part")).to_contain_text("1 to 3")
        (postgres.start if how == "dead" else postgres.resume)()
        no_fault_in(watched, "models-part")
        expect(row.locator("td").nth(2)).to_have_text("1")

        (server.kill if how == "dead" else server.pause)()
        fault_of(watched, "log-part")
        expect(row.locator("td").nth(1)).to_have_text("2")
        expect(row.locator("td").nth(2)).to_have_text("–")
        no_fault_in(watched, "models-part")
        (server.start if how == "dead" else server.resume)()
        no_fault_in(watched, "log-part")
        expect(row.locator("td").nth(2)).to_have_text("1")
        in_thread(deposit(settings_of(environ), 1))
        expect(row.locator("td").nth(2)).to_have_text("2")
