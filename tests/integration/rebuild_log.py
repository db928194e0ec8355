"""Helpers for the tests of rebuilds: an app in a folder outside of `sys.path`, its log and its tables."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

from sqlalchemy import func, select

from eventjet.projections.app_ref import AppRef
from eventjet.projections.fold import Fold
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.settings import Settings
from eventjet.sql.checkpoint import DECLARED, Checkpoint, read
from eventjet.sql.database import Database
from eventjet.sql.locations import located
from tests.integration.ledger_log import Ledger
from tests.logs import fresh_name
from tests.tables import reading

APP = string.Template('''
"""The app $name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

from sqlalchemy import JSON, BigInteger, CheckConstraint, Column, DateTime, Enum, Index, Integer, MetaData, Numeric
from sqlalchemy import String, Table

from eventjet import App, Recorded, aggregate, entries, event, projection


@event("account.opened")
class Opened:
    owner: str


@event("account.deposited")
class Deposited:
    amount: Decimal


@event("account.sent")
class Sent:
    amount: Decimal
    to: str


@event("account.closed")
class Closed:
    pass


AccountEvent = Opened | Deposited | Sent | Closed


@aggregate("ledger")
class Account:
    owner: str | None = None

    def evolve(self, event: AccountEvent) -> Account:
        return self


metadata = MetaData()


@dataclass(frozen=True, slots=True)
class Balance:
    account_id: str
    owner: str | None
    amount: Decimal
    kind: str
    opened: datetime
    notes: Sequence[str]
    events: int


balances_table = Table(
    "balances",
    metadata,
    Column("account_id", String(60), primary_key=True),
    Column("owner", String(60)),
    Column("amount", Numeric(12, 2), nullable=False, index=True),
    Column("kind", Enum("small", "large", name="kind"), nullable=False),
    Column("opened", DateTime(timezone=True), nullable=False),
    Column("notes", JSON, nullable=False),
    Column("events", Integer, nullable=False),
    Index("ix_balances_owner", "owner"),
    CheckConstraint("events >= 0"),
)


@projection("balances", table=balances_table)
def balances(row: Balance | None, event: Recorded[AccountEvent]) -> Balance | None:
    if row is None:
        row = Balance(event.aggregate_id, None, Decimal(0), "small", event.recorded_at, [], 0)
    row = replace(row, events=row.events + 1, kind="large" if row.amount > 100 else "small")
    match event.data:
        case Opened(owner=owner):
            return replace(row, owner=owner)
        case Deposited(amount=amount):
            return replace(row, amount=row.amount + amount)
        case Sent(amount=amount, to=to):
            return replace(row, amount=row.amount - amount, notes=[*row.notes, to][-3:])
        case Closed():
            return None


@dataclass(frozen=True, slots=True)
class Owner:
    owner: str
    accounts: int


owners_table = Table(
    "owners", metadata, Column("owner", String(60), primary_key=True), Column("accounts", Integer, nullable=False)
)


def owner_of(event: Recorded[Opened]) -> str:
    return event.data.owner


@projection("owners", table=owners_table, key=owner_of)
def owners(row: Owner | None, event: Recorded[Opened]) -> Owner | None:
    return Owner(event.data.owner, row.accounts + 1 if row else 1)


@dataclass(frozen=True, slots=True)
class Turnover:
    account_id: str
    amount: Decimal


turnover_table = Table(
    "turnover", metadata, Column("account_id", String(60), primary_key=True), Column("amount", Numeric(12, 2))
)


def both(event: Recorded[Sent]) -> list[str]:
    return [event.aggregate_id, event.data.to]


@projection("turnover", table=turnover_table, keys=both)
def turnover(row: Turnover | None, event: Recorded[Sent], key: str) -> Turnover | None:
    before = row.amount if row else Decimal(0)
    return Turnover(key, before + event.data.amount)


@dataclass(frozen=True, slots=True)
class Movement:
    position: int
    account_id: str
    amount: Decimal


movements_table = Table(
    "movements",
    metadata,
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("account_id", String(60), nullable=False),
    Column("amount", Numeric(12, 2), nullable=False),
)


