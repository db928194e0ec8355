"""An app with a read model of each kind for the screens that show rows: a bank, its letters, and a SQL projection."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, Text, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import App, Jet, Personal, Recorded, SqlProjection, aggregate, event, projection
from eventjet.console import console
from eventjet.dev.nats import NatsServer
from eventjet.examples.bank.account import Account, AccountEvent, Deposited, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.examples.bank.read_models import balances, postings
from eventjet.rebuild import rebuild
from eventjet.settings import Settings

metadata = MetaData()
letters_table = Table(
    "letters", metadata, Column("letter", String(4), primary_key=True), Column("events", Integer, nullable=False)
)
lines_table = Table(
    "book_lines",
    metadata,
    Column("account_id", String(400), primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("owner", Text),
)
days_table = Table("book_days", metadata, Column("n", Integer, primary_key=True, autoincrement=False))
people_table = Table(
    "people",
    metadata,
    Column("person_id", String(200), primary_key=True),
    Column("name", Text, nullable=False),
    Column("renamed", Integer, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Letter:
    letter: str
    events: int


def first_letter(event: Recorded[AccountEvent]) -> str:
    return event.aggregate_id[0]


@projection("letters", table=letters_table, key=first_letter)
def letters(row: Letter | None, event: Recorded[AccountEvent]) -> Letter:
    return replace(row, events=row.events + 1) if row else Letter(first_letter(event), 1)


book = SqlProjection("book", tables=[lines_table, days_table])


@book.handler
async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None:
    row = {"account_id": event.aggregate_id, "position": event.position, "owner": event.data.owner}
    await connection.execute(insert(lines_table).values(row))


@book.handler
async def deposited(event: Recorded[Deposited], connection: AsyncConnection) -> None:
    await connection.execute(insert(days_table).values(n=event.position))


shelf = App(
    "shelf",
    aggregates=[Account],
    projections=[balances, postings, letters, book],
    upcasters=[withdrawn_has_a_reason],
)


@event("person.named")
class Named:
    name: Personal[str]


@aggregate("person")
class Person:
    names: int = 0

    def rename(self, name: str) -> Named:
        return Named(name=name)

    def evolve(self, event: Named) -> Person:
        return replace(self, names=self.names + 1)


@dataclass(frozen=True, slots=True)
class PersonRow:
    person_id: str
    name: Personal[str]
    renamed: int


@projection("people", table=people_table)
def people(row: PersonRow | None, event: Recorded[Named]) -> PersonRow:
    return PersonRow(event.aggregate_id, event.data.name, row.renamed + 1 if row else 0)


register = App("register", aggregates=[Person], projections=[people])


def settings_of(nats: NatsServer, database: str) -> Settings:
    return Settings.load({"servers": nats.url, "database": database}, environ={})


@asynccontextmanager
async def begun(app: App, settings: Settings) -> AsyncGenerator[Jet]:
    """Connect to the app's log, created first; afterwards make its read models."""
    async with app.connect(settings) as jet:
        await jet.init()
        yield jet
    await rebuild(app, list(app.projections), settings, engine="local")


class PatientClient(httpx.AsyncClient):
    """A client that loads a page again when the page says that something was late, as on an overloaded machine."""

    async def get(self, url: Any, **options: Any) -> httpx.Response:  # type: ignore[override]  of what tests pass
        for _ in range(60):
            answer = await super().get(url, **options)
            if "did not answer within" not in answer.text and "so it is not asked again yet" not in answer.text:
                break
        return answer


@asynccontextmanager
async def looking(app: App, settings: Settings) -> AsyncGenerator[httpx.AsyncClient]:
    """Yield a client of the app's console, which is closed at the end."""
    site = console(app, settings=settings)
    transport = httpx.ASGITransport(site)
    async with (
        site.router.lifespan_context(site),
        PatientClient(transport=transport, base_url="http://console.example", timeout=240) as client,
    ):
        yield client
