"""Concurrent runs of an import, in simulated turns: every event is in the log once, and in order."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from eventjet import App, Imported, Metadata
from eventjet.codec.headers import COMMAND, header
from eventjet.codec.subjects import entity_of
from eventjet.commands import importing
from eventjet.commands.importing import Importer, ImportReport
from eventjet.commands.repository import Repositories
from eventjet.errors import Refused, StoreUnavailable, UnexpectedExit
from eventjet.examples.bank.account import Account, Deposited, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.log.memory import MemoryStore

APP = App("bank", aggregates=[Account], upcasters=[withdrawn_has_a_reason])
BATCH = 12
PATIENT_S = 120.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BATCH_MAX", BATCH), ("_TURN_BYTES", 3_000), ("_READ_MIN", 5), ("_NOTED_MAX", 48)):
        monkeypatch.setattr(importing, name, value)


class Simulation:
    """A log in memory whose requests take a random number of turns, and the runs on it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store = MemoryStore("bank")
        self.reports: list[ImportReport] = []
        for name in ("append", "newest_of", "history", "records_from", "confirm"):
            setattr(self.store, name, self._slow(getattr(self.store, name)))

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    def _slow(self, request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def slow(*args: Any, **options: Any) -> Any:
            await self.turns(self.chance.randrange(4))
            answer = await request(*args, **options)
            await self.turns(self.chance.randrange(4))
            return answer

        return slow

    async def run(self, events: list[Imported], delay: int = 0) -> None:
        await self.turns(delay)
        self.reports.append(await Importer(Repositories(APP, self.store), "old").run(events, None))

    async def commands(self, accounts: int) -> None:
        repository = Repositories(APP, self.store).of(Account)
        for _ in range(self.chance.randrange(10)):
            await self.turns(self.chance.randrange(30))
            await repository.execute(f"a-{self.chance.randrange(accounts)}", Account.deposit, Decimal(5))

    async def check(self, events: list[Imported]) -> None:
        ordinals: dict[Any, list[int]] = defaultdict(list)
        async for record in self.store.records():
            command = header(record[3], COMMAND) or ""
            if command.startswith("old/"):
                ordinals[entity_of(record[2])].append(int(command[4:]))
        assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in ordinals.values())
        assert sum(map(len, ordinals.values())) == len(events)
        for report in self.reports:
            assert (report.stored + report.skipped, report.different) == (len(events), 0), report.differences


BEGUN = [(seed, True) for seed in (*range(20), 189, 202, 256)]
FROM_THE_START = [(seed, False) for seed in range(15)]