@entries("movements", table=movements_table)
def movements(event: Recorded[Deposited | Sent]) -> Movement | None:
    return Movement(event.position, event.aggregate_id, event.data.amount)


app = App("$name", aggregates=[Account], projections=[balances, owners, turnover, movements])
''')

ALL = ("balances", "owners", "turnover", "movements")


class Book(Ledger):
    """An app in its own folder, with its log and its database."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        name = fresh_name("book")
        (folder / f"{name}.py").write_text(APP.substitute(name=name))
        self.ref = AppRef.parse(f"{name}:app", folder)
        wired: Any = self.ref.load()
        super().__init__(settings, name, wired.catalog, dict(wired.projections))
        self.create()

    def fill(self, count: int, accounts: int = 500, seed: int = 1) -> int:
        """Append random histories; return the last position."""
        return self.append(self._history(count, accounts, seed))

    def rows(self, name: str = "balances") -> list[Any]:
        """Return the live rows, by key."""
        resolved = self.projections[name]
        table = located(resolved.table, DECLARED, self.where.dialect)
        with reading(self.settings.database) as connection:
            query = select(table).order_by(*table.primary_key.columns)
            return sorted((resolved.row_type(*row) for row in connection.execute(query)), key=key_of(resolved))

    def count(self, name: str = "balances") -> int:
        table = located(self.projections[name].table, DECLARED, self.where.dialect)
        with reading(self.settings.database) as connection:
            return connection.scalar(select(func.count()).select_from(table)) or 0

    def checkpoint(self, name: str = "balances") -> Checkpoint | None:
        with reading(self.settings.database) as connection:
            return read(connection, name, self.projections[name].revision)

    def folded(self, last: int, name: str = "balances") -> list[Any]:
        """Return the rows of a live fold, with events in small batches as in a worker."""
        resolved = self.projections[name]
        fold = Fold(resolved, RowCodec(resolved.table, resolved.row_type, self.where.dialect))
        events = [event for event in self.recorded(last) if isinstance(event.data, resolved.events)]
        rows: dict[Any, Any] = {}
        for start in range(0, len(events), 700):
            rows |= fold(rows, events[start : start + 700])
        return sorted((row for row in rows.values() if row is not None), key=key_of(resolved))

    def altered(self, *replacements: tuple[str, str]) -> AppRef:
        """Return the same app over the same log, with other code."""
        folder = Path(self.ref.path[0])
        source = (folder / f"{self.ref.module}.py").read_text()
        for old, new in replacements:
            assert old in source
            source = source.replace(old, new)
        module = f"{self.ref.module}_{uuid4().hex[:6]}"
        (folder / f"{module}.py").write_text(source)
        return AppRef.parse(f"{module}:app", folder)

    def _history(self, count: int, accounts: int, seed: int) -> Iterator[tuple[str, Any]]:
        chance = random.Random(seed)
        types = {event_type.__name__: event_type for event_type in self.projections["balances"].events}
        for _ in range(count):
            kind = chance.random()
            amount = Decimal(chance.randrange(1, 10_000)) / 100
            if kind < 0.1:
                event = types["Opened"](owner=f"o'{chance.randrange(50)}")
            elif kind < 0.12:
                event = types["Closed"]()
            elif kind < 0.6:
                event = types["Deposited"](amount=amount)
            else:
                event = types["Sent"](amount=amount, to=f"a-{chance.randrange(accounts)}")
            yield f"a-{chance.randrange(accounts)}", event


def key_of(resolved: ResolvedProjection) -> Any:
    return lambda row: tuple(getattr(row, name) for name in resolved.key_columns)


def remains(where: Database) -> list[str]:
    """Return what a rebuild left in the database or its folder."""
    engine = where.sync_engine()
    if where.dialect.name == "postgresql":
        query = (
            "select nspname from pg_namespace where starts_with(nspname, 'ej_') "
            "union all select run from eventjet_rebuild"
        )
        with engine.connect() as connection:
            return [str(row[0]) for row in connection.exec_driver_sql(query)]
    path = Path(str(engine.url.database))
    return [leftover.name for leftover in path.parent.glob(f"{path.name}.ej_*")]
