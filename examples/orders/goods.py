"""What an order needs of others: stock, payments and shipments."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from eventjet import aggregate, event


class OutOfStock(Exception):
    """There are fewer pieces left."""


class NoCourier(Exception):
    """No courier takes the parcel."""


# The stock of an item


@event("stock.received")
class Received:
    pieces: int


@event("stock.reserved")
class Reserved:
    order: str
    pieces: int
    shelf: str


@event("stock.released")
class Released:
    order: str
    pieces: int


StockEvent = Received | Reserved | Released


@aggregate("stock", snapshot_every=100)
class Stock:
    """The pieces of one item that are left."""

    left: int = 0

    def receive(self, pieces: int) -> Received:
        return Received(pieces=pieces)

    def reserve(self, order: str, pieces: int) -> Reserved:
        if pieces > self.left:
            raise OutOfStock(pieces, self.left)
        return Reserved(order=order, pieces=pieces, shelf=f"shelf-{self.left % 7}")

    def release(self, order: str, pieces: int) -> Released:
        return Released(order=order, pieces=pieces)

    def evolve(self, event: StockEvent) -> Stock:
        match event:
            case Received(pieces=pieces) | Released(pieces=pieces):
                return replace(self, left=self.left + pieces)
            case Reserved(pieces=pieces):
                return replace(self, left=self.left - pieces)


# A payment


@event("payment.captured")
class Captured:
    order: str
    amount: Decimal


@event("payment.declined")
class Declined:
    order: str
    reason: str


@event("payment.returned")
class Returned:
    order: str


PaymentEvent = Captured | Declined | Returned


@aggregate("payment")
class Payment:
    """A payment: made by a reactor that calls a payment service, or by a web hook."""

    order: str = ""
    amount: Decimal = Decimal(0)
    returned: bool = False

    def capture(self, order: str, amount: Decimal) -> Captured | None:
        return None if self.order else Captured(order=order, amount=amount)

    def decline(self, order: str, reason: str) -> Declined | None:
        return None if self.order else Declined(order=order, reason=reason)

    def give_back(self) -> Returned | None:
        return None if self.returned or not self.amount else Returned(order=self.order)

    def evolve(self, event: PaymentEvent) -> Payment:
        match event:
            case Captured(order=order, amount=amount):
                return replace(self, order=order, amount=amount)
            case Declined(order=order):
                return replace(self, order=order)
            case Returned():
                return replace(self, returned=True)


# A shipment


@event("shipment.booked")
class Booked:
    order: str


@event("shipment.delivered")
class Delivered:
    order: str


@aggregate("shipment")
class Shipment:
    """The parcel of an order."""

    order: str = ""
    couriers: int = 1

    def book(self, order: str, shelf: str) -> Booked | None:
        if shelf == "shelf-6":
            raise NoCourier(shelf)
        return None if self.order else Booked(order=order)

    def deliver(self) -> Delivered:
        return Delivered(order=self.order)

    def evolve(self, event: Booked | Delivered) -> Shipment:
        return replace(self, order=event.order)
