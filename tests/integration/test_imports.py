"""Imported events keep the time at which they were recorded first, and who did it; the log keeps its own order."""

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


counted_by_x = upcaster("till.counted", schema=1)(lambda one: one | {"by": "x"})


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
    assert event_view(jet, records[1])["recorded_at"] == "2001-05-02T00:00:00Z"
    assert event_view(jet, records[1])["metadata"]["actor"] == "clerk 3"
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


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (datetime(2001, 5, 1), "which has no time zone. Give a time with its zone"),  # noqa: DTZ001
        (datetime.now(UTC) + timedelta(days=30), r"which is in the future: this machine's clock says \d{4}-"),
        ("2001-05-01", "a str. Give a datetime with its zone"),
    ],
)
async def test_a_time_that_is_none_of_the_past_is_refused(jet: Jet, at: Any, says: str) -> None:
    with pytest.raises(UsageError, match=rf"Event 1 of account 'a' in the import is of .*{says}"):
        await jet.append_many([Imported(Account, "a", Opened(owner="x"), at)], source="old")
    assert (await jet.log()).last == 0


async def test_a_repeated_import_says_what_the_log_has_otherwise(jet: Jet) -> None:
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
    assert [one.recorded_at for one in await jet.repository(Account).history("a")] == [day(n) for n in range(3)]


async def test_an_import_that_tells_no_times_differs_in_none(jet: Jet) -> None:
    await jet.append_many([replace(one, at=None) for one in deposits(8)], source="old")
    assert (await jet.append_many([replace(one, at=None) for one in deposits(8)], source="old")).different == 0
    report = await jet.append_many(deposits(8), source="old")
    assert (report.different, len(report.differences)) == (8, 5), "examples have a bound"
    assert all(told.endswith(": its time") for told in report.differences)


async def test_an_import_that_was_upcast_since_does_not_differ(eventjet_nats: NatsServer) -> None:
    """The newer release has another schema and another field, with what its upcaster makes of the older one."""

    name = fresh_name()
    old = App(name, aggregates=[Till])
    newer = App(
        name, aggregates=[TillNow], upcasters=[upcaster("till.counted", schema=1)(lambda one: one | {"by": "x"})]
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
    """Counts how often a connection reads the history of one aggregate."""

    def __init__(self, jet: Jet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.histories = 0
        history = jet.store.history

        async def counted(*args: Any, **options: Any) -> list[RawRecord]:
            self.histories += 1
            return await history(*args, **options)

        monkeypatch.setattr(jet.store, "history", counted)


async def test_an_import_and_its_repetition_read_no_history_of_each_aggregate(
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


@pytest.mark.parametrize("given", ["backwards", "shuffled", "with others between"])
async def test_an_import_in_another_order_of_its_aggregates_is_known_again(jet: Jet, given: str) -> None:
    by_aggregate = [deposits(3 + number % 5, f"a-{number}") for number in range(500)]
    await jet.append_many([one for events in by_aggregate for one in events], source="old")
    await jet.append_many(openings(1_500), source="between")
    if given == "backwards":
        by_aggregate.reverse()
    elif given == "shuffled":
        random.Random(1).shuffle(by_aggregate)
    else:
        by_aggregate = [[*events, *openings(1, f"new-{index}")] for index, events in enumerate(by_aggregate)]
    given_events = [one for events in by_aggregate for one in events]
    report = await jet.append_many(given_events, source="old")
    new = 500 if given == "with others between" else 0
    assert (report.stored, report.skipped, report.different) == (new, len(given_events) - new, 0)
    again = await jet.append_many(
        [replace(one, event=Deposited(amount=Decimal(2))) for one in given_events if isinstance(one.event, Deposited)],
        source="old",
    )
    assert (again.stored, again.different) == (0, len(given_events) - new)


async def test_a_repetition_beside_commands_on_the_same_aggregates_stores_nothing_twice(jet: Jet) -> None:
    accounts = jet.repository(Account)
    events = [replace(one, at=None) for number in range(30) for one in deposits(50, f"a-{number}")]
    await jet.append_many(events[:1_010], source="old")
    given = asyncio.Event()

    async def source() -> AsyncIterator[Imported]:
        for number, one in enumerate(events):
            if number == 1_005:  # the first batch is compared, the commands come in between
                given.set()
                await asyncio.sleep(0)
            yield one

    async def commands() -> None:
        await given.wait()
        for number in range(30):
            await accounts.execute(f"a-{number}", Account.deposit, Decimal(100))

    report, _ = await asyncio.gather(jet.append_many(source(), source="old"), commands())
    assert (report.stored, report.skipped, report.different) == (490, 1_010, 0)
    for number in range(30):
        assert (await accounts.load(f"a-{number}")).balance == Decimal(150)
        assert [one.version for one in await accounts.history(f"a-{number}")] == list(range(1, 52))


async def test_events_before_one_that_cannot_be_imported_are_stored_in_whole_batches(jet: Jet) -> None:
    with pytest.raises(UsageError, match="which is not one of its events"):
        await jet.append_many([*openings(2_500), Imported(Account, "a", Counted(amount=1))], source="old")
    assert (await jet.log()).last == 2_000


async def test_of_two_faults_the_one_of_the_earlier_event_is_raised(jet: Jet) -> None:
    events = [*openings(990), *deposits(2)[::-1], *openings(500, "d"), Imported(Account, "a", Counted(amount=1))]
    with pytest.raises(Refused, match="Event 2 of account 'a'"):
        await jet.append_many(events, source="old")


async def test_a_cancelled_import_leaves_batches_and_goes_on_later(jet: Jet) -> None:
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


async def test_an_import_into_a_log_that_was_set_back_blames_no_other_writer(tmp_path: Path) -> None:
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
