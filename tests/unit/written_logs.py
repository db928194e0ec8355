"""Logs in memory as repositories write them, and functions that change them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from hypothesis import strategies as st

from eventjet import App, aggregate, event
from eventjet.codec.headers import RawRecord, header


@event("account.opened")
class Opened:
    owner: str


@event("account.deposited")
class Deposited:
    amount: int


@event("order.placed")
class Placed:
    pieces: int


@aggregate("account")
class Account:
    owner: str = ""
    balance: int = 0

    def open(self, owner: str) -> Opened:
        return Opened(owner=owner)

    def deposit(self, *amounts: int) -> list[Deposited]:
        return [Deposited(amount=amount) for amount in amounts]

    def evolve(self, event: Opened | Deposited) -> Account:
        return replace(self, owner=event.owner) if isinstance(event, Opened) else self


@aggregate("order")
class Order:
    pieces: int = 0

    def place(self, pieces: int) -> Placed:
        return Placed(pieces=pieces)

    def evolve(self, event: Placed) -> Order:
        return self


APP = App("bank", aggregates=[Account, Order], retired_events=["account.closed"])
Log = Sequence[RawRecord]
Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "deposit", "place", "both"]), st.integers(0, 3), st.integers(1, 4)),
    min_size=1,
    max_size=12,
)


def written(steps: Sequence[Step]) -> list[RawRecord]:
    """Return a log that repositories wrote: single events, several events of an aggregate, transactions."""

    async def write() -> list[RawRecord]:
        async with APP.in_memory() as jet:
            accounts, orders = jet.repository(Account), jet.repository(Order)
            for kind, number, count in steps:
                if kind == "open":
                    await accounts.execute(f"a-{number}", Account.open, "ada")
                elif kind == "deposit":
                    await accounts.execute(f"a-{number}", Account.deposit, *range(1, count + 1))
                elif kind == "place":
                    await orders.execute(f"o {number}", Order.place, count)
                else:
                    await jet.transact(
                        accounts.decide(f"a-{number}", Account.deposit, 1, 2),
                        orders.decide(f"o {number}", Order.place, 1),
                    )
            return [record async for record in jet.store.records()]

    return asyncio.run(write())


SOME = written([("open", 0, 1), ("deposit", 0, 3), ("place", 0, 1), ("both", 0, 1), ("deposit", 0, 1), ("place", 0, 1)])
"""Events of a-0 at 1 to 4, o 0 at 5, a-0 at 6 and 7, o 0 at 8, a-0 at 9, o 0 at 10."""


def changed(record: RawRecord, **parts: object) -> RawRecord:
    position, time_ns, subject, headers, body = record
    named: dict[str, object] = {
        "position": position,
        "time_ns": time_ns,
        "subject": subject,
        "headers": headers,
        "body": body,
    }
    return cast("RawRecord", tuple((named | parts).values()))


def header_changed(record: RawRecord, name: str, value: str) -> RawRecord:
    assert header(record[3], name) is not None
    return changed(record, headers=re.sub(rf"{name}: [^\r]*".encode(), f"{name}: {value}".encode(), record[3]))


def unbatched(block: bytes) -> bytes:
    """Return a header block without its headers of a batch."""
    return re.sub(rb"Nats-Batch-[^\r]*\r\n", b"", block)


def at(log: Log, position: int, change: Callable[[RawRecord], RawRecord]) -> list[RawRecord]:
    """Return the log with the record at a position changed."""
    return [change(record) if record[0] == position else record for record in log]


def without(log: Log, *positions: int) -> list[RawRecord]:
    return [record for record in log if record[0] not in positions]


def added(log: Log, *records: RawRecord) -> list[RawRecord]:
    """Return the log with records appended."""
    return [*log, *(changed(record, position=log[-1][0] + number) for number, record in enumerate(records, 1))]
