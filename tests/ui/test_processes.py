"""Processes in the console: those that wait, and what one did, why, and what comes next."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from html import unescape
from urllib.parse import quote

import httpx
import pytest

from eventjet import App, Recorded, Step, listens, process
from eventjet.console.screens import processes as processes_screen
from eventjet.console.screens import quarantine as quarantine_screen
from eventjet.dev.nats import NatsServer
from eventjet.domain.quarantined import QUARANTINED, RETRIED, Quarantined
from eventjet.examples.bank.app import bank
from eventjet.examples.transfer.accounts import Account, Noted, Opened
from eventjet.examples.transfer.app import transfers
from eventjet.examples.transfer.transfers import Transfer
from eventjet.jetstream.client import connected
from eventjet.operations import processes, quarantine
from eventjet.operations.processes import deadlines_waiting, open_processes
from eventjet.settings import Settings
from eventjet.subscriptions.cursor_store import Cursors, QuarantinedEntry
from tests.integration.reacting import eventually, working
from tests.ui.shelf import looking, settings_of

pytestmark = pytest.mark.slow

HOUR = timedelta(hours=1)


@process("noter")
class Noter:
    last: str = ""

    @listens()
    def hear(self, event: Recorded[Opened]) -> Noted:
        return Noted(transfer=event.aggregate_id)

    def step(self) -> Step[Noter, Noted] | None:
        return None

    def evolve(self, event: Noted) -> Noter:
        return Noter(last=event.transfer)


hearing = App("hearing", aggregates=[Account], processes=[Noter])


@pytest.fixture
def settings() -> Iterator[Settings]:
    """Settings of a server of the test's own: the app is an example's."""
    with NatsServer(sync_interval="1m") as server:
        yield settings_of(server, "sqlite:///none.db")


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.text.partition("<main")[2])).split())


@asynccontextmanager
async def transferred(settings: Settings, *ids: str, to: str = "bob") -> AsyncGenerator[httpx.AsyncClient]:
    """Make transfers of 5 from ada, each as far as it goes, and yield a client of a console."""
    async with transfers.connect(settings) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        for each in ("ada", "bob", "cold"):
            await accounts.execute(each, Account.open, each)
            await accounts.execute(each, Account.deposit, Decimal(100_000))
        await accounts.execute("cold", Account.freeze)
        until = datetime.now(UTC) + HOUR
        for each in ids:
            await jet.repository(Transfer).execute(
                each, Transfer.request, each[:40], "ada", to, Decimal(5), until=until
            )
    async with open_processes(transfers, settings, "transfer") as woken:
        await woken.wake(ids)
    async with looking(transfers, settings) as client:
        yield client


async def test_a_process_shows_its_commands_and_their_outcomes(settings: Settings) -> None:
    async with transferred(settings, "t-1") as client:
        text = text_of(await client.get("/processes/one?name=transfer&id=t-1"))
        assert (
            'It sent account ada: withdraw("5", transfer="t-1") . It recorded account.withdrawn of account ada' in text
        )
        assert (
            'It sent account bob: deposit("5", transfer="t-1") . It recorded account.deposited of account bob' in text
        )
        assert "Somebody asked for it" in text
        assert "Step none: it rests" in text
        assert "There are no events of it" in text_of(await client.get("/processes/one?name=transfer&id=t-2"))


async def test_a_waiting_process_shows_its_deadlines_and_fired_ones(settings: Settings) -> None:
    async with transferred(settings, "t-1", to="cold") as client:
        text = text_of(await client.get("/processes/one?name=transfer&id=t-1"))
        assert "Nothing was recorded there" in text
        assert text.count("then try_again") == 2  # now, and in its history
        assert "Deadlines set 1" in text_of(await client.get("/processes"))
        async with connected(settings) as nats:
            async with working(transfers, settings):

                async def fired() -> bool:
                    return "It came due" in text_of(await client.get("/processes/one?name=transfer&id=t-1"))

                await eventually(fired)
            assert len(await deadlines_waiting(nats, transfers, "transfer", limit=1)) <= 1


async def test_an_event_that_a_process_heard_is_shown_as_its_input(settings: Settings) -> None:
    async with hearing.connect(settings) as jet:
        await jet.init()
        await jet.repository(Account).execute("ada", Account.open, "Ada")
    async with working(hearing, settings), looking(hearing, settings) as client:

        async def heard() -> bool:
            return "It received account.opened of account ada , at position 1" in text_of(
                await client.get("/processes/one?name=noter&id=ada")
            )

        await eventually(heard)
        assert "It takes account.opened" in text_of(await client.get("/processes"))


async def test_a_quarantined_head_leads_to_the_quarantine(settings: Settings) -> None:
    async with transferred(settings, "t-1") as client:
        async with connected(settings) as nats:
            cursors = Cursors(nats, transfers.name)
            entry = await cursors.read("transfer")
            quarantined = Quarantined(
                9, "transfer", "t-1", "id", "transfer.requested", QUARANTINED, "<b>it broke</b>", "", None
            )
            await cursors.write(
                entry, entry.cursor, to_write=[QuarantinedEntry(quarantined, tries=1, log=entry.cursor.log)]
            )
        answer = await client.get("/processes/one?name=transfer&id=t-1")
        assert "/quarantine/one?name=transfer&amp;position=9" in answer.text
        assert "<b>it broke" not in answer.text


async def test_a_quarantine_of_which_only_a_part_is_looked_at_is_not_called_empty(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (quarantine, quarantine_screen):
        monkeypatch.setattr(module, "ENTRIES_MAX", 2)
    async with transferred(settings, "t-1") as client:
        assert "Nothing is quarantined." in text_of(await client.get("/quarantine?name=transfer"))
        async with connected(settings) as nats:
            cursors = Cursors(nats, transfers.name)
            entry = await cursors.read("transfer")
            for position, resolution in ((7, RETRIED), (8, RETRIED), (9, QUARANTINED)):
                quarantined = Quarantined(
                    position, "transfer", "t-1", "id", "transfer.requested", resolution, "it broke", "", None
                )
                stored = QuarantinedEntry(quarantined, tries=1, log=entry.cursor.log)
                await cursors.write(entry, entry.cursor, to_write=[stored])
        for address in ("/quarantine", "/quarantine?name=transfer", "/quarantine?name=transfer&text=broke"):
            text = text_of(await client.get(address))
            assert "Nothing" not in text
            assert "Of the first 2 events that were ever quarantined by transfer , none" in text
            assert "eventjet quarantine list transfer" in text


async def test_timers_are_counted_up_to_a_bound(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_TIMERS_MAX", 10)
    # However many of them are due already, there are more of one kind than are read.
    async with transferred(settings, *(f"t-{n}" for n in range(21)), to="cold") as client:
        text = text_of(await client.get("/processes"))
        assert "or more" in text
        assert 10 <= len(re.findall(r"\bt-\d+", text)) <= 20


async def test_processes_are_counted_by_stage_and_linked_to_their_instances(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ["t-1", "t-2", "<b>3</b>"]
    async with transferred(settings, *ids) as client:
        answer = await client.get("/processes")
        assert "transfer.completed 3" in text_of(answer)
        (stage,) = re.findall(r'href="(/processes/list[^"]*stage=[^"]*)"', answer.text)
        instances = await client.get(unescape(stage))
        assert all(each in text_of(instances) for each in ids)
        assert instances.text.count('data-label="waits for">worker<') == 3  # none has run
        older = text_of(await client.get("/processes/list?name=transfer&older=1d"))
        assert "None of those that were looked at is so" in older
        assert "3 instances of transfer, 3 open" in older
        monkeypatch.setattr(processes_screen, "_LOOKED_MAX", 2)
        part = await client.get("/processes/list?name=transfer&all=1")
        assert "Looked at 1 to 2 of 3 instances" in text_of(part)
        (following,) = re.findall(r'rel="next" href="([^"]*)"', part.text)
        assert "Looked at 3 to 3 of 3 instances" in text_of(await client.get(unescape(following)))
        for wrong, status in (("name=nothing", 404), ("name=transfer&older=soon", 400), ("name=transfer&stage=x", 400)):
            assert (await client.get(f"/processes/list?{wrong}")).status_code == status


async def test_hostile_ids_of_processes_do_nothing(settings: Settings) -> None:
    ids = ["<script>x</script>", "\u202eabc", "a.b*>", "日本語", "'; DROP TABLE x; --"]
    async with transferred(settings, *ids) as client:
        for each in ids:
            answer = await client.get(f"/processes/one?name=transfer&id={quote(each, safe='')}")
            assert "History" in text_of(answer)
            assert "<script>x" not in answer.text
            assert "\u202e" not in answer.text
        for bad in ("", "%00", "x" * 501, quote("x" * 400)):
            answer = await client.get(f"/processes/one?name=transfer&id={bad}")
            assert answer.status_code == 400


async def test_an_app_without_processes_says_so(settings: Settings) -> None:
    async with looking(bank, settings) as client:
        assert "This app has no processes" in text_of(await client.get("/processes"))
        assert (await client.get("/processes/one?name=transfer&id=t-1")).status_code == 404
