"""A process that has many users call themselves by few names, until it is killed: `claimants URL APP SEED`."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from eventjet import App
from eventjet.errors import ConcurrencyConflict, NotUnique, OutcomeUnknown, StoreUnavailable, Unreachable
from eventjet.jet import Jet
from tests.contracts.unique_contract import User

USERS, NAMES, TASKS = 12, 8, 6


@asynccontextmanager
async def connected(url: str, app: str) -> AsyncGenerator[Jet]:
    """Connect, again and again while the cluster chooses its leader, as a supervisor starts a process again."""
    async with AsyncExitStack() as stack:
        while True:
            with suppress(Unreachable):
                jet = await stack.enter_async_context(App(app, aggregates=[User]).connect(servers=url))
                break
        yield jet


async def run(url: str, app: str, seed: int) -> None:
    async with connected(url, app) as jet:
        users = jet.repository(User)

        async def act(number: int) -> None:
            chance = random.Random(seed * TASKS + number)
            while True:
                user = f"u-{chance.randrange(USERS)}"
                names = [f"n-{number_of_name}@bank" for number_of_name in chance.sample(range(NAMES), 2)]
                try:
                    match chance.randrange(4):
                        case 0:
                            await users.execute(user, User.leave)
                        case 1:
                            await users.execute(user, User.phone, *names)
                        case 2:
                            other = f"u-{(int(user[2:]) + 1) % USERS}"
                            claim = users.decide(other, User.phone, names[0])
                            await jet.transact(users.decide(user, User.leave), claim)
                        case _:
                            await users.execute(user, User.call, names[0])
                except (NotUnique, ConcurrencyConflict, OutcomeUnknown, StoreUnavailable, Unreachable):
                    await asyncio.sleep(0.01 * chance.random())

        await asyncio.gather(*map(act, range(TASKS)))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3])))
