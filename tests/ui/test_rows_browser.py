"""The screens of read models and rows in a browser: readable at any width, and nothing in a row does anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

from eventjet.dev.nats import NatsServer
from eventjet.examples.bank.account import Account
from tests.ui.conftest import in_thread, serving
from tests.ui.shelf import begun, settings_of, shelf

EVIL = "<img src=x onerror=\"document.title='taken'\">\u202e\u2066<script>document.title='taken'</script>"
LONG = "w" * 90


@pytest.fixture
def console(tmp_path: Path) -> Iterator[str]:
    """The URL of a console over some accounts, one with a hostile id and one with a long one."""
    database = f"sqlite:///{tmp_path}/read.db"
    with NatsServer(sync_interval="1m") as nats:

        async def fill() -> None:
            async with begun(shelf, settings_of(nats, database)) as jet:
                accounts = jet.repository(Account)
                for each in (EVIL, LONG, "ada"):
                    await accounts.execute(each, Account.open, EVIL[:100])
                for amount in range(1, 21):
                    await accounts.execute("ada", Account.deposit, Decimal(amount))

        in_thread(fill())
        # The module is found where the tests run.
        root = str(Path(__file__).parents[2])
        environ = {"EVENTJET_SERVERS": nats.url, "EVENTJET_DATABASE": database, "PYTHONPATH": root}
        with serving(tmp_path, environ, "--app", "tests.ui.shelf:shelf") as url:
            yield url


def row_path(key: str) -> str:
    return f"/models/row?{urlencode({'name': 'balances', 'key': json.dumps([key])})}"


def test_rows_fit_every_width_and_do_nothing(console: str, page: Page) -> None:
    paths = ["/models", "/models/one?name=balances", "/models/one?name=book", row_path(EVIL), row_path(LONG)]
    for width in (400, 1_600):
        page.set_viewport_size({"width": width, "height": 900})
        for path in paths:
            page.goto(f"{console}{path}")
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            assert "taken" not in page.title()
            assert page.locator("main img, main script").count() == 0
            root = "document.documentElement"
            assert page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"), (width, path)


def test_a_slider_moves_through_the_events_of_a_row(console: str, page: Page) -> None:
    page.goto(f"{console}{row_path('ada')}")
    expect(page.locator("#chosen")).to_contain_text("After event 21 of 21")
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    expect(page.locator("#chosen")).to_contain_text("After event 1 of 21")
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    expect(page.locator("#chosen")).to_contain_text("After event 3 of 21")
    expect(page.locator("#chosen tr", has_text="amount")).to_contain_text("changed")
    page.get_by_label("At a position of the log").fill("13")
    page.get_by_role("button", name="Show").last.click()
    expect(page.locator("#chosen")).to_contain_text("At position 13: after event 11 of 21")


def test_the_list_finds_a_row_by_its_key(console: str, page: Page) -> None:
    page.goto(f"{console}/models")
    page.get_by_role("link", name="balances").click()
    page.get_by_label("Go to account_id, or its beginning").fill("ad")
    page.get_by_role("button", name="Go").click()
    page.get_by_role("link", name="ada").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Row ada")
    expect(page.locator("main")).to_contain_text("Right: the live row is what the log says")