@pytest.mark.parametrize(("seed", "is_begun"), BEGUN + FROM_THE_START)
async def test_concurrent_runs_store_every_event_once_and_in_order(seed: int, is_begun: bool) -> None:
    simulation = Simulation(seed)
    chance = simulation.chance
    accounts, total = chance.choice([3, 10, 40]), chance.choice([30, 90, 150])
    events = [Imported(Account, f"a-{number}", Opened(owner="x")) for number in range(accounts)]
    events += [
        Imported(Account, f"a-{chance.randrange(accounts)}", Deposited(amount=Decimal(number)))
        for number in range(total)
    ]
    async with asyncio.timeout(PATIENT_S):
        if is_begun:
            await simulation.run(events[: chance.choice([accounts, total // 3, total // 2])])
            simulation.reports.clear()
        runs = [simulation.run(events, chance.randrange(60)) for _ in range(chance.choice([2, 2, 3]))]
        await asyncio.gather(*runs, simulation.commands(accounts))
    await simulation.check(events)


async def test_a_refused_batch_ends_an_import_whose_source_waits() -> None:
    """The source yields its next event after `progress` has reported the last batch as stored."""
    stored, waiting, store = asyncio.Event(), asyncio.Event(), MemoryStore("bank")
    newest_of = store.newest_of

    async def late(keys: Any) -> Any:
        await waiting.wait()
        return await newest_of(keys)

    async def source() -> AsyncIterator[Imported]:
        for number in range(BATCH):
            yield Imported(Account, "a", Deposited(amount=Decimal(1)), datetime(2020, 1, 30 - number, tzinfo=UTC))
        waiting.set()
        await stored.wait()

    store.newest_of = late  # type: ignore[method-assign]
    async with asyncio.timeout(PATIENT_S):
        with pytest.raises(Refused, match="Event 2 of account 'a'"):
            await Importer(Repositories(APP, store), "old").run(source(), lambda _: stored.set())


@pytest.mark.parametrize("goes_on", [BATCH // 2, 3 * BATCH])
async def test_a_source_that_swallows_its_cancellation_does_not_block_the_import(goes_on: int) -> None:
    """`asyncio.wait_for` of Python 3.11 does so if its awaitable ends at the same moment."""
    store = MemoryStore("bank")
    newest_of, waiting = store.newest_of, asyncio.Event()

    async def late(keys: Any) -> Any:
        await waiting.wait()
        return await newest_of(keys)

    async def source() -> AsyncIterator[Imported]:
        for number in range(BATCH):
            yield Imported(Account, "a", Deposited(amount=Decimal(1)), datetime(2020, 1, 30 - number, tzinfo=UTC))
        waiting.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        for _ in range(goes_on):
            yield Imported(Account, "b", Deposited(amount=Decimal(1)))

    store.newest_of = late  # type: ignore[method-assign]
    async with asyncio.timeout(PATIENT_S):
        with pytest.raises(Refused, match="Event 2 of account 'a'"):
            await Importer(Repositories(APP, store), "old").run(source(), None)
    assert [record async for record in store.records()] == []


async def test_a_source_that_is_cancelled_itself_ends_the_import() -> None:
    async def source() -> AsyncIterator[Imported]:
        yield Imported(Account, "a", Opened(owner="x"))
        raise asyncio.CancelledError

    async with asyncio.timeout(PATIENT_S):
        with pytest.raises(UnexpectedExit, match="raised CancelledError"):
            await Importer(Repositories(APP, MemoryStore("bank")), "old").run(source(), None)


async def test_a_resumed_import_keeps_no_bodies() -> None:
    events = [Imported(Account, f"a-{number}", Opened(owner="x" * 2_000)) for number in range(200)]
    simulation = Simulation(1)
    await simulation.run(events)
    importer = Importer(Repositories(APP, simulation.store), "old")
    await importer.run(events, None)
    records = [place._record for place in importer._places.values()]
    assert sum(len(record[4]) for record in records if record is not None) == 0


def several_of_each(count: int) -> list[Imported]:
    openings = [Imported(Account, f"a-{number}", Opened(owner="x")) for number in range(5)]
    return openings + [
        Imported(Account, f"a-{number % 5}", Deposited(amount=Decimal(number))) for number in range(count - 5)
    ]


@pytest.mark.parametrize("failing", [2, 3, 5])
async def test_a_failed_read_ahead_ends_the_import_and_the_next_run_completes_it(failing: int) -> None:
    events = several_of_each(10 * BATCH)
    store, reads = MemoryStore("bank"), 0
    await Importer(Repositories(APP, store), "old").run(events, None)
    records_from = store.records_from

    async def breaks(start: int, limit: int) -> Any:
        nonlocal reads
        reads += 1
        if reads == failing:
            raise StoreUnavailable("The log 'bank'", "it did not answer")
        return await records_from(start, limit)

    store.records_from = breaks  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await Importer(Repositories(APP, store), "old").run(events, None)
    assert reads == failing
    report = await Importer(Repositories(APP, store), "old").run(events, None)
    assert (report.stored, report.skipped, report.different) == (0, len(events), 0)


async def test_an_import_that_ends_early_leaves_no_read_behind() -> None:
    simulation = Simulation(3)
    events = several_of_each(10 * BATCH)
    await simulation.run(events)

    def source() -> Any:
        yield from events[: 4 * BATCH]
        raise ValueError("the old system is away")

    before = asyncio.all_tasks()
    with pytest.raises(ValueError, match="the old system is away"):
        await Importer(Repositories(APP, simulation.store), "old").run(source(), None)
    assert asyncio.all_tasks() == before


async def test_large_events_are_encoded_while_the_previous_batch_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch that is full after a few large events leaves turns to the batch that is being stored."""
    monkeypatch.setattr(importing, "_BYTES_MAX", 20_000)
    store, source_count, begun_at = MemoryStore("bank"), 0, []
    append, confirm = store.append, store.confirm

    async def slow() -> bool:
        await asyncio.sleep(0)
        return await confirm()

    async def recording_append(writes: Any) -> int:
        begun_at.append(source_count)
        return await append(writes)

    store.append, store.confirm = recording_append, slow  # type: ignore[method-assign]

    def source() -> Any:
        nonlocal source_count
        for number in range(30):
            source_count += 1
            yield Imported(Account, f"a-{number}", Opened(owner="x" * 4_000), metadata=Metadata(actor="clerk"))

    report = await Importer(Repositories(APP, store), "old").run(source(), None)
    assert report.stored == 30
    first, last = begun_at[0], len(begun_at)
    assert first < 2 * (30 // last), "the first batch was sent before the second was encoded"
