"""Logs in which one event of a hundred cannot be applied, as they are stored, and the expected read models."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice

from sqlalchemy import BigInteger, Column, Integer, MetaData, Numeric, String, Table, select, text

from eventjet import App, Recorded, projection
from eventjet.codec.headers import header_block
from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.database import Database, dialect_of
from eventjet.sql.dialect import READ_ONLY
from eventjet.sql.locations import located
from eventjet.sql.own_tables import quarantine
from tests.faults.tally import Added, Tally, Total, added
from tests.integration.ledger_log import Ledger
from tests.logs import NEXT, fresh_name
from tests.tables import reading

POISON = Decimal("666.00")
CHUNK = 20_000
MENDED = "EVENTJET_TEST_MENDED"
"""With this variable, a worker of the fault tests applies the poison."""
KINDS = ("poison", "unknown type", "bad JSON", "wrong version", "wrong schema", "not UTF-8")

wary_table = Table(
    "wary",
    MetaData(),
    Column("entity", String(40), primary_key=True),
    Column("additions", Integer, nullable=False),
    Column("amount", Numeric(14, 2), nullable=False),
    Column("last", Integer, nullable=False),
    Column("disordered", Integer, nullable=False),
    Column("digest", BigInteger, nullable=False),
)


@projection("wary", table=wary_table, on_error="quarantine")
def wary(row: Total | None, event: Recorded[Added]) -> Total:
    if event.data.amount == POISON:
        raise ValueError("poison")
    return added(row, event.aggregate_id, event.data.number, event.data.amount)


@projection("wary", table=wary_table, on_error="quarantine")
def mended(row: Total | None, event: Recorded[Added]) -> Total:
    """Apply the poison as well."""
    return added(row, event.aggregate_id, event.data.number, event.data.amount)


def wary_app(name: str) -> App:
    """Return the app whose read model quarantines what it cannot apply."""
    return App(name, aggregates=[Tally], projections=[wary])


@dataclass(slots=True)
class Mixture:
    """A log as it is stored; each bad event has an entity of its own, whose later events wait behind it."""

    events: int
    bad: int
    entities: int
    quarantined: dict[int, str] = field(default_factory=dict[int, str])
    """Position → kind of each bad event."""
    behind: set[int] = field(default_factory=set[int])
    rows: dict[str, Total] = field(default_factory=dict[str, Total])
    seed: int = 11

    def store(self, ledger: Ledger) -> int:
        """Append everything; return the last position."""
        records = self._records()
        last = 0
        while chunk := list(islice(records, CHUNK)):
            last = ledger.append_raw(chunk)
        return last

    def _records(self) -> Iterator[tuple[str, bytes, bytes]]:
        chance = random.Random(self.seed)
        wrong = set(chance.sample(range(1, self.events + 1), self.bad))
        blocked: set[str] = set()
        kinds = 0
        for position in range(1, self.events + 1):
            entity = f"e-{chance.randrange(self.entities)}"
            if position in wrong:
                while entity in blocked:
                    entity = f"e-{chance.randrange(self.entities)}"
                kind = KINDS[kinds % len(KINDS)]
                kinds += 1
                blocked.add(entity)
                self.quarantined[position] = kind
                yield entity, *_bad(kind, f"{self.seed}-{position}")
                continue
            before = self.rows.get(entity)
            amount = Decimal(chance.randrange(1, 60_000)) / 100
            data = Added(number=before.last + 1 if before else 1, amount=amount)
            if entity in blocked:
                self.behind.add(position)
            else:
                self.rows[entity] = added(before, entity, data.number, data.amount)
            yield (
                entity,
                _headers(f"{self.seed}-{position}"),
                b'{"number":%d,"amount":"%s"}' % (data.number, str(amount).encode()),
            )


@contextmanager
def wary_log(events: int, bad: int, entities: int) -> Generator[tuple[Ledger, Mixture]]:
    """Store such a log, on a server of its own that does not wait for the disk."""
    with NatsServer(sync_interval="1m") as nats:
        app = wary_app(fresh_name("wary"))
        ledger = Ledger(Settings(servers=(nats.url,)), app.name, app.catalog, dict(app.projections))
        ledger.create()
        mixture = Mixture(events, bad, entities)
        assert mixture.store(ledger) == events
        yield ledger, mixture


@dataclass(frozen=True, slots=True)
class QuarantineRow:
    """A row of the quarantine, without times."""

    position: int
    aggregate_id: str
    resolution: str
    reason: str
    payload: bytes | None


def position_of(database: str) -> int:
    """Return the position of the checkpoint; the projection has not failed."""
    with reading(database) as connection:
        row = connection.execute(text("select position, state, reason from eventjet_projection")).one_or_none()
    assert row is None or row[1] != "failed", row
    return 0 if row is None else int(row[0])


def state_of(database: str) -> tuple[dict[str, Total], list[QuarantineRow]]:
    """Return the rows by entity, and everything in quarantine."""
    columns = quarantine.c
    query = select(columns.position, columns.aggregate_id, columns.resolution, columns.reason, columns.payload)
    engine = Database(database).sync_engine()
    try:
        with engine.connect().execution_options(**{READ_ONLY: True}) as connection:
            table = located(wary_table, DECLARED, dialect_of(engine))
            rows = [Total(*row) for row in connection.execute(select(table))]
            quarantined = [QuarantineRow(*row) for row in connection.execute(query.order_by(columns.position))]
            return {row.entity: row for row in rows}, quarantined
    finally:
        engine.dispose()


def _headers(event_id: str, type_name: str = "tally.added", schema: str = "1", version: str = NEXT) -> bytes:
    pairs = [("Nats-Msg-Id", event_id), ("Ej-Type", type_name), ("Ej-Schema", schema), ("Ej-Version", version)]
    return header_block(pairs)


def _bad(kind: str, event_id: str) -> tuple[bytes, bytes]:
    """Return the header block and body of a bad event."""
    good = b'{"number":1,"amount":"1.00"}'
    return {
        "poison": (_headers(event_id), b'{"number":1,"amount":"666.00"}'),
        "unknown type": (_headers(event_id, "tally.stranger"), good),
        "bad JSON": (_headers(event_id), b'{"number":1,'),
        "wrong version": (_headers(event_id, version="first"), good),
        "wrong schema": (_headers(event_id, schema="-1"), good),
        "not UTF-8": (_headers(event_id), b'{"number":1,"amount":"\xff\xfe"}'),
    }[kind]
