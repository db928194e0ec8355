"""`python -m tests.integration.importing APP SERVERS COUNT` imports in another process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from decimal import Decimal

from eventjet import App, Imported
from eventjet.examples.bank.account import Account, Deposited, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason

ACCOUNTS = 700
SOURCE = "old-bank"


def app_named(name: str) -> App:
    return App(name, aggregates=[Account], upcasters=[withdrawn_has_a_reason])


def events(count: int) -> Iterator[Imported]:
    """Return openings, then deposits in turn to a few busy accounts and to all accounts."""
    for number in range(count):
        if number < ACCOUNTS:
            yield Imported(Account, f"a-{number}", Opened(owner="x"))
        else:
            account = number % 7 if number % 3 else number * 31 % ACCOUNTS
            yield Imported(Account, f"a-{account}", Deposited(amount=Decimal(number)))


def report_progress(done: int) -> None:
    sys.stdout.write(f"{done}\n")
    sys.stdout.flush()


async def main(name: str, servers: str, count: int) -> None:
    async with app_named(name).connect(servers=servers.split(",")) as jet:
        await jet.append_many(events(count), source=SOURCE, progress=report_progress)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
