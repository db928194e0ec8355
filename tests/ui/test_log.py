"""The log in a real browser: it follows, stops when paused, and finds events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from eventjet import Imported, Metadata, with_metadata
from eventjet.dev.nats import NatsServer
from eventjet.examples.bank.account import Account, Deposited, Opened
from eventjet.examples.bank.app import bank
from eventjet.settings import Settings
from tests.ui.acted import leaving
from tests.ui.conftest import in_thread, serving


@dataclass(frozen=True, slots=True)
class Writer:
    """A writer to a log of its own."""

    settings: Settings

    def deposit(self, account: str, times: int = 1, actor: str = "web") -> None:
        async def write() -> None:
            async with bank.connect(self.settings) as jet:
                await jet.init()
                with with_metadata(Metadata(actor=actor)):
                    for _ in range(times):
                        await jet.repository(Account).execute(account, Account.deposit, Decimal(5))

        in_thread(write())

    def flood(self, accounts: int, each: int) -> None:
        """Write as quickly as an import can."""
        events = [
            Imported(Account, f"f-{n}", Deposited(amount=Decimal(1)) if m else Opened(owner="f"))
            for n in range(accounts)
            for m in range(each)
        ]

        async def write() -> None:
            async with bank.connect(self.settings) as jet:
                await jet.append_many(events, source="flood")

        in_thread(write())


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    with closing(NatsServer(sync_interval="1m")) as server:
        server.start()
        yield {
            "EVENTJET_SERVERS": server.url,
            "EVENTJET_DATABASE": f"sqlite:///{tmp_path}/read.db",
            "EVENTJET_APP": "eventjet.examples.bank.app:bank",
        }


def writer(environ: dict[str, str]) -> Writer:
    return Writer(Settings.load(environ=environ))


def test_new_events_appear_and_wait_while_the_log_is_paused(
    page: Page, environ: dict[str, str], tmp_path: Path
) -> None:
    log = writer(environ)
    log.deposit("a-1", 2)
    with serving(tmp_path, environ) as url, leaving(page):
        page.goto(f"{url}/log")
        expect(page.locator("tbody tr")).to_have_count(2)
        log.deposit("a-2")
        expect(page.locator("#p-3")).to_contain_text("a-2")

        pause = page.get_by_role("button", name="Pause")
        pause.focus()
        page.keyboard.press("Enter")
        status = page.get_by_role("status")
        expect(status).to_have_text("Paused.")
        log.deposit("a-3")
        expect(status).to_have_text("Paused. There is something new.")
        expect(page.locator("#p-4")).to_have_count(0)
        page.keyboard.press("Enter")
        expect(page.locator("#p-4")).to_contain_text("a-3")
        log.deposit("a-4")
        expect(page.locator("#p-5")).to_contain_text("a-4")


def test_the_log_can_be_searched_and_paged(page: Page, environ: dict[str, str], tmp_path: Path) -> None:
    log = writer(environ)
    log.deposit("a-1", 130)
    log.deposit("a-2", 3, actor="clerk-7")
    with serving(tmp_path, environ) as url, leaving(page):
        page.goto(f"{url}/log")
        page.get_by_label("Actor").fill("clerk-7")
        page.get_by_role("button", name="Look").click()
        expect(page.locator("tbody tr")).to_have_count(3)
        expect(page.locator("tbody tr").first).to_contain_text("a-2")

        page.goto(f"{url}/log")
        page.get_by_label("Aggregate").select_option("account")
        page.get_by_label("Id", exact=True).fill("a-2")
        page.get_by_role("button", name="Look").click()
        expect(page.locator("tbody tr")).to_have_count(3)

        page.goto(f"{url}/log")
        page.get_by_label("Jump to a position").fill("20")
        page.get_by_role("button", name="Jump").click()
        expect(page.locator("#p-20")).to_have_attribute("aria-current", "true")
        page.get_by_role("link", name="Newer").click()
        expect(page.locator("#p-20")).to_have_count(0)
        page.get_by_role("link", name="Older").click()
        expect(page.locator("#p-20")).to_have_count(1)
        page.locator("#p-20").get_by_role("link", name="20", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("position 20")


def test_a_flood_of_events_is_reported_and_does_not_fill_the_page(
    page: Page, environ: dict[str, str], tmp_path: Path
) -> None:
    log = writer(environ)
    log.deposit("a-1")
    with serving(tmp_path, environ) as url, leaving(page):
        page.goto(f"{url}/log")
        expect(page.locator("#p-1")).to_have_count(1)
        log.flood(200, 25)
        expect(page.locator("#p-5001")).to_have_count(1)
        assert page.locator("tbody tr").count() <= 200
        log.deposit("a-9")
        expect(page.locator("#p-5002")).to_contain_text("a-9")
