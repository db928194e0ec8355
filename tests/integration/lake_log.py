"""Helpers for the tests of lakes: a log with all kinds of fields, and tables read by other programs."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from eventjet import Blob, event, upcaster
from eventjet.codec.catalog import Catalog
from eventjet.dev.nats import NatsServer
from eventjet.domain.personal import Personal
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import ask_once
from eventjet.log.topology import IDENTITY
from eventjet.settings import Settings
from tests import logs
from tests.integration.ledger_log import Ledger
from tests.integration.restoring import seal

FORMATS = ("delta", "iceberg")


class Kind(Enum):
    CASH = "cash"
    WIRE = "wire"


@dataclass(frozen=True)
class Line:
    article: str
    price: Decimal
    tags: list[str]


@event("order.placed")
class Placed:
    total: Annotated[Decimal, Field(max_digits=12, decimal_places=2)]
    at: datetime
    kind: Kind
    lines: list[Line]
    due: date | None = None
    note: str | None = None
    customer: UUID = UUID(int=7)
    after: timedelta = timedelta(0)
    limits: dict[str, int] = Field(default_factory=dict)
    pauses: list[timedelta] = Field(default_factory=list)
    document: Blob | None = None


@event("order.paid", schema=2)
class Paid:
    amount: Decimal
    by: str


@event("customer.known")
class Known:
    email: Personal[str]
    country: str


@upcaster("order.paid", schema=1)
def paid_by_somebody(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "by": "somebody"}


CATALOG = Catalog([Placed, Paid, Known], [paid_by_somebody])


def lake_log(nats: NatsServer, events: int = 0, catalog: Catalog = CATALOG) -> Ledger:
    """Return a new log with an identity and this number of events."""
    log = Ledger(Settings.load({"servers": nats.url}, {}), catalog=catalog, projections={})
    log.create()
    if events:
        fill(log, events)
    return log


def fill(log: Ledger, count: int) -> int:
    """Append random events; returns the last position."""
    chance = random.Random(count)
    return log.append((f"a-{chance.randrange(20)}", some_event(chance)) for _ in range(count))


def archive_of(log: Ledger, folder: Path) -> str:
    """Archive the whole log; return the URL of the archive."""
    identity = ask_once(log.endpoint, stream_info(log.name)).metadata[IDENTITY]
    return seal(folder, logs.records_of(log.endpoint, log.name), identity, name=log.name)


def some_event(chance: random.Random) -> Any:
    """Return a random event of any type."""
    cents = Decimal(chance.randrange(1, 100_000)) / 100
    match chance.randrange(4):
        case 0:
            return Paid(amount=cents, by="ada")
        case 1:
            return Known(email=f"{chance.random()}@example.org", country="PT")
        case _:
            return Placed(
                total=cents,
                at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=chance.randrange(10**12)),
                kind=chance.choice(list(Kind)),
                lines=[Line("a", cents / 7 // Decimal("0.0001") / 10_000, ["x", "y"])] * chance.randrange(3),
                due=chance.choice([None, date(2026, 2, 3)]),
                note=chance.choice([None, "ü"]),
                after=timedelta(microseconds=chance.randrange(10**9)),
                limits={"one": 1} if chance.random() < 0.5 else {},
                pauses=[timedelta(seconds=1)] * chance.randrange(2),
                document=chance.choice([None, Blob.of(b"text", name="a.txt")]),
            )


def arrow_of(url: Path, name: str, table_format: str) -> Any:
    """Read a table into Arrow without eventjet."""
    if table_format == "delta":
        from deltalake import DeltaTable

        return DeltaTable(url / name).to_pyarrow_table()
    return iceberg_of(url, name).scan().to_arrow()


def iceberg_of(url: Path, name: str) -> Any:
    """Return an Iceberg table from the lake's own catalog, in any namespace."""
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("eventjet", type="sql", uri=f"sqlite:///{url}/catalog.db", warehouse=f"file://{url}")
    with closing(catalog):  # which connects again if the table is written to
        (namespace,) = catalog.list_namespaces()
        return catalog.load_table((*namespace, name))


def positions_of(url: Path, name: str, table_format: str) -> list[int]:
    positions: list[int] = arrow_of(url, name, table_format).column("position").to_pylist()
    return sorted(positions)
