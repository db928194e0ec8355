"""What keeps many processes cheap: an event that a step recorded wakes nobody, and one question asks for all timers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

from eventjet.commands.repository import Repositories
from eventjet.domain.history import FoldedState
from eventjet.examples.transfer.accounts import Account
from eventjet.examples.transfer.app import transfers
from eventjet.examples.transfer.transfers import Transfer
from eventjet.log.memory import MemoryStore
from eventjet.log.timers import JetStreamTimers
from eventjet.projections.fold import Offering
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.handlers import ProcessHandler
from eventjet.subscriptions.keyed_executor import KeyedExecutor
from eventjet.subscriptions.process_steps import ProcessRunner
from eventjet.subscriptions.process_waking import InstanceWaker

UNTIL = datetime(2100, 1, 1, tzinfo=UTC)


class NoTimers:
    async def set(self, *args: Any) -> None: ...

    async def cancel(self, *args: Any) -> None: ...


class Counting(ProcessRunner):
    wakes = 0

    async def advance(self, process_id: str, *, position: int = 0, **kwargs: Any) -> FoldedState[Any]:
        self.wakes += 1
        return await super().advance(process_id, position=position, **kwargs)


async def test_an_event_that_a_step_recorded_wakes_its_process_no_more() -> None:
    repositories = Repositories(transfers, MemoryStore("transfers"))
    await repositories.of(Account).execute("ada", Account.deposit, Decimal(9))
    await repositories.of(Transfer).execute("t", Transfer.request, "t", "ada", "bob", Decimal(4), until=UNTIL)
    ((cls, info),) = transfers.processes.items()
    runner, timers, nothing = Counting(repositories, cls, info), NoTimers(), SimpleNamespace()
    anything: Any = nothing
    handler = ProcessHandler(declarations_of(transfers)[info.name], anything, runner, timers)  # pyright: ignore[reportArgumentType]

    async def handle_all() -> int:
        decode = Offering(repositories.catalog, info.events)
        records = await repositories.store.history(info.name, "t")  # pyright: ignore[reportAttributeAccessIssue]
        for offered in map(decode, records):
            work = handler.work(offered.event)
            assert work is not None
            await work[1](1)
        return len(records)

    assert await handle_all() == 1
    assert runner.wakes == 1
    assert await handle_all() > 1
    assert runner.wakes == 1


async def test_one_question_asks_for_the_timers_of_all_processes() -> None:
    class Server:
        asked = 0

        async def ask(self, request: Any) -> None:
            self.asked += 1
            await asyncio.sleep(0)

    server: Any = Server()
    timers = JetStreamTimers(server, "transfers")

    async def fired(after: int) -> tuple[()]:
        return ()

    def waker() -> InstanceWaker:
        declaration = SimpleNamespace(name="transfer")
        handler: Any = SimpleNamespace(declaration=declaration, newest_fired=timers.newest_fired, fired=fired)
        nothing: Any = None
        return InstanceWaker(handler, KeyedExecutor(1, 1), None, nothing)

    tasks: list[asyncio.Task[None]] = []
    for _ in range(4):
        tasks.append(asyncio.create_task(waker().wake_due()))
        await asyncio.sleep(0.06)
    before = server.asked
    await asyncio.sleep(1.0)
    assert 3 <= server.asked - before <= 5  # four times a second, however many ask
    for task in tasks:
        task.cancel()
