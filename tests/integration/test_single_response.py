"""JetStream's API imported as an ordinary service delivers one answer of several: that is told in words, and soon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from eventjet import App
from eventjet.codec.subjects import timer_subject
from eventjet.dev.nats import NatsServer
from eventjet.errors import SingleResponse
from eventjet.examples.transfer.accounts import Account, Book
from eventjet.jetstream.api import reading_records
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import DurablePull, read_range
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from tests.integration.doctored import DEPOSITS, FAULT, UNREACHABLE, Deployment, app_of
from tests.integration.ledger_log import eventually
from tests.integration.reacting import working

pytestmark = pytest.mark.slow  # each waits for what does not come

APP = "shop"
BOUND_S = 60.0
SETTING = "Set `response_type: Stream` in the export"


def imported(folder: Path, kind: str, prefix: str) -> Iterator[Deployment]:
    """An app in an account that imports what the log's account has, the API with an export of that kind."""
    others = [f"{APP}.>", "$KV.>", timer_subject(APP, "*", "*")]
    names = {"$JS.API.>": f"{prefix}.>", "$KV.>": f"{prefix}.$KV.>"} if prefix else {}
    exports = [f'{{ service: "$JS.API.>"{kind} }}', *(f'{{ service: "{each}" }}' for each in others)]
    imports = [
        f'{{ service: {{ account: LOG, subject: "{each}" }}, to: "{names.get(each, each)}" }}'
        for each in ("$JS.API.>", *others)
    ]
    config = f"""jetstream {{ store_dir: "{folder}/data", sync_interval: always }}
accounts {{
  LOG {{ jetstream: enabled, users: [ {{ user: log, password: log }} ], exports: [ {", ".join(exports)} ] }}
  APP {{ users: [ {{ user: app, password: app }} ], imports: [ {", ".join(imports)} ] }}
}}"""
    with NatsServer(folder / "server", jetstream=False, config=config) as server:
        database = f"sqlite:///{folder}/models.db"
        settings = Settings((server.url,), database, "app", "app", jetstream_prefix=prefix or None)
        yield Deployment(settings, folder, app_of(APP))


def of_owner(sick: Deployment) -> Deployment:
    """The same log, in its own account."""
    return replace(sick, settings=replace(sick.settings, user="log", password="log", jetstream_prefix=None))


PREFIXES = pytest.mark.parametrize("prefix", ["", "hub.API"], ids=["plain", "prefix"])


@pytest.fixture
def cut(prefix: str, tmp_path: Path) -> Iterator[Deployment]:
    yield from imported(tmp_path, "", prefix)


@pytest.fixture
def whole(prefix: str, tmp_path: Path) -> Iterator[Deployment]:
    yield from imported(tmp_path, ", response_type: Stream", prefix)


@PREFIXES
async def test_all_of_an_app_works_over_an_import_that_delivers_each_answer(whole: Deployment) -> None:
    await whole.init()
    await whole.deposit_and_process(Decimal(5))
    async with whole.app.connect(whole.settings) as jet:  # a log of few events
        assert len([one async for one in jet.tail()]) == 1
    assert [one for one in await whole.findings() if one.level in (FAULT, UNREACHABLE)] == []


@PREFIXES
async def test_a_connection_to_a_log_with_events_is_refused(cut: Deployment) -> None:
    await of_owner(cut).init()
    await of_owner(cut).deposit(Decimal(5))
    with pytest.raises(SingleResponse, match=SETTING) as caught:
        async with cut.app.connect(cut.settings):
            pass
    assert caught.value.subject == Endpoint.of(cut.settings).routed(f"$JS.API.DIRECT.GET.{APP}")


@pytest.mark.parametrize("prefix", [""])
async def test_the_first_history_of_a_log_that_was_empty_is_refused(cut: Deployment) -> None:
    await of_owner(cut).init()
    async with cut.app.connect(cut.settings) as jet:
        await jet.repository(Account).execute("a-1", Account.deposit, Decimal(5))

        async def tail() -> None:
            [one async for one in jet.tail()]

        assert jet.client is not None
        pages = jet.client.run(reading_records(APP, f"{APP}.>"))
        await refused(tail(), pages)


@pytest.mark.parametrize("prefix", [""])
async def test_pulls_of_a_worker_are_refused_wherever_they_begin(cut: Deployment) -> None:
    await of_owner(cut).init()
    await of_owner(cut).deposit(*map(Decimal, (1, 2, 3)))

    def pull(position: int) -> None:
        with DurablePull(cut.endpoint, APP, f"deposits-{position}", position=position) as reading:
            for _ in reading:
                pass

    positions = (0, 2, 3)
    subjects = await refused(*(asyncio.to_thread(pull, position) for position in positions))
    assert subjects == [f"$JS.API.CONSUMER.MSG.NEXT.{APP}.deposits-{position}" for position in positions]


@pytest.mark.parametrize("prefix", [""])
async def test_reads_of_rebuilds_and_pages_of_programs_that_wait_are_refused(cut: Deployment) -> None:
    await of_owner(cut).init()
    last = await of_owner(cut).deposit(*map(Decimal, (1, 2, 3)))

    def read() -> None:
        for _ in read_range(cut.endpoint, APP, 1, last + 1):
            pass

    def look() -> None:
        with NatsConnection.open(cut.endpoint) as link:
            link.run(reading_records(APP, f"{APP}.>"))

    await refused(asyncio.to_thread(read), asyncio.to_thread(look))


async def refused(*works: Awaitable[object]) -> list[str]:
    """The subjects of the requests for which each of these, at once, is refused."""
    reasons = await asyncio.wait_for(asyncio.gather(*works, return_exceptions=True), BOUND_S)
    assert all(isinstance(reason, SingleResponse) and SETTING in str(reason) for reason in reasons), reasons
    return [reason.subject for reason in reasons if isinstance(reason, SingleResponse)]


@pytest.mark.parametrize("prefix", [""])
async def test_a_worker_tells_why_it_gets_nothing(cut: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    await of_owner(cut).init()

    async def is_told() -> bool:
        lines = [one.getMessage() for one in caplog.records]
        return any("deposits" in line and SETTING in line for line in lines)

    alone = App(APP, aggregates=[Account, Book], projections=[DEPOSITS])
    async with working(alone, cut.settings):
        await of_owner(cut).deposit(*map(Decimal, (1, 2, 3)))
        await eventually(is_told, "the worker to tell of the import")


@pytest.mark.parametrize("prefix", [""])
async def test_doctor_tells_of_the_import(cut: Deployment) -> None:
    await of_owner(cut).init()
    await of_owner(cut).deposit(*map(Decimal, (1, 2, 3)))
    told = [one for one in await cut.findings() if "response_type: Stream" in f"{one.what} {one.fix}"]
    assert told
    assert all(one.level is FAULT for one in told)
