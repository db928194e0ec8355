"""Imported events keep the time at which they were recorded first, and who did it; the log keeps its own order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from eventjet import App, Imported, Jet, Metadata, with_metadata
from eventjet.codec.imported import is_imported, logged_at
from eventjet.dev.nats import NatsServer
from eventjet.errors import Refused, UsageError
from eventjet.examples.bank.account import Account, Deposited, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.operations.events import shown
from tests.logs import fresh_name

LONG_AGO = datetime(2001, 5, 1, tzinfo=UTC)
CLERK = Metadata(actor="clerk 3", correlation="o-9", causation="m-1", extra={"till": "4"})


@pytest.fixture(params=["memory", "jetstream"])
async def jet(request: pytest.FixtureRequest) -> AsyncIterator[Jet]:
    app = App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])
    if request.param == "memory":
        async with app.in_memory() as jet:
            yield jet
        return
    server: NatsServer = request.getfixturevalue("eventjet_nats")
    async with app.connect(servers=server.url) as jet:
        await jet.init()
        yield jet


def day(number: int) -> datetime:
    return LONG_AGO + timedelta(days=number)


def deposits(count: int, name: str = "a") -> list[Imported]:
    return [Imported(Account, name, Deposited(amount=Decimal(1)), day(number), CLERK) for number in range(count)]


async def test_an_imported_event_tells_when_and_by_whom_it_was_recorded_first(jet: Jet) -> None:
    with with_metadata(Metadata(actor="importer", traceparent="00-x")):
        await jet.append_many(deposits(3), source="old")
    history = await jet.repository(Account).history("a")
    assert [one.recorded_at for one in history] == [day(0), day(1), day(2)]
    assert [one.metadata for one in history] == [CLERK] * 3, "not what is around the import"
    assert [one.command_id for one in history] == ["old/1", "old/2", "old/3"]
    assert [one async for one in jet.tail()] == history
    records = [record async for record in jet.store.records()]
    assert [jet.decode(record) for record in records] == history
    assert shown(jet, records[1])["recorded_at"] == "2001-05-02T00:00:00Z"
    assert shown(jet, records[1])["metadata"]["actor"] == "clerk 3"
    assert all(is_imported(record[3]) and logged_at(record) > LONG_AGO + timedelta(days=7_000) for record in records)


async def test_a_state_is_loaded_as_it_was_then(jet: Jet) -> None:
    await jet.append_many(deposits(3), source="old")
    accounts = jet.repository(Account)
    await accounts.execute("a", Account.deposit, Decimal(10))
    for at, balance in ((day(-1), 0), (day(0), 1), (day(1) + timedelta(hours=1), 2), (day(90), 3)):
        assert (await accounts.load("a", at=at)).balance == Decimal(balance)
    assert (await accounts.load("a", at=datetime.now(UTC))).balance == Decimal(13)


async def test_the_log_is_read_since_a_time_in_its_own_order(jet: Jet) -> None:
    accounts = jet.repository(Account)
    before = await accounts.execute("live", Account.open, "ada")
    (live,) = [one async for one in jet.tail()]
    await jet.append_many(deposits(3), source="old")
    told = [one async for one in jet.tail(since=live.recorded_at + timedelta(microseconds=1))]
    assert [one.position for one in told] == [before.position + number for number in (1, 2, 3)]
    assert len([one async for one in jet.tail(since=day(1))]) == 4, "the log got all of them later than that"


async def test_an_import_with_times_is_resumed(jet: Jet) -> None:
    await jet.append_many(deposits(5), source="old")
    report = await jet.append_many(deposits(9), source="old")
    assert (report.stored, report.skipped) == (4, 5)
    assert [one.recorded_at for one in await jet.repository(Account).history("a")] == [day(n) for n in range(9)]


@pytest.mark.parametrize("after", ["the import's own", "an earlier import's", "a command's"])
async def test_times_that_go_back_within_an_aggregate_are_refused(jet: Jet, after: str) -> None:
    events = deposits(1)
    if after == "a command's":
        await jet.repository(Account).execute("a", Account.open, "ada")
    elif after == "an earlier import's":
        await jet.append_many(deposits(3), source="older")
    else:
        events = [*deposits(2), *deposits(1)]
    with pytest.raises(Refused, match=r"Event . of account 'a' in the import 'old'.*of 2001-05-01.*in the order"):
        await jet.append_many(events, source="old")
    await jet.append_many(deposits(1, "b"), source="old")  # of another aggregate they may


@pytest.mark.parametrize("at", [datetime(2001, 5, 1), datetime.now(UTC) + timedelta(days=30)])  # noqa: DTZ001
async def test_a_time_that_is_none_of_the_past_is_refused(jet: Jet, at: datetime) -> None:
    with pytest.raises(UsageError, match=r"Event 1 of account 'a' in the import is of .* a past time with its zone"):
        await jet.append_many([Imported(Account, "a", Opened(owner="x"), at)], source="old")
    assert (await jet.log()).last == 0
