"""The control of the fence: without it, a step that is interrupted and tried again is executed twice."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from eventjet import Jet, failpoints
from eventjet.commands.repository import Repositories
from eventjet.examples.transfer.accounts import Account
from eventjet.examples.transfer.app import transfers
from eventjet.examples.transfer.transfers import Stage, Transfer
from eventjet.log.memory import MemoryStore
from eventjet.settings import Settings
from eventjet.subscriptions.process_steps import ProcessRunner


class Crash(Exception):
    """The simulated end of a process."""


@asynccontextmanager
async def requested_transfers() -> AsyncGenerator[tuple[Jet, ProcessRunner]]:
    """Yield twenty requested transfers and the runner of their process."""
    repositories = Repositories(transfers, MemoryStore("transfers"))
    jet = Jet(repositories, Settings())
    await jet.repository(Account).execute("ada", Account.deposit, Decimal(1_000))
    for n in range(20):
        until = datetime(2100, 1, 1, tzinfo=UTC)
        await jet.repository(Transfer).execute(
            f"t{n}", Transfer.request, f"t{n}", "ada", "bob", Decimal(1), until=until
        )
    ((cls, info),) = transfers.processes.items()
    yield jet, ProcessRunner(repositories, cls, info)


async def carry_out(jet: Jet, name: str, take: Any) -> None:
    """Carry out a transfer, beginning again after each crash."""
    while (await jet.repository(Transfer).load(name)).stage is not Stage.ENDED:
        try:
            await take(name)
        except Crash:
            continue


async def test_a_step_in_two_saves_is_executed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    async with requested_transfers() as (jet, _):
        count = 0

        async def take(name: str) -> None:
            nonlocal count
            step = (await jet.repository(Transfer).load(name)).step()
            assert step is not None
            answer_of = step.request
            await jet.repository(answer_of.aggregate).execute(answer_of.aggregate_id, answer_of.call.on)
            count += 1
            if count % 3 == 0:
                raise Crash
            await jet.repository(Transfer).execute(name, step.done.on)

        for n in range(20):
            await carry_out(jet, f"t{n}", take)
        ada, bob = [(await jet.repository(Account).load(account)).balance for account in ("ada", "bob")]
        assert ada + bob != 1_000 or bob != 20


@pytest.mark.parametrize("point", ["step.decided", "step.stored"])
async def test_a_step_is_executed_once_wherever_it_is_interrupted(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with requested_transfers() as (jet, runner):
        count = 0

        def reach(name: str) -> None:
            nonlocal count
            count += name == point
            if name == point and count % 3 == 0:
                raise Crash

        monkeypatch.setattr(failpoints, "reach", reach)
        for n in range(20):
            await carry_out(jet, f"t{n}", runner.advance)
        balances = [(await jet.repository(Account).load(account)).balance for account in ("ada", "bob")]
        assert balances == [980, 20]
        assert count >= 40
