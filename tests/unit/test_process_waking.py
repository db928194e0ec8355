"""Many processes stay cheap: an event of their own step wakes none, and a single request asks for all timers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

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


async def test_an_event_recorded_by_a_step_does_not_wake_its_process() -> None:
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


async def test_a_single_request_asks_for_the_timers_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.log.timers.SHARED_S", 3_600.0)
    requests: list[Any] = []
    answers: list[int] = []

    async def ask(request: Any) -> None:
        requests.append(request)
        await asyncio.sleep(0)

    server: Any = SimpleNamespace(ask=ask)
    timers = JetStreamTimers(server, "transfers")

    async def newest_fired() -> int:
        answers.append(await timers.newest_fired())
        return answers[-1]

    async def fired(after: int) -> tuple[()]:
        return ()

    def waker() -> InstanceWaker:
        declaration = SimpleNamespace(name="transfer")
        handler: Any = SimpleNamespace(declaration=declaration, newest_fired=newest_fired, fired=fired)
        nothing: Any = None
        return InstanceWaker(handler, KeyedExecutor(1, 1), None, nothing)

    tasks = [asyncio.create_task(waker().wake_due()) for _ in range(4)]
    while len(answers) < 8:
        await asyncio.sleep(0.01)
    assert len(requests) == 1
    for task in tasks:
        task.cancel()
