"""eventsource-py's commands: `python -m benchmarks.subjects.commands_eventsource <store> <count> <tasks>`.

A decider behind its `AggregateRepository.execute`, as its documentation has it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from decimal import Decimal
from uuid import UUID

from eventsource import AggregateRepository, DeciderAggregate, DomainCommand, DomainEvent
from pydantic import BaseModel

from benchmarks.postings import CURRENCY, Posting, balances, shares
from benchmarks.subjects.clock import Clock
from benchmarks.subjects.peer_eventsource import Deposited, Withdrawn, close, create_schema, open_store


class Post(DomainCommand):
    account_id: UUID
    tx_id: str
    amount: Decimal
    currency: str
    memo: str


class Deposit(Post):
    pass


class Withdraw(Post):
    pass


class State(BaseModel):
    balance: Decimal = Decimal(0)


class Account(DeciderAggregate[State, Post]):
    aggregate_type = "Account"

    @staticmethod
    def initial_state() -> State:
        return State()

    @staticmethod
    def decide(command: Post, state: State) -> list[DomainEvent]:  # noqa: ARG004 - a posting may overdraw
        event_class = Deposited if isinstance(command, Deposit) else Withdrawn
        return [
            event_class(
                aggregate_id=command.account_id,
                tx_id=command.tx_id,
                amount=command.amount,
                currency=command.currency,
                memo=command.memo,
            )
        ]

    @staticmethod
    def evolve(state: State, event: DomainEvent) -> State:
        match event:
            case Deposited(amount=amount):
                return state.model_copy(update={"balance": state.balance + amount})
            case Withdrawn(amount=amount):
                return state.model_copy(update={"balance": state.balance - amount})
            case _:
                return state


async def main(store_url: str, count: int, tasks: int) -> None:
    store, engine = open_store(store_url, pool_size=min(tasks, 16))
    await create_schema(engine)
    accounts = AggregateRepository(event_store=store, aggregate_factory=Account, enable_tracing=False)
    latencies: list[float] = []

    async def execute(postings: list[Posting]) -> None:
        for account, is_deposit, tx_id, amount, memo in postings:
            started = time.perf_counter()
            command_class = Deposit if is_deposit else Withdraw
            command = command_class(
                account_id=account, tx_id=tx_id, amount=Decimal(amount), currency=CURRENCY, memo=memo
            )
            await accounts.execute(account, command)
            latencies.append(time.perf_counter() - started)

    work = shares(count, tasks)
    clock = Clock()
    clock.start()
    await asyncio.gather(*map(execute, work))
    clock.stop(len(latencies), latencies)
    for name, (balance, _) in list(balances(count).items())[:100]:
        loaded = (await accounts.load(UUID(name))).state.balance
        if loaded != balance:
            raise RuntimeError(f"{name} holds {loaded} and must hold {balance}")
    await close(store, engine)


if __name__ == "__main__":
    store_url, count, tasks = sys.argv[1:]
    asyncio.run(main(store_url, int(count), int(tasks)))
