"""Orders without a server: the next step of one, and the whole app with a clock that is moved by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from eventjet import Outcome, Recorded
from eventjet.examples.orders.app import orders
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
)
from eventjet.examples.orders.orders import (
    Arrived,
    Delayed,
    GivenUp,
    HandedOver,
    Order,
    Paid,
    PaidBack,
    PaidLate,
    Placed,
    PutBack,
    SetAside,
    Stage,
)
from eventjet.testing import story, world

NOW = datetime(2030, 1, 1, tzinfo=UTC)
PLACED = Placed(id="o", item="nails", pieces=2, amount=Decimal(9))
CAPTURED: Recorded[Captured | Declined] = Recorded(Captured(order="o", amount=Decimal(9)), "p-1", 1, 7, NOW)


def test_an_order_is_reserved_paid_shipped_and_arrives() -> None:
    (
        story(Order)
        .when(Order.place, "o", "nails", 2, Decimal(9))
        .then(PLACED)
        .does(Stock, "nails", Stock.reserve, "o", 2)
        .done(Outcome(Stock(left=3), (Reserved(order="o", pieces=2, shelf="shelf-5"),)))
        .then(SetAside(shelf="shelf-5"))
        .rests()
        .waits_for(timedelta(minutes=30))
        .hears(Order.payment_came, CAPTURED)
        .then(Paid(payment="p-1", at=NOW))
        .does(Shipment, "o", Shipment.book, "o", "shelf-5")
        .done()
        .then(HandedOver())
        .hears(Order.parcel_arrived, Recorded(Delivered(order="o"), "o", 2, 9, NOW))
        .then(Arrived())
        .rests()
        .waits_for_nothing()
    )


def test_a_step_that_wants_to_know_the_outcome_needs_one() -> None:
    doing = story(Order).given(PLACED).does(Stock, "nails", Stock.reserve, "o", 2)
    with pytest.raises(AssertionError, match="set_aside wants to know the outcome"):
        doing.done()
    doing.refused(OutOfStock(2, 1)).then(GivenUp(reason="sold out")).rests().waits_for_nothing()


def test_an_order_that_is_not_paid_in_time_is_put_back() -> None:
    (
        story(Order)
        .given(PLACED, SetAside(shelf="shelf-5"))
        .due_after(timedelta(minutes=30))
        .then(GivenUp(reason="not paid in time"))
        .does(Stock, "nails", Stock.release, "o", 2)
        .done()
        .then(PutBack())
        .rests()
        .hears(Order.payment_came, CAPTURED)
        .then(PaidLate(payment="p-1"))
        .does(Payment, "p-1", Payment.give_back)
        .done()
        .then(PaidBack())
        .rests()
    )


def test_an_order_that_cannot_be_shipped_is_put_back_and_paid_back() -> None:
    (
        story(Order)
        .given(PLACED, SetAside(shelf="shelf-6"), Paid(payment="p-1", at=NOW))
        .does(Shipment, "o", Shipment.book, "o", "shelf-6")
        .refused(NoCourier("shelf-6"))
        .then(Delayed(reason="no courier"))
        .waits_until(NOW + timedelta(days=2))
        .due(NOW + timedelta(days=2))
        .then(GivenUp(reason="cannot be shipped"))
        .does(Stock, "nails", Stock.release, "o", 2)
        .done()
        .then(PutBack())
        .does(Payment, "p-1", Payment.give_back)
        .done()
        .then(PaidBack())
        .rests()
    )


async def test_an_order_hears_once_of_its_payment_and_its_parcel() -> None:
    async with world(orders, now=NOW) as here:
        stock, placed = here.jet.repository(Stock), here.jet.repository(Order)
        payments, shipments = here.jet.repository(Payment), here.jet.repository(Shipment)
        await stock.execute("nails", Stock.receive, 5)
        await placed.execute("o", Order.place, "o", "nails", 2, Decimal(9))
        await here.settle()
        assert (await stock.load("nails")).left == 3
        await payments.execute("p-1", Payment.capture, "o", Decimal(9))
        await here.settle()
        await shipments.execute("o", Shipment.deliver)
        await here.settle()
        assert (await placed.load("o")).stage is Stage.ENDED
        kinds = [type(event.data) for event in await placed.history("o")]
        assert kinds == [Placed, SetAside, Paid, HandedOver, Arrived]


async def test_an_unpaid_order_returns_its_pieces_after_half_an_hour() -> None:
    async with world(orders, now=NOW) as here:
        stock, placed = here.jet.repository(Stock), here.jet.repository(Order)
        await stock.execute("nails", Stock.receive, 5)
        await placed.execute("o", Order.place, "o", "nails", 2, Decimal(9))
        await here.pass_time(timedelta(minutes=29, seconds=59))
        assert (await stock.load("nails")).left == 3
        await here.pass_time(timedelta(seconds=1))
        assert (await stock.load("nails")).left == 5
        assert (await placed.history("o"))[-2].data == GivenUp(reason="not paid in time")
