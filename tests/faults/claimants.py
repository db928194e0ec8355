"""A process that has many users call themselves by few names, until it is killed: `claimants URL APP SEED`."""

from __future__ import annotations

import asyncio
import random
import sys

from eventjet import App
from eventjet.errors import ConcurrencyConflict, NotUnique, OutcomeUnknown, StoreUnavailable, Unreachable
from tests.contracts.unique_contract import User

USERS, NAMES, TASKS = 12, 8, 6


async def run(url: str, app: str, seed: int) -> None:
    async with App(app, aggregates=[User]).connect(servers=url) as jet:
        users = jet.repository(User)

        async def act(number: int) -> None:
            chance = random.Random(seed * TASKS + number)
            while True:
                user = f"u-{chance.randrange(USERS)}"
                names = [f"n-{one}@bank" for one in chance.sample(range(NAMES), 2)]
                try:
                    match chance.randrange(4):
                        case 0:
                            await users.execute(user, User.leave)
                        case 1:
                            await users.execute(user, User.phone, *names)
                        case 2:
                            other = f"u-{(int(user[2:]) + 1) % USERS}"
                            taken = users.decide(other, User.phone, names[0])
                            await jet.transact(users.decide(user, User.leave), taken)
                        case _:
                            await users.execute(user, User.call, names[0])
                except (NotUnique, ConcurrencyConflict, OutcomeUnknown, StoreUnavailable, Unreachable):
                    await asyncio.sleep(0.01 * chance.random())

        await asyncio.gather(*map(act, range(TASKS)))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3])))
