"""JetStream's API imported as a service of single responses delivers one answer of several, and is refused soon."""

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

pytestmark = pytest.mark.slow  # every test waits for an answer that does not come

APP = "shop"
BOUND_S = 60.0
SETTING = "Set `response_type: Stream` in the export"


def imported(folder: Path, kind: str, prefix: str) -> Iterator[Deployment]:
    """Yield an app in an account that imports the log's subjects, the API with an export of this kind."""
    others = [f"{APP}.>", "$KV.>", timer_subject(APP, "*", "*")]
    names = {"$JS.API.>": f"{prefix}.>", "$KV.>": f"{prefix}.$KV.>"} if prefix else {}
    exports = [f'{{ service: "$JS.API.>"{kind} }}', *(f'{{ service: "{subject}" }}' for subject in others)]
    imports = [
        f'{{ service: {{ account: LOG, subject: "{subject}" }}, to: "{names.get(subject, subject)}" }}'
        for subject in ("$JS.API.>", *others)
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
    """Return the same log in its own account."""
    return replace(sick, settings=replace(sick.settings, user="log", password="log", jetstream_prefix=None))


PREFIXES = pytest.mark.parametrize("prefix", ["", "hub.API"], ids=["plain", "prefix"])


@pytest.fixture
def single_import(prefix: str, tmp_path: Path) -> Iterator[Deployment]:
    yield from imported(tmp_path, "", prefix)


@pytest.fixture
def stream_import(prefix: str, tmp_path: Path) -> Iterator[Deployment]:
    yield from imported(tmp_path, ", response_type: Stream", prefix)


@PREFIXES
async def test_an_app_works_over_an_import_that_delivers_every_answer(stream_import: Deployment) -> None:
    await stream_import.init()
    await stream_import.deposit_and_process(Decimal(5))
    async with stream_import.app.connect(stream_import.settings) as jet:  # a log of few events
        assert len([event async for event in jet.tail()]) == 1
    assert [finding for finding in await stream_import.findings() if finding.level in (FAULT, UNREACHABLE)] == []


@PREFIXES
async def test_a_connection_to_a_log_with_events_is_refused(single_import: Deployment) -> None:
    await of_owner(single_import).init()
    await of_owner(single_import).deposit(Decimal(5))
    with pytest.raises(SingleResponse, match=SETTING) as caught:
        async with single_import.app.connect(single_import.settings):
            pass
    assert caught.value.subject == Endpoint.of(single_import.settings).routed(f"$JS.API.DIRECT.GET.{APP}")


@pytest.mark.parametrize("prefix", [""])
async def test_the_first_history_of_an_empty_log_is_refused(single_import: Deployment) -> None:
    await of_owner(single_import).init()
    async with single_import.app.connect(single_import.settings) as jet:
        await jet.repository(Account).execute("a-1", Account.deposit, Decimal(5))

        async def tail() -> None:
            [event async for event in jet.tail()]

        assert jet.client is not None
        pages = jet.client.run(reading_records(APP, f"{APP}.>"))
        await refused_subjects(tail(), pages)


@pytest.mark.parametrize("prefix", [""])
async def test_pulls_of_a_worker_are_refused_wherever_they_begin(single_import: Deployment) -> None:
    await of_owner(single_import).init()
    await of_owner(single_import).deposit(*map(Decimal, (1, 2, 3)))

    def pull(position: int) -> None:
        with DurablePull(single_import.endpoint, APP, f"deposits-{position}", position=position) as reading:
            for _ in reading:
                pass

    positions = (0, 2, 3)
    subjects = await refused_subjects(*(asyncio.to_thread(pull, position) for position in positions))
    assert subjects == [f"$JS.API.CONSUMER.MSG.NEXT.{APP}.deposits-{position}" for position in positions]


@pytest.mark.parametrize("prefix", [""])
async def test_reads_of_rebuilds_and_pages_over_links_are_refused(single_import: Deployment) -> None:
    await of_owner(single_import).init()
    last = await of_owner(single_import).deposit(*map(Decimal, (1, 2, 3)))

    def read() -> None:
        for _ in read_range(single_import.endpoint, APP, 1, last + 1):
            pass

    def page() -> None:
        with NatsConnection.open(single_import.endpoint) as link:
            link.run(reading_records(APP, f"{APP}.>"))

    await refused_subjects(asyncio.to_thread(read), asyncio.to_thread(page))


async def refused_subjects(*operations: Awaitable[object]) -> list[str]:
    """Return the subjects of the refused requests of these concurrent operations."""
    reasons = await asyncio.wait_for(asyncio.gather(*operations, return_exceptions=True), BOUND_S)
    assert all(isinstance(reason, SingleResponse) and SETTING in str(reason) for reason in reasons), reasons
    return [reason.subject for reason in reasons if isinstance(reason, SingleResponse)]


@pytest.mark.parametrize("prefix", [""])
async def test_a_worker_logs_why_it_gets_no_events(single_import: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    await of_owner(single_import).init()

    async def is_logged() -> bool:
        lines = [record.getMessage() for record in caplog.records]
        return any("deposits" in line and SETTING in line for line in lines)

    single = App(APP, aggregates=[Account, Book], projections=[DEPOSITS])
    async with working(single, single_import.settings):
        await of_owner(single_import).deposit(*map(Decimal, (1, 2, 3)))
        await eventually(is_logged, "the worker to tell of the import")


@pytest.mark.parametrize("prefix", [""])
async def test_doctor_reports_the_import(single_import: Deployment) -> None:
    await of_owner(single_import).init()
    await of_owner(single_import).deposit(*map(Decimal, (1, 2, 3)))
    findings = [
        finding
        for finding in await single_import.findings()
        if "response_type: Stream" in f"{finding.what} {finding.fix}"
    ]
    assert findings
    assert all(finding.level is FAULT for finding in findings)
