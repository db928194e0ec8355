"""Many connections write to the same aggregates on a real server; each command is recorded once, and none fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from decimal import Decimal

import pytest

from eventjet import App, Jet
from eventjet.dev.nats import NatsServer
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.settings import Settings
from tests.logs import fresh_name

CONNECTIONS = 16
COMMANDS = 10


@pytest.fixture
async def rivals(eventjet_nats: NatsServer) -> AsyncIterator[list[Jet]]:
    """Open connections to the same log, as many processes would."""
    app = App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])
    settings = Settings(servers=(eventjet_nats.url,), request_timeout_s=30.0, save_timeout_s=120.0)
    async with AsyncExitStack() as stack:
        jets = [await stack.enter_async_context(app.connect(settings)) for _ in range(CONNECTIONS)]
        await jets[0].init()
        yield jets


async def test_commands_of_many_connections_on_the_same_account_are_recorded_once(rivals: list[Jet]) -> None:
    async def deposit(number: int, jet: Jet) -> list[int]:
        accounts = jet.repository(Account)
        done = [
            await accounts.command(f"{number}/{command}").execute("hot", Account.deposit, Decimal(1))
            for command in range(COMMANDS)
        ]
        return [outcome.version for outcome in done]

    versions = await asyncio.gather(*(deposit(number, jet) for number, jet in enumerate(rivals)))
    total = CONNECTIONS * COMMANDS
    assert sorted(version for ascending in versions for version in ascending) == list(range(1, total + 1))
    assert all(ascending == sorted(ascending) for ascending in versions)
    assert (await rivals[0].repository(Account).load("hot")).balance == total


async def test_payments_of_many_connections_between_two_accounts_keep_the_sum(rivals: list[Jet]) -> None:
    accounts = rivals[0].repository(Account)
    for name in ("ada", "bob"):
        await accounts.execute(name, Account.deposit, Decimal(1_000))

    async def pay(jet: Jet, payer: str, payee: str) -> None:
        payments = jet.repository(Account)
        for _ in range(5):
            await jet.transact(
                payments.decide(payer, Account.withdraw, Decimal(1), reason="rent"),
                payments.decide(payee, Account.deposit, Decimal(1)),
            )

    directions = (("ada", "bob"), ("bob", "ada"))
    await asyncio.gather(*(pay(jet, *directions[number % 2]) for number, jet in enumerate(rivals[:8])))
    assert [(await accounts.load(name)).balance for name in ("ada", "bob")] == [1_000, 1_000]
    assert [len(await accounts.history(name)) for name in ("ada", "bob")] == [41, 41]


async def test_a_command_is_never_refused_because_of_an_old_state(rivals: list[Jet]) -> None:
    first, second = rivals[0].repository(Account), rivals[1].repository(Account)
    await first.execute("poor", Account.deposit, Decimal(1))
    for _ in range(5):
        await second.execute("poor", Account.deposit, Decimal(1))
        await first.execute("poor", Account.withdraw, Decimal(2))
        await second.execute("poor", Account.deposit, Decimal(1))
    assert (await second.load("poor")).balance == 1
