"""Steps, reactions and deadlines beside the bare pieces they are made of: `python -m benchmarks.reactions`.

A transfer as a process is a request and two steps, each an atomic append of two events; the floor is the same three
saves by hand: an `execute` and two `transact`. The accounts were opened over another connection, so that neither has
them in its cache; the worker is a process of its own, and an ordered consumer sees the end of a transfer. Reaction lag
is from a command's answer to the handler's call, at a steady rate. Deadlines fall due within six seconds, with and
without many others pending.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from multiprocessing.synchronize import Event

import nats
from nats.aio.msg import Msg
from nats.js.api import DeliverPolicy

from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.usage import resident_mb
from eventjet import App, Jet, Reaction, Recorded, reactor
from eventjet.codec.headers import TYPE
from eventjet.codec.subjects import timer_stream, type_subjects
from eventjet.dev.nats import NatsServer
from eventjet.examples.transfer.accounts import Account, Book
from eventjet.examples.transfer.transfers import Debited, Requested, Stage, Transfer
from eventjet.jetstream.api import stream_info
from eventjet.log.timers import JetStreamTimers
from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.supervisor import run_workers

OURS, FLOOR = "a process", "the same saves by hand"
FAR = datetime(2200, 1, 1, tzinfo=UTC)


class Clock:
    """When the handler was called, by event id."""

    def __init__(self) -> None:
        self.called: dict[str, float] = {}


CLOCK = Clock()


@reactor("watch")
async def watch(event: Recorded[Requested], to: Reaction[Clock]) -> None:
    to.deps.called.setdefault(event.aggregate_id, time.perf_counter())


@asynccontextmanager
async def clock() -> AsyncGenerator[Clock]:
    yield CLOCK


acting = App("acting", aggregates=[Account, Book], processes=[Transfer], reactors=[watch], deps=clock)


async def work(settings: Settings, name: str, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    await run_workers(acting, settings, [name], stop=stop, on_ready=on_ready, options=WorkerOptions(poll_s=0.05))


@asynccontextmanager
async def worker_here(settings: Settings, name: str) -> AsyncGenerator[None]:
    """Run a worker of this subscription on this event loop for the length of a block."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.ensure_future(work(settings, name, stop, ready.set))
    await ready.wait()
    try:
        yield
    finally:
        stop.set()
        await task


@asynccontextmanager
async def worker_process(settings: Settings, name: str) -> AsyncGenerator[None]:
    """Run a worker of this subscription in a process of its own for the length of a block, as workers usually run."""
    spawn = multiprocessing.get_context("spawn")
    ready, end = spawn.Event(), spawn.Event()
    process = spawn.Process(target=work_in_process, args=(settings.servers[0], name, ready, end))
    process.start()
    try:
        assert await asyncio.to_thread(ready.wait, 60)
        yield
    finally:
        end.set()
        await asyncio.to_thread(process.join)


def work_in_process(server: str, name: str, ready: Event, end: Event) -> None:
    async def work_until_end() -> None:
        stop = asyncio.Event()
        task = asyncio.ensure_future(work(Settings(servers=(server,)), name, stop, ready.set))
        await asyncio.to_thread(end.wait)
        stop.set()
        await task

    asyncio.run(work_until_end())


async def transferred(jet: Jet, settings: Settings, count: int, at_once: int, figures: Figures) -> None:
    """Measure transfers by a process, `at_once` at a time, each from an account of its own."""
    transfers = jet.repository(Transfer)
    names = await opened(settings, "x", count + 1)
    ended = {name: asyncio.Event() for name in names}
    room = asyncio.Semaphore(at_once)

    async def note_end(message: Msg) -> None:
        if (message.headers or {})[TYPE] == "transfer.completed":
            ended[message.subject.rpartition(".")[2]].set()

    async def transfer(name: str) -> None:
        async with room:
            await transfers.execute(name, Transfer.request, name, f"s{name}", f"t{name}", Decimal(1), until=FAR)
            await ended[name].wait()

    async with worker_process(settings, "transfer"):
        reader = await nats.connect(settings.servers[0])
        subjects = type_subjects(acting.name, "transfer")
        await reader.jetstream().subscribe(
            subjects, cb=note_end, ordered_consumer=True, deliver_policy=DeliverPolicy.NEW
        )
        await transfer(names[0])  # until the worker has the lease
        started = time.perf_counter()
        await asyncio.gather(*map(transfer, names[1:]))
        figures.add(OURS, 2 * count / (time.perf_counter() - started))
        await reader.close()


async def by_hand(jet: Jet, settings: Settings, count: int, at_once: int, figures: Figures) -> None:
    """Measure the same saves, without anybody who reads what to do next."""
    accounts, transfers = jet.repository(Account), jet.repository(Transfer)
    names = await opened(settings, "y", count + 1)
    room = asyncio.Semaphore(at_once)

    async def transfer(name: str) -> None:
        async with room:
            await transfers.execute(name, Transfer.request, name, f"s{name}", f"t{name}", Decimal(1), until=FAR)
            await jet.transact(
                accounts.decide(f"s{name}", Account.withdraw, Decimal(1), transfer=name),
                transfers.decide(name, Transfer.debited),
            )
            await jet.transact(
                accounts.decide(f"t{name}", Account.deposit, Decimal(1), transfer=name),
                transfers.decide(name, Transfer.completed),
            )

    await transfer(names[0])
    started = time.perf_counter()
    await asyncio.gather(*map(transfer, names[1:]))
    figures.add(FLOOR, 2 * count / (time.perf_counter() - started))


