"""An app whose read models have keys from the state of an order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from sqlalchemy import select
from sqlalchemy.orm import mapped_column

from eventjet import App, Key, Recorded, aggregate, by_state, event, projection
from eventjet.domain.identity import encode_id
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from tests import logs
from tests.logs import block
from tests.tables import reading

YEAR = 2026


@event("order.placed")
class Placed:
    customer: str
    ref: str


@event("order.added")
class Added:
    amount: int
    tag: str = ""


@event("order.reassigned")
class Reassigned:
    customer: str | None


@event("order.noted")
class Noted:
    """An event that no projection handles."""

    text: str


@event("order.closed")
class Closed:
    pass


OrderEvent = Placed | Added | Reassigned | Noted | Closed


@aggregate("order")
class Order:
    customer: str | None = None
    ref: str = ""
    total: int = 0
    tags: tuple[str, ...] = ()
    notes: int = 0

    def record(self, event: OrderEvent) -> OrderEvent:
        return event

    def evolve(self, event: OrderEvent) -> Order:
        match event:
            case Placed(customer=customer, ref=ref):
                return replace(self, customer=customer, ref=ref)
            case Added(amount=amount, tag=tag):
                tags = self.tags if tag in ("", *self.tags) else (*self.tags, tag)
                return replace(self, total=self.total + amount, tags=tags)
            case Reassigned(customer=customer):
                return replace(self, customer=customer)
            case Noted():
                return replace(self, notes=self.notes + 1)
            case Closed():
                return self


@event("payment.paid")
class Paid:
    customer: str
    amount: int


@aggregate("payment")
class Payment:
    amount: int = 0

    def pay(self, customer: str, amount: int) -> Paid:
        return Paid(customer=customer, amount=amount)

    def evolve(self, event: Paid) -> Payment:
        return replace(self, amount=event.amount)


@event("complaint.filed")
class Filed:
    order: str | None
    """The id of an order, which may not exist."""


@aggregate("complaint")
class Complaint:
    times: int = 0

    def file(self, order: str | None) -> Filed:
        return Filed(order=order)

    def evolve(self, event: Filed) -> Complaint:
        return replace(self, times=self.times + 1)


def customer_of(order: Order) -> str | None:
    return order.customer


@dataclass(frozen=True, slots=True)
class Spend:
    customer: Key[str]
    amount: int = 0
    last: str = ""


@projection("spend", key=by_state(Order, customer_of, on_change="keep"))
def spend(row: Spend | None, event: Recorded[Added], order: Order) -> Spend:
    row = row or Spend(order.customer or "")
    return replace(row, amount=row.amount + event.data.amount, last=f"{order.ref} {order.total} {order.notes}")


@dataclass(frozen=True, slots=True)
class Folder:
    customer: Key[str]
    ref: Annotated[Key[str], mapped_column(unique=True)]
    amount: int = 0
    events: int = 0


@projection(
    "folders", key=by_state(Order, lambda order: order.customer and (order.customer, order.ref), on_change="move")
)
def folders(row: Folder | None, event: Recorded[Placed | Added | Closed], order: Order) -> Folder | None:
    row = row or Folder(order.customer or "", order.ref)
    match event.data:
        case Closed():
            return None
        case Added(amount=amount):
            return replace(row, amount=row.amount + amount, events=row.events + 1)
        case Placed():
            return replace(row, events=row.events + 1)


@dataclass(frozen=True, slots=True)
class Load:
    customer: Key[str]
    orders: int = 0


@projection("loads", key=by_state(Order, customer_of, on_change="both"))
def loads(row: Load | None, event: Recorded[Placed | Reassigned], customer: str, order: Order) -> Load | None:
    row = row or Load(customer)
    row = replace(row, orders=row.orders + (1 if customer == order.customer else -1))
    return row if row.orders else None


@dataclass(frozen=True, slots=True)
class Due:
    customer: Key[str]
    amount: int = 0


def customer_of_payment(event: Recorded[Paid]) -> str:
    return event.data.customer


@projection("dues", key=[by_state(Order, customer_of, on_change="keep"), customer_of_payment])
def dues(row: Due | None, event: Recorded[Added | Paid], order: Order | None) -> Due:
    match event.data:
        case Added(amount=amount):
            assert order is not None
            row = row or Due(order.customer or "")
            return replace(row, amount=row.amount + amount)
        case Paid(customer=customer, amount=amount):
            assert order is None
            row = row or Due(customer)
            return replace(row, amount=row.amount - amount)


@dataclass(frozen=True, slots=True)
class Tag:
    tag: Key[str]
    month: Key[int]
    orders: int = 0


def tags_of(order: Order, event: Recorded[Any]) -> list[tuple[str, int]]:
    return [(tag, YEAR if event.recorded_at else 0) for tag in order.tags]


@projection("tags", key=by_state(Order, tags_of, on_change="keep"))
def tags(row: Tag | None, event: Recorded[Closed], key: tuple[str, int]) -> Tag:
    row = row or Tag(*key)
    return replace(row, orders=row.orders + 1)


@dataclass(frozen=True, slots=True)
class Grievance:
    customer: Key[str]
    complaints: int = 0
    last: str = ""


def order_of_complaint(event: Recorded[Filed]) -> str | None:
    return event.data.order


def customer_or_nobody(order: Order) -> str | None:
    return order.customer if order.ref else "nobody"


@projection("grievances", key=by_state(Order, customer_or_nobody, on_change="keep", via=order_of_complaint))
def grievances(row: Grievance | None, event: Recorded[Filed], order: Order) -> Grievance:
    row = row or Grievance(order.customer or "nobody")
    return replace(row, complaints=row.complaints + 1, last=f"{order.ref} {order.total} {order.notes}")


orders = App(
    "orders",
    aggregates=[Order, Payment, Complaint],
    projections=[spend, folders, loads, dues, tags, grievances],
)
NAMES = list(orders.projections)


def history(seed: int, count: int, ids: int = 20) -> list[tuple[str, OrderEvent | Paid | Filed]]:
    """Return (aggregate id, event) pairs in the order of a log; orders change and lose their customers."""
    chance = random.Random(seed)
    known: dict[str, str | None] = {}
    pairs: list[tuple[str, OrderEvent | Paid | Filed]] = []
    while len(pairs) < count:
        name = f"o {chance.randrange(ids)}"
        customer = f"c{chance.randrange(4)}"
        event: OrderEvent | Paid | Filed
        match chance.randrange(9) if name in known else 0:
            case 0 if name not in known:
                event, known[name] = Placed(customer=customer, ref=name), customer
            case 0 | 1 | 2:
                event = Added(amount=chance.randrange(100), tag=chance.choice(["", "red", "blue"]))
            case 3 | 4:
                target = chance.choice([customer, customer, None])
                event, known[name] = Reassigned(customer=target), target
            case 5:
                event = Noted(text="x")
            case 6:
                event = Closed()
            case 7:
                complaint = f"t {chance.randrange(6)}"
                name, event = complaint, Filed(order=chance.choice([name, f"o {chance.randrange(ids)}", None]))
            case _:
                name, event = f"p {len(pairs)}", Paid(customer=customer, amount=chance.randrange(50))
        pairs.append((name, event))
    return pairs


def append(settings: Settings, pairs: Iterable[tuple[str, Any]], name: str = "orders") -> int:
    """Store (aggregate id, event) pairs in the log; returns the last position."""

    def records() -> Iterator[tuple[str, bytes, bytes]]:
        for aggregate_id, data in pairs:
            encoded = orders.catalog.encode(data)
            subject = f"{encoded.type_name.partition('.')[0]}.{encode_id(aggregate_id)}"
            yield subject, block(encoded.type_name, encoded.schema), encoded.body

    return logs.append(Endpoint.of(settings), name, records())


def rows_of(database: str, names: Iterable[str] = ()) -> dict[str, set[Any]]:
    """Return the rows of all tables, also with states, of these projections or of all projections."""
    with reading(database) as connection:
        tables = [table for name in names or NAMES for table in orders.projections[name].tables]
        return {table.name: set(map(tuple, connection.execute(select(table)))) for table in tables}


def expected(pairs: Iterable[tuple[str, OrderEvent | Paid | Filed]]) -> dict[str, dict[Any, Any]]:
    """Return the expected rows by key, computed without eventjet."""
    states: dict[str, Order] = {}
    rows: dict[str, dict[Any, Any]] = {name: {} for name in NAMES}
    for name, data in pairs:
        if isinstance(data, Paid):
            row = rows["dues"].get(data.customer, Due(data.customer))
            rows["dues"][data.customer] = replace(row, amount=row.amount - data.amount)
            continue
        if isinstance(data, Filed):
            order = states.get(data.order or "", Order())
            customer = order.customer if order.ref else "nobody"
            if data.order is not None and customer is not None:
                filed = rows["grievances"].get(customer, Grievance(customer))
                last = f"{order.ref} {order.total} {order.notes}"
                rows["grievances"][customer] = replace(filed, complaints=filed.complaints + 1, last=last)
            continue
        before = states.get(name, Order())
        states[name] = after = before.evolve(data)
        old, new = before.customer, after.customer
        if old != new and old is not None and (old, name) in rows["folders"]:
            row = rows["folders"].pop((old, name))
            if new is not None:
                rows["folders"][new, name] = replace(row, customer=new)
        if isinstance(data, Placed | Reassigned):
            for customer in {old, new} - {None}:
                row = rows["loads"].pop(customer, Load(str(customer)))
                row = replace(row, orders=row.orders + (1 if customer == new else -1))
                if row.orders:
                    rows["loads"][customer] = row
        if isinstance(data, Closed):
            rows["folders"].pop((new, name), None)
            for tag in after.tags:
                row = rows["tags"].get((tag, YEAR), Tag(tag, YEAR))
                rows["tags"][tag, YEAR] = replace(row, orders=row.orders + 1)
        if new is None:
            continue
        if isinstance(data, Placed | Added):
            row = rows["folders"].get((new, name), Folder(new, name))
            amount = data.amount if isinstance(data, Added) else 0
            rows["folders"][new, name] = replace(row, amount=row.amount + amount, events=row.events + 1)
        if isinstance(data, Added):
            row = rows["spend"].get(new, Spend(new))
            last = f"{after.ref} {after.total} {after.notes}"
            rows["spend"][new] = replace(row, amount=row.amount + data.amount, last=last)
            due = rows["dues"].get(new, Due(new))
            rows["dues"][new] = replace(due, amount=due.amount + data.amount)
    return rows
