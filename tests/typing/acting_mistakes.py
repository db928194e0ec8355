"""Mistakes in processes and reactors that both type checkers must report: each line that ends in `# wrong`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from typing import Protocol

from eventjet import (
    App,
    Deadline,
    Jet,
    Reaction,
    Recorded,
    Retry,
    Step,
    after,
    at,
    do,
    event,
    listens,
    process,
    reactor,
)
from eventjet.examples.orders.goods import NoCourier, OutOfStock, Payment, Reserved, Shipment, Stock
from eventjet.examples.orders.orders import Order, OrderEvent, Paid, order_of
from eventjet.examples.transfer.app import HasMails, Outside, receipts
from eventjet.testing import story


@event("p.began")
class Began:
    item: str


@process("p")
class P:
    item: str = ""

    def begun(self) -> Began:
        return Began(item="x")

    def stranger(self) -> Reserved:
        return Reserved(order="o", pieces=1, shelf="b")

    def sold_out(self, error: OutOfStock) -> Began:
        return Began(item="x")

    @listens(order_of)  # wrong
    def hears_less_than_it_correlates(self, event: Recorded[Reserved]) -> Began:
        return Began(item="x")

    @listens()  # wrong
    async def waits(self) -> Began:
        return Began(item="x")

    def step(self) -> Step[P, Began] | None:
        do(Stock, self.item, Stock.reserve).then(P.begun)  # wrong
        do(Stock, self.item, Stock.reserve, 3, 1).then(P.begun)  # wrong
        do(Stock, self.item, Payment.capture, "o", Decimal(1))  # wrong
        do(Stock, 3, Stock.release, "o", 1)  # wrong
        do(Stock, self.item, Stock.release, "o", 1).then(P.begun, "too much")  # wrong
        do(Stock, self.item, Stock.release, "o", 1).then(P.begun).refused(OutOfStock, Order.sold_out)  # wrong
        do(Stock, self.item, Stock.release, "o", 1).then(P.begun).refused(ValueError, P.sold_out)  # wrong
        if self.item:
            return do(Stock, self.item, Stock.release, "o", 1).then(Order.handed_over)  # wrong
        if len(self.item) > 3:
            return do(Stock, self.item, Stock.release, "o", 1).then(P.stranger)  # wrong
        return do(Stock, self.item, Stock.release, "o", 1)  # wrong

    def deadline(self) -> Deadline[P, Began] | None:
        after(2, P.begun)  # wrong
        at(timedelta(2), P.begun)  # wrong
        if self.item:
            return after(timedelta(2), P.stranger)  # wrong
        return after(timedelta(2), Order.give_up, "x")  # wrong

    def evolve(self, event: Began) -> P:
        return self


@process("q")
class Q:
    """Its steps record what it does not fold."""

    def step(self) -> Step[Q, Reserved] | None:
        return None

    def evolve(self, event: Began) -> Q:
        return self


@process("r")
class R:
    """Its steps are another one's."""

    def step(self) -> Step[Order, OrderEvent] | None:
        return None

    def evolve(self, event: Began) -> R:
        return self


class HasFax(Protocol):
    @property
    def fax(self) -> str: ...


@reactor("fax")
async def fax(event: Recorded[Paid], to: Reaction[HasFax]) -> None:
    str(to.deps.mails)  # wrong
    await to.repository(Stock).execute("s", Payment.capture, "o", Decimal(1))  # wrong
    await to.repository(Stock).execute("s", Stock.reserve)  # wrong
    await to.repository(Paid).load("s")  # wrong


@reactor("sync")  # wrong
def not_awaited(event: Recorded[Paid], to: Reaction[HasMails]) -> None:
    return None


@reactor("bare")  # wrong
async def bare(event: Paid, to: Reaction[HasMails]) -> None:
    return None


@reactor("returns")  # wrong
async def returns(event: Recorded[Paid], to: Reaction[HasMails]) -> int:
    return 1


@reactor("later", start="tomorrow")  # wrong
async def later(event: Recorded[Paid], to: Reaction[HasMails]) -> None:
    return None


@reactor("often", retry=Retry(tries="3"))  # wrong
async def often(event: Recorded[Paid], to: Reaction[HasMails]) -> None:
    return None


async def waits(jet: Jet) -> None:
    await jet.settled(Stock, "s")  # wrong
    await jet.settled(Order, "o", until=lambda order: order.no_such_stage)  # wrong


@asynccontextmanager
async def outside() -> AsyncGenerator[Outside]:
    yield Outside()


@asynccontextmanager
async def nothing_of_use() -> AsyncGenerator[int]:
    yield 1


App("a", aggregates=[Stock], reactors=[fax], deps=outside)  # wrong
App("a", aggregates=[Stock], reactors=[receipts], deps=nothing_of_use)  # wrong
App("a", aggregates=[Stock], reactors=[receipts])  # wrong
App("a", aggregates=[Stock], processes=[Stock])  # wrong
story(Q)  # wrong
story(R)  # wrong
story(Order).does(Stock, "nails", Shipment.book, "o", "s")  # wrong
story(Order).then()  # wrong
story(Order).does(Stock, "nails", Stock.reserve, "o", 1).then()  # wrong
story(Order).does(Stock, "nails", Stock.reserve, "o", 1).refused(NoCourier)  # wrong
