"""An app whose row classes declare their tables and have times, decimals and enums as keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict
from sqlalchemy import DateTime, Numeric
from sqlalchemy import Enum as EnumType
from sqlalchemy.orm import mapped_column

from eventjet import App, Key, Recorded, aggregate, entries, event, projection


class Kind(Enum):
    """An enum that is not declared in alphabetical order, and whose members print alike."""

    van = "b"
    car = "a"

    def __str__(self) -> str:
        return "vehicle"


class Size(IntEnum):
    small = 1
    large = 2


@event("visit.booked")
class Booked:
    slot: datetime
    kind: Kind
    size: Size
    price: Decimal


@aggregate("visit")
class Visit:
    n: int = 0

    def book(self, slot: datetime, kind: Kind, size: Size, price: Decimal) -> Booked:
        return Booked(slot=slot, kind=kind, size=size, price=price)

    def evolve(self, event: Booked) -> Visit:
        return replace(self, n=self.n + 1)


@dataclass(frozen=True, slots=True)
class Slot:
    slot: Key[datetime]
    n: int = 0


def slot_of(event: Recorded[Booked]) -> datetime:
    return event.data.slot


@projection("slots", key=slot_of)
def slots(row: Slot | None, event: Recorded[Booked]) -> Slot:
    row = row or Slot(event.data.slot)
    return replace(row, n=row.n + 1)


class ByKind(BaseModel):
    """A native enum of PostgreSQL in the key; PostgreSQL sorts it in the order of declaration."""

    model_config = ConfigDict(frozen=True)
    kind: Annotated[Key[Kind], EnumType(Kind, name="vehicle_kind")]
    size: Key[Size]
    wall: Annotated[Key[datetime], DateTime()]
    n: int = 0


def kind_of(event: Recorded[Booked]) -> tuple[Kind, Size, datetime]:
    return event.data.kind, event.data.size, event.data.slot.replace(tzinfo=None)


@projection("kinds", key=kind_of)
def kinds(row: ByKind | None, event: Recorded[Booked]) -> ByKind:
    kind, size, wall = kind_of(event)
    row = row or ByKind(kind=kind, size=size, wall=wall)
    return row.model_copy(update={"n": row.n + 1})


@dataclass(frozen=True, slots=True)
class Price:
    price: Annotated[Key[Decimal], Numeric(8, 2)]
    n: Annotated[int, mapped_column(index=True)] = 0


def prices_of(event: Recorded[Booked]) -> Sequence[Decimal]:
    return [event.data.price, -event.data.price]


@projection("prices", keys=prices_of)
def prices(row: Price | None, event: Recorded[Booked], price: Decimal) -> Price | None:
    n = 1 if row is None else row.n + 1
    return None if n == 2 else Price(price, n)


@dataclass(frozen=True, slots=True)
class Posting:
    position: Key[int]
    kind: Kind
    price: Decimal


@entries("postings")
def postings(event: Recorded[Booked]) -> list[Posting]:
    return [Posting(event.position, event.data.kind, event.data.price)]


visits = App("visits", aggregates=[Visit], projections=[slots, kinds, prices, postings])
NAMES = list(visits.projections)
