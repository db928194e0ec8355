"""Imported events keep their original time and metadata, while the log keeps its own order."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventjet import App, Imported, Jet, Metadata, aggregate, event, upcaster, with_metadata
from eventjet.codec.headers import RawRecord, is_imported, logged_at
from eventjet.dev.nats import NatsServer
from eventjet.errors import ConcurrencyConflict, Refused, UsageError
from eventjet.examples.bank.account import Account, Deposited, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.operations.events import event_view
from tests.logs import fresh_name

LONG_AGO = datetime(2001, 5, 1, tzinfo=UTC)
CLERK = Metadata(actor="clerk 3", correlation="o-9", causation="m-1", extra={"till": "4"})


@event("till.counted")
class Counted:
    amount: int


@event("till.counted", schema=2)
class CountedNow:
    amount: int
    by: str


@aggregate("till")
class Till:
    amount: int = 0

    def evolve(self, event: Counted) -> Till:
        return self


@aggregate("till")
class TillNow:
    amount: int = 0

    def evolve(self, event: CountedNow) -> TillNow:
        return self


counted_by_x = upcaster("till.counted", schema=1)(lambda fields: fields | {"by": "x"})


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


async def test_an_imported_event_keeps_its_time_and_metadata(jet: Jet) -> None:
    with with_metadata(Metadata(actor="importer", traceparent="00-x")):
        await jet.append_many(deposits(3), source="old")
    history = await jet.repository(Account).history("a")
    assert [event.recorded_at for event in history] == [day(0), day(1), day(2)]
    assert [event.metadata for event in history] == [CLERK] * 3, "not what is around the import"
    assert [event.command_id for event in history] == ["old/1", "old/2", "old/3"]
    assert [event async for event in jet.tail()] == history
    records = [record async for record in jet.store.records()]
    assert [jet.decode(record) for record in records] == history
    assert event_view(jet, records[1])["recorded_at"] == "2001-05-02T00:00:00Z"
    assert event_view(jet, records[1])["metadata"]["actor"] == "clerk 3"
    assert all(is_imported(record[3]) and logged_at(record) > LONG_AGO + timedelta(days=7_000) for record in records)


async def test_a_past_state_is_loaded_by_imported_times(jet: Jet) -> None:
    await jet.append_many(deposits(3), source="old")
    accounts = jet.repository(Account)
    await accounts.execute("a", Account.deposit, Decimal(10))
    for at, balance in ((day(-1), 0), (day(0), 1), (day(1) + timedelta(hours=1), 2), (day(90), 3)):
        assert (await accounts.load("a", at=at)).balance == Decimal(balance)
    assert (await accounts.load("a", at=datetime.now(UTC))).balance == Decimal(13)


async def test_the_log_is_read_since_a_time_in_its_own_order(jet: Jet) -> None:
    accounts = jet.repository(Account)
    before = await accounts.execute("live", Account.open, "ada")
    (live,) = [event async for event in jet.tail()]
    await jet.append_many(deposits(3), source="old")
    tail = [event async for event in jet.tail(since=live.recorded_at + timedelta(microseconds=1))]
    assert [event.position for event in tail] == [before.position + number for number in (1, 2, 3)]
    assert len([event async for event in jet.tail(since=day(1))]) == 4, "the log got all of them later than that"


async def test_an_interrupted_import_with_times_is_resumed(jet: Jet) -> None:
    await jet.append_many(deposits(5), source="old")
    report = await jet.append_many(deposits(9), source="old")
    assert (report.stored, report.skipped) == (4, 5)
    assert [event.recorded_at for event in await jet.repository(Account).history("a")] == [day(n) for n in range(9)]


@pytest.mark.parametrize("after", ["the import's own", "an earlier import's", "a command's"])
async def test_decreasing_times_within_an_aggregate_are_refused(jet: Jet, after: str) -> None:
    events = deposits(1)
    if after == "a command's":
        await jet.repository(Account).execute("a", Account.open, "ada")
    elif after == "an earlier import's":
        await jet.append_many(deposits(3), source="older")
    else:
        events = [*deposits(2), *deposits(1)]
    with pytest.raises(Refused, match=r"Event . of account 'a' in the import 'old'.*of 2001-05-01.*in the order"):
        await jet.append_many(events, source="old")
    await jet.append_many(deposits(1, "b"), source="old")  # earlier times are allowed in another aggregate


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (datetime(2001, 5, 1), "which has no time zone. Give a time with its zone"),  # noqa: DTZ001
        (datetime.now(UTC) + timedelta(days=30), r"which is in the future: this machine's clock says \d{4}-"),
        ("2001-05-01", "a str. Give a datetime with its zone"),
    ],
)
async def test_a_time_without_zone_or_in_the_future_is_refused(jet: Jet, at: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"Event 1 of account 'a' in the import is of .*{message}"):
        await jet.append_many([Imported(Account, "a", Opened(owner="x"), at)], source="old")
    assert (await jet.log()).last == 0


async def test_a_repeated_import_reports_how_its_events_differ_from_the_log(jet: Jet) -> None:
    first = [*deposits(3), *deposits(2, "b"), Imported(Account, "c", Opened(owner="ada"), day(0), CLERK)]
    assert (await jet.append_many(first, source="old")).different == 0
    same = await jet.append_many([*first, *deposits(1, "d")], source="old")
    assert (same.stored, same.skipped, same.different, same.differences) == (1, 6, 0, ())
    again = [
        replace(first[0], at=day(0) + timedelta(seconds=1)),
        replace(first[1], event=Deposited(amount=Decimal("777.25"))),
        replace(first[2], metadata=Metadata(actor="grace")),
        replace(first[3], event=Opened(owner="mallory")),
        first[4],
        replace(first[5], event=Opened(owner="mallory"), metadata=Metadata(actor="grace"), at=day(1)),
    ]
    report = await jet.append_many(again, source="old")
    assert (report.stored, report.skipped, report.different) == (0, 6, 5)
    assert report.differences == (
        "event 1 of account 'a' at position 1: its time",
        "event 2 of account 'a' at position 2: amount",
        "event 3 of account 'a' at position 3: its metadata",
        "event 1 of account 'b' at position 4: it is account.deposited, and the import has account.opened",
        "event 1 of account 'c' at position 6: owner, its time, its metadata",
    )
    assert not any(value in str(report) for value in ("777.25", "grace", "mallory"))
    assert [event.recorded_at for event in await jet.repository(Account).history("a")] == [day(n) for n in range(3)]


async def test_an_import_without_times_does_not_differ_in_its_times(jet: Jet) -> None:
    await jet.append_many([replace(imported, at=None) for imported in deposits(8)], source="old")
    assert (
        await jet.append_many([replace(imported, at=None) for imported in deposits(8)], source="old")
    ).different == 0
    report = await jet.append_many(deposits(8), source="old")
    assert (report.different, len(report.differences)) == (8, 5), "examples have a bound"
    assert all(difference.endswith(": its time") for difference in report.differences)


async def test_an_import_whose_events_are_upcast_since_does_not_differ(eventjet_nats: NatsServer) -> None:
    """The newer release has another schema with one more field, which its upcaster fills."""

    name = fresh_name()
    old = App(name, aggregates=[Till])
    newer = App(
        name, aggregates=[TillNow], upcasters=[upcaster("till.counted", schema=1)(lambda fields: fields | {"by": "x"})]
    )
    async with old.connect(servers=eventjet_nats.url) as jet:
        await jet.init()
        await jet.append_many([Imported(Till, "a", Counted(amount=n)) for n in range(3)], source="old")
    async with newer.connect(servers=eventjet_nats.url) as jet:
        same = [Imported(TillNow, "a", CountedNow(amount=n, by="x")) for n in range(3)]
        assert (await jet.append_many(same, source="old")).different == 0
        other = [Imported(TillNow, "a", CountedNow(amount=n, by="y")) for n in range(3)]
        assert (await jet.append_many(other, source="old")).differences[0].endswith("at position 1: by")


def openings(count: int, name: str = "c") -> list[Imported]:
    return [Imported(Account, f"{name}-{number}", Opened(owner="x"), day(0)) for number in range(count)]


class Reads:
    """Count how often a connection reads the history of an aggregate."""

    def __init__(self, jet: Jet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.histories = 0
        history = jet.store.history

        async def counted(*args: Any, **options: Any) -> list[RawRecord]:
            self.histories += 1
            return await history(*args, **options)

        monkeypatch.setattr(jet.store, "history", counted)


async def test_an_import_and_its_repetition_do_not_read_the_history_of_each_aggregate(
    jet: Jet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jet.repository(Account).execute("live", Account.open, "ada")
    events = [*openings(1_300), *deposits(40), *deposits(700, "b"), *openings(500, "d")]
    reads = Reads(jet, monkeypatch)
    assert (await jet.append_many(events, source="old")).stored == len(events)
    assert reads.histories == 0
    for _ in range(6):
        await jet.repository(Account).execute("live", Account.deposit, Decimal(1))
    assert (await jet.append_many(openings(900, "e"), source="old")).stored == 900
    report = await jet.append_many([*events, *openings(901, "e")], source="old")
    assert (report.stored, report.skipped, report.different) == (1, len(events) + 900, 0)
    assert reads.histories < 10


@pytest.mark.parametrize("order", ["backwards", "shuffled", "with others between"])
async def test_a_repeated_import_with_another_order_of_aggregates_is_skipped(jet: Jet, order: str) -> None:
    by_aggregate = [deposits(3 + number % 5, f"a-{number}") for number in range(500)]
    await jet.append_many([imported for events in by_aggregate for imported in events], source="old")
    await jet.append_many(openings(1_500), source="between")
    if order == "backwards":
        by_aggregate.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(by_aggregate)
    else:
        by_aggregate = [[*events, *openings(1, f"new-{index}")] for index, events in enumerate(by_aggregate)]
    reordered = [imported for events in by_aggregate for imported in events]
    report = await jet.append_many(reordered, source="old")
    new = 500 if order == "with others between" else 0
    assert (report.stored, report.skipped, report.different) == (new, len(reordered) - new, 0)
    again = await jet.append_many(
        [
            replace(imported, event=Deposited(amount=Decimal(2)))
            for imported in reordered
            if isinstance(imported.event, Deposited)
        ],
        source="old",
    )
    assert (again.stored, again.different) == (0, len(reordered) - new)


async def test_a_repeated_import_beside_commands_stores_no_event_twice(jet: Jet) -> None:
    accounts = jet.repository(Account)
    events = [replace(imported, at=None) for number in range(30) for imported in deposits(50, f"a-{number}")]
    await jet.append_many(events[:1_010], source="old")
    is_compared = asyncio.Event()

    async def source() -> AsyncIterator[Imported]:
        for number, imported in enumerate(events):
            if number == 1_005:  # the commands run after the comparison of the first batch
                is_compared.set()
                await asyncio.sleep(0)
            yield imported

    async def commands() -> None:
        await is_compared.wait()
        for number in range(30):
            await accounts.execute(f"a-{number}", Account.deposit, Decimal(100))

    report, _ = await asyncio.gather(jet.append_many(source(), source="old"), commands())
    assert (report.stored, report.skipped, report.different) == (490, 1_010, 0)
    for number in range(30):
        assert (await accounts.load(f"a-{number}")).balance == Decimal(150)
        assert [event.version for event in await accounts.history(f"a-{number}")] == list(range(1, 52))


async def test_whole_batches_before_an_invalid_event_are_stored(jet: Jet) -> None:
    with pytest.raises(UsageError, match="which is not one of its events"):
        await jet.append_many([*openings(2_500), Imported(Account, "a", Counted(amount=1))], source="old")
    assert (await jet.log()).last == 2_000


async def test_the_fault_of_the_earlier_event_is_raised(jet: Jet) -> None:
    events = [*openings(990), *deposits(2)[::-1], *openings(500, "d"), Imported(Account, "a", Counted(amount=1))]
    with pytest.raises(Refused, match="Event 2 of account 'a'"):
        await jet.append_many(events, source="old")


async def test_a_cancelled_import_leaves_whole_batches_and_is_resumed(jet: Jet) -> None:
    events, begun = openings(5_000), asyncio.Event()
    task = asyncio.create_task(jet.append_many(events, source="old", progress=lambda _: begun.set()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    report = await jet.append_many(events, source="old")
    assert (report.stored + report.skipped, report.different) == (5_000, 0)
    assert report.skipped >= 1_000
    assert (await jet.log()).last == 5_000


async def test_an_import_into_a_log_that_was_set_back_does_not_blame_another_writer(tmp_path: Path) -> None:
    bank = App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])
    with NatsServer(tmp_path / "server", sync_interval="1m") as server:
        async with bank.connect(servers=server.url) as jet:
            await jet.init()
        server.stop()
        shutil.copytree(tmp_path / "server" / "data", tmp_path / "backup")
        server.start()
        is_stored = asyncio.Event()
        async with bank.connect(servers=server.url) as jet:

            async def events() -> AsyncIterator[Imported]:
                for event in openings(1_000):
                    yield event
                await is_stored.wait()
                server.stop()
                shutil.rmtree(tmp_path / "server" / "data")
                shutil.copytree(tmp_path / "backup", tmp_path / "server" / "data")
                server.start()
                await jet.log()
                yield Imported(Account, "c-0", Deposited(amount=Decimal(1)))

            with pytest.raises(ConcurrencyConflict, match="the log has nothing of theirs"):
                await jet.append_many(events(), source="old", progress=lambda _: is_stored.set())
            report = await jet.append_many(openings(1_000), source="old")
            assert (report.stored, report.skipped) == (1_000, 0)
