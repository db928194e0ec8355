"""Hostile data on every screen: none of it runs, and no page becomes wider than its window."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Dialog

from eventjet import Metadata, with_metadata
from eventjet.examples.transfer.accounts import Account
from eventjet.examples.transfer.transfers import Transfer
from eventjet.operations.quarantine import CommandConnections, Quarantine
from tests.ui.branch import POISON, branch
from tests.ui.conftest import PATIENCE_MS, in_thread, serving
from tests.ui.stage import Stage, staged

HOSTILE = "<img src=x onerror='window.hacked=1'>\u202e\u2066\x07\"&{{7*7}}</script><script>window.hacked=1</script>"
LONG = "W" * 190
_STEERING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\x07"


async def _written(stage: Stage) -> tuple[int, int]:
    """Return the position of the quarantined event, and of one with a large body."""
    async with branch.connect(stage.settings) as jet:
        accounts = jet.repository(Account)
        with with_metadata(Metadata(actor=HOSTILE, correlation=HOSTILE, extra={"note": HOSTILE})):
            await accounts.execute(HOSTILE, Account.open, HOSTILE[:90])
            await accounts.execute(LONG, Account.open, "W" * 90)
            large = await accounts.execute("large", Account.deposit, Decimal(1), transfer=HOSTILE * 7_000)
            last = await accounts.command(HOSTILE[:60]).execute(HOSTILE, Account.deposit, POISON)
            await jet.repository(Transfer).execute(
                HOSTILE, Transfer.request, HOSTILE, HOSTILE, LONG, Decimal(5), until=Transfer().until
            )
        await jet.caught_up("balances", position=last.position, timeout_s=240)
        return last.position, large.position


@pytest.fixture(scope="module")
def hostile_console() -> Iterator[tuple[str, int, int]]:
    with staged(accounts=10, commands=10, postgres=False) as stage:
        quarantined, large = in_thread(_written(stage))
        quarantine = Quarantine(CommandConnections(branch, stage.settings), "balances")
        assert in_thread(quarantine.listed())[0]
        with serving(stage.folder, stage.environ, "--allow-actions") as url:
            yield url, quarantined, large


@pytest.mark.timeout(900)
def test_hostile_data_neither_runs_nor_breaks_a_page(browser: Browser, hostile_console: tuple[str, int, int]) -> None:
    url, quarantined, large = hostile_console
    hostile, long = quote(HOSTILE), quote(LONG)
    key = quote(f'["{"".join(_escaped(char) for char in HOSTILE)}"]')
    pages = {
        "overview": "/",
        "aggregates": f"/aggregates?type=account&id={quote(HOSTILE[:10])}",
        "aggregate": f"/aggregates/one?type=account&id={hostile}",
        "a long id": f"/aggregates/one?type=account&id={long}",
        "time travel": f"/aggregates/one?type=account&id={hostile}&version=1",
        "event": f"/events/one?position={quarantined}",
        "a large event": f"/events/one?position={large}",
        "log": "/log",
        "log of an actor": f"/log?actor={hostile}",
        "models": "/models",
        "model": "/models/one?name=balances",
        "row": f"/models/row?name=balances&key={key}",
        "quarantine": "/quarantine",
        "quarantined": f"/quarantine/one?name=balances&position={quarantined}",
        "processes": "/processes",
        "process": f"/processes/one?name=transfer&id={hostile}",
        "jobs": "/jobs",
        "retry": f"/actions/new?action=retry&name=balances&position={quarantined}",
        "actions": f"/actions?target={hostile}",
    }
    problems: list[object] = []
    for width in (400, 1600):
        context = browser.new_context(viewport={"width": width, "height": 900})
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()

        def on_dialog(dialog: Dialog) -> None:
            problems.append(("a dialog", dialog.message))
            dialog.dismiss()

        page.on("dialog", on_dialog)
        page.on("pageerror", lambda error: problems.append(("an error", str(error))))
        for name, path in pages.items():
            answer = page.goto(url + path)
            assert answer is not None
            if answer.status != 200:
                problems.append((name, answer.status))
            if page.evaluate("window.hacked !== undefined || document.querySelector('main img') !== null"):
                problems.append((name, "what was written ran"))
            if page.evaluate("document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth"):
                problems.append((name, width, "wider than the window"))
            text = page.locator("body").inner_text()
            if any(char in text for char in _STEERING):
                problems.append((name, "a character that steers text is on it"))
        context.close()
    assert problems == []


def _escaped(char: str) -> str:
    return {'"': '\\"', "\x07": "\\u0007"}.get(char, char)
