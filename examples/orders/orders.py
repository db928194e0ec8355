"""An order: reserve, wait for the payment, ship.

What was done is undone, as steps of their own, when it is not paid in time or cannot be shipped.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum

from eventjet import Deadline, Outcome, Recorded, Step, after, at, do, event, listens, process
from eventjet.examples.orders.goods import (
    Captured,
    Declined,
    Delivered,
    NoCourier,
    OutOfStock,
    Payment,
    Reserved,
    Shipment,
    Stock,
    StockEvent,
)


@event("order.placed")
class Placed:
    id: str
    item: str
    pieces: int
    amount: Decimal


@event("order.set_aside")
class SetAside:
    shelf: str


@event("order.paid")
class Paid:
    payment: str
    at: datetime


@event("order.paid_late")
class PaidLate:
    payment: str


@event("order.handed_over")
class HandedOver:
    pass


@event("order.delayed")
class Delayed:
    reason: str


@event("order.arrived")
class Arrived:
    pass


@event("order.given_up")
class GivenUp:
    reason: str


@event("order.put_back")
class PutBack:
    pass


@event("order.paid_back")
class PaidBack:
    pass


OrderEvent = Placed | SetAside | Paid | PaidLate | HandedOver | Delayed | Arrived | GivenUp | PutBack | PaidBack


class Stage(Enum):
    """Where an order stands."""

    NEW = "new"
    PLACED = "placed"
    UNPAID = "unpaid"
    PAID = "paid"
    DELAYED = "delayed"
    UNDER_WAY = "under way"
    PUTTING_BACK = "putting back"
    PAYING_BACK = "paying back"
    ENDED = "ended"


def order_of(event: Recorded[Captured | Declined]) -> str:
    """Which order a payment is for."""
    return event.data.order


def shipped_order(event: Recorded[Delivered]) -> str:
    """Which order a shipment is for."""
    return event.data.order


@process("order", snapshot_every=100)
class Order:
    """Sees an order through."""

    id: str = ""
    item: str = ""
    pieces: int = 0
    amount: Decimal = Decimal(0)
    shelf: str = ""
    payment: str = ""
    paid_at: datetime | None = None
    stage: Stage = Stage.NEW

    # Decisions of others

    def place(self, id: str, item: str, pieces: int, amount: Decimal) -> Placed | None:
        return Placed(id=id, item=item, pieces=pieces, amount=amount) if self.stage is Stage.NEW else None

    @listens(order_of)
    def payment_came(self, event: Recorded[Captured | Declined]) -> Paid | PaidLate | GivenUp | None:
        match self.stage, event.data:
            case Stage.UNPAID, Captured():
                return Paid(payment=event.aggregate_id, at=event.recorded_at)
            case Stage.UNPAID, Declined(reason=reason):
                return GivenUp(reason=reason)
            case ((Stage.PUTTING_BACK | Stage.ENDED), Captured()) if not self.payment:
                return PaidLate(payment=event.aggregate_id)
            case _:
                return None

    @listens(shipped_order)
    def parcel_arrived(self, event: Recorded[Delivered]) -> Arrived | None:
        return Arrived() if self.stage is Stage.UNDER_WAY else None

    # What follows its own steps

    def set_aside(self, outcome: Outcome[Stock, StockEvent]) -> SetAside:
        (reserved,) = outcome.events
        assert isinstance(reserved, Reserved)
        return SetAside(shelf=reserved.shelf)

    def sold_out(self, error: OutOfStock) -> GivenUp:
        return GivenUp(reason="sold out")

    def handed_over(self) -> HandedOver:
        return HandedOver()

    def no_courier(self, error: NoCourier) -> Delayed:
        return Delayed(reason="no courier")

    def put_back(self) -> PutBack:
        return PutBack()

    def paid_back(self) -> PaidBack:
        return PaidBack()

    def give_up(self, reason: str) -> GivenUp:
        return GivenUp(reason=reason)

    # What it does next, and until when

    def step(self) -> Step[Order, OrderEvent] | None:
        match self.stage:
            case Stage.PLACED:
                return (
                    do(Stock, self.item, Stock.reserve, self.id, self.pieces)
                    .then_with(Order.set_aside)
                    .refused(OutOfStock, Order.sold_out)
                )
            case Stage.PAID:
                return (
                    do(Shipment, self.id, Shipment.book, self.id, self.shelf)
                    .then(Order.handed_over)
                    .refused(NoCourier, Order.no_courier)
                )
            case Stage.PUTTING_BACK:
                return do(Stock, self.item, Stock.release, self.id, self.pieces).then(Order.put_back)
            case Stage.PAYING_BACK:
                return do(Payment, self.payment, Payment.give_back).then(Order.paid_back)
            case _:
                return None

    def deadline(self) -> Deadline[Order, OrderEvent] | None:
        match self.stage:
            case Stage.UNPAID:
                return after(timedelta(minutes=30), Order.give_up, "not paid in time")
            case Stage.DELAYED:
                assert self.paid_at is not None
                return at(self.paid_at + timedelta(days=2), Order.give_up, "cannot be shipped")
            case _:
                return None

    # Evolution

    def evolve(self, event: OrderEvent) -> Order:
        match event:
            case Placed(id=id, item=item, pieces=pieces, amount=amount):
                return replace(self, id=id, item=item, pieces=pieces, amount=amount, stage=Stage.PLACED)
            case SetAside(shelf=shelf):
                return replace(self, shelf=shelf, stage=Stage.UNPAID)
            case Paid(payment=payment, at=at):
                return replace(self, payment=payment, paid_at=at, stage=Stage.PAID)
            case PaidLate(payment=payment):
                ended = self.stage is Stage.ENDED
                return replace(self, payment=payment, stage=Stage.PAYING_BACK if ended else self.stage)
            case HandedOver():
                return replace(self, stage=Stage.UNDER_WAY)
            case Delayed():
                return replace(self, stage=Stage.DELAYED)
            case Arrived():
                return replace(self, stage=Stage.ENDED)
            case GivenUp():
                return replace(self, stage=Stage.PUTTING_BACK if self.shelf else Stage.ENDED)
            case PutBack():
                return replace(self, stage=Stage.PAYING_BACK if self.payment else Stage.ENDED)
            case PaidBack():
                return replace(self, stage=Stage.ENDED)