async def opened(settings: Settings, prefix: str, count: int) -> list[str]:
    """Open the source accounts of `count` transfers over a connection of its own; return the transfers' ids."""
    names = [f"{prefix}{time.time_ns()}-{number}" for number in range(count)]
    async with acting.connect(settings) as jet:
        for name in names:
            await jet.repository(Account).execute(f"s{name}", Account.deposit, Decimal(1))
    return names


async def lag(jet: Jet, settings: Settings, count: int, per_s: int, p50: Figures, p99: Figures) -> None:
    """From the answer of a command to the call of the handler."""
    transfers = jet.repository(Transfer)
    answered: dict[str, float] = {}
    async with worker_here(settings, "watch"):
        began = time.perf_counter()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / per_s - time.perf_counter()))
            name = f"z{time.time_ns()}"
            await transfers.execute(name, Transfer.request, name, "nobody", "nobody", Decimal(1), until=FAR)
            answered[name] = time.perf_counter()
        while not answered.keys() <= CLOCK.called.keys():
            await asyncio.sleep(0.01)
    late = sorted(max(0.0, CLOCK.called[name] - at) * 1e3 for name, at in answered.items())
    p50.add("a reactor", statistics.median(late))
    p99.add("a reactor", late[int(len(late) * 0.99) - 1])


async def deadlines(jet: Jet, settings: Settings, count: int, figures: Figures, subject: str) -> None:
    """How late processes decide whose targets are frozen."""
    accounts, transfers = jet.repository(Account), jet.repository(Transfer)
    await accounts.execute("frozen", Account.freeze)
    names = [f"d{time.time_ns()}-{number}" for number in range(count)]
    for name in names:
        await accounts.execute(f"s{name}", Account.deposit, Decimal(1))
    async with worker_here(settings, "transfer"):
        now = datetime.now(UTC)
        until = {name: now + timedelta(seconds=4 + 6 * number / count) for number, name in enumerate(names)}
        for name in names:
            await transfers.execute(name, Transfer.request, name, f"s{name}", "frozen", Decimal(1), until=until[name])
        for name in names:
            while (await transfers.load(name)).stage is not Stage.ENDED:
                await asyncio.sleep(0.05)
    late: list[float] = []
    for name in names:
        history = await transfers.history(name)
        refusals = [event for event in history if type(event.data).__name__ == "CreditRefused"]
        late += [(event.recorded_at - until[name]).total_seconds() for event in refusals]
        assert any(isinstance(event.data, Debited) for event in history)
    figures.add(f"{subject}: p50", statistics.median(late))
    figures.add(f"{subject}: at most", max(late))


async def pend(jet: Jet, server: NatsServer, count: int, figures: Figures) -> None:
    """What so many pending timers cost."""
    assert jet.client is not None
    timers = JetStreamTimers(jet.client, jet.name)
    before_mb = resident_mb(server.pid)
    started, room = time.perf_counter(), asyncio.Semaphore(256)

    async def set_one(number: int) -> None:
        async with room:
            await timers.set("transfer", f"pending-{number}", 1, FAR)

    await asyncio.gather(*map(set_one, range(count)))
    figures.add(f"{count:,} timers set, a second", count / (time.perf_counter() - started))
    state = await jet.client.ask(stream_info(timer_stream(jet.name)))
    figures.add(f"{count:,} timers: server's memory, MB", resident_mb(server.pid) - before_mb)
    figures.add(f"{count:,} timers: disk, MB", state.bytes / 1e6)


async def run(runs: int, count: int, per_s: int, pending: int) -> int:
    print(conditions())
    alone = Figures("steps of one process at a time", "steps/s", higher_is_better=True)
    many = Figures("steps of 64 processes at once", "steps/s", higher_is_better=True)
    p50 = Figures(f"reaction lag at {per_s}/s: p50", "ms", higher_is_better=False)
    p99 = Figures(f"reaction lag at {per_s}/s: p99", "ms", higher_is_better=False)
    late = Figures("how late deadlines are", "s", higher_is_better=False)
    cost = Figures("pending deadlines", "", higher_is_better=False)
    with NatsServer() as server:
        settings = Settings(servers=(server.url,))
        async with acting.connect(settings) as jet:
            await jet.init()
            for _ in range(runs):
                await transferred(jet, settings, count // 10, 1, alone)
                await by_hand(jet, settings, count // 10, 1, alone)
                await transferred(jet, settings, count, 64, many)
                await by_hand(jet, settings, count, 64, many)
                await lag(jet, settings, 5 * per_s, per_s, p50, p99)
            await deadlines(jet, settings, 100, late, "100 in six seconds")
            await pend(jet, server, pending, cost)
            await deadlines(jet, settings, 100, late, f"the same beside {pending:,} pending")
    figures = [alone, many, p50, p99, late, cost]
    report(figures, [Comparison(alone, OURS, FLOOR), Comparison(many, OURS, FLOOR)])
    return 0


def main() -> int:
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--count", type=int, default=400, help="transfers of a lap at 64 at once; a tenth alone")
    parser.add_argument("--per-s", type=int, default=200)
    parser.add_argument("--pending", type=int, default=100_000)
    options = parser.parse_args()
    return asyncio.run(run(options.runs, options.count, options.per_s, options.pending))


if __name__ == "__main__":
    sys.exit(main())
