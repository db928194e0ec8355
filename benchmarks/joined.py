"""Rows keyed by the state of an aggregate beside rows keyed by the event: `python -m benchmarks.joined`.

The same log gives the same rows either way, as each event has the customer that only the first would need. The worker
catches up in a process of its own; the local engine rebuilds in this one. They take turns, and every lap's rows are
compared. CPU holds for a busy machine, too; rates only for a quiet one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import select

from benchmarks.laps import worker_lap
from benchmarks.log import chained, fill
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.usage import own_cpu_s
from eventjet import App, AppRef, Key, Recorded, aggregate, by_state, event, projection
from eventjet.dev import NatsServer, PostgresServer
from eventjet.rebuild import rebuild
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY
from eventjet.sql.locations import create_tables

EVENT, STATE = "key in the event", "key from the state"
_EVENTS_EACH = 25


@event("order.changed")
class Changed:
    customer: str
    amount: int
    memo: str


@aggregate("order")
class Order:
    customer: str = ""
    total: int = 0

    def evolve(self, event: Changed) -> Order:
        return replace(self, customer=self.customer or event.customer, total=self.total + event.amount)


@dataclass(frozen=True, slots=True)
class Spend:
    customer: Key[str]
    amount: int = 0
    events: int = 0


def customer_of(event: Recorded[Changed]) -> str:
    return event.data.customer


def customer_of_order(order: Order) -> str:
    return order.customer


@projection("spend", key=customer_of)
def spend_by_event(row: Spend | None, event: Recorded[Changed]) -> Spend:
    row = row or Spend(event.data.customer)
    return Spend(row.customer, row.amount + event.data.amount, row.events + 1)


@projection("spend", key=by_state(Order, customer_of_order, on_change="keep"))
def spend_by_state(row: Spend | None, event: Recorded[Changed], order: Order) -> Spend:
    row = row or Spend(order.customer)
    return Spend(row.customer, row.amount + event.data.amount, row.events + 1)


by_event = App("benchjoined", aggregates=[Order], projections=[spend_by_event])
by_order = App("benchjoined", aggregates=[Order], projections=[spend_by_state])
APPS = {EVENT: ("by_event", by_event), STATE: ("by_order", by_order)}


def events(count: int) -> Iterator[tuple[str, Changed]]:
    """Return (order, event) pairs; an order has about 25 events, and a customer 20 orders."""
    chance = random.Random(1)
    orders = max(1, count // _EVENTS_EACH)
    for _ in range(count):
        number = chance.randrange(orders)
        memo = f"changed at the desk {chance.randrange(1_000_000)}"
        yield f"o-{number}", Changed(customer=f"c-{number // 20}", amount=chance.randrange(1_000), memo=memo)


def rows_of(url: str) -> list[tuple[Any, ...]]:
    with Database(url).sync_engine().connect().execution_options(**{READ_ONLY: True}) as connection:
        return sorted(map(tuple, connection.execute(select(spend_by_event.table))))


def main(sizes: argparse.Namespace) -> int:
    catch_up = Figures("catch-up of rows with a joined key", "events/s", higher_is_better=True)
    catch_up_cpu = Figures("catch-up of rows with a joined key: CPU", "µs/event", higher_is_better=False)
    local = Figures("local rebuild of rows with a joined key", "events/s", higher_is_better=True)
    local_cpu = Figures("local rebuild of rows with a joined key: CPU", "µs/event", higher_is_better=False)
    with (
        tempfile.TemporaryDirectory(prefix="eventjet-bench-") as folder,
        NatsServer(sync_interval="2m") as nats,
        PostgresServer() as postgres,
    ):
        ids = iter(lambda: str(uuid.uuid4()), "")
        fill(nats.url, sizes.events, by_event.name, chained(by_event, "order", events(sizes.events), ids))
        print(f"{conditions()}; a log of {sizes.events:,} events of {sizes.events // _EVENTS_EACH:,} orders")
        for number in range(sizes.runs):
            for kind in ("PostgreSQL", "SQLite"):
                tables: list[list[tuple[Any, ...]]] = []
                for key, (place, app) in APPS.items():
                    name = f"b{number}_{place}"
                    url = (
                        postgres.create_database(name)
                        if kind == "PostgreSQL"
                        else f"sqlite:///{Path(folder) / name}.db"
                    )
                    create_tables(Database(url).sync_engine(), app.projections.values())
                    lap = worker_lap(nats.url, url, sizes.events, f"{_MODULE}:{place}")
                    subject = f"{key}, {kind}"
                    catch_up.add(subject, lap.count / lap.wall_s)
                    catch_up_cpu.add(subject, lap.client_cpu_s / lap.count * 1e6)
                    tables.append(rows_of(url))
                    began, cpu_s = time.monotonic(), own_cpu_s()
                    settings = Settings(servers=(nats.url,), database=url)
                    asyncio.run(rebuild(AppRef.parse(f"{_MODULE}:{place}"), ["spend"], settings, engine="local"))
                    local.add(subject, sizes.events / (time.monotonic() - began))
                    local_cpu.add(subject, (own_cpu_s() - cpu_s) / sizes.events * 1e6)
                    tables.append(rows_of(url))
                if any(rows != tables[0] for rows in tables) or sum(row[2] for row in tables[0]) != sizes.events:
                    raise RuntimeError(f"rows differ on {kind}")
    figures = [catch_up, catch_up_cpu, local, local_cpu]
    kinds = ("PostgreSQL", "SQLite")
    report(figures, [Comparison(each, f"{STATE}, {kind}", f"{EVENT}, {kind}") for each in figures for kind in kinds])
    return 0


_MODULE = "benchmarks.joined"


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=2)
    parser.add_argument("--events", type=int, default=100_000, help="events in the log (%(default)s)")
    sys.exit(main(parser.parse_args()))
