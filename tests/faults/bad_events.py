"""Logs in which one event of a hundred cannot be taken, made as they are stored, and what must become of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice

from sqlalchemy import BigInteger, Column, Integer, MetaData, Numeric, String, Table

from eventjet import App, Recorded, projection
from eventjet.codec.envelope import header_block
from tests.faults.tally import Added, Tally, Total, added
from tests.integration.ledger_log import Ledger
from tests.logs import NEXT

POISON = Decimal("666.00")
CHUNK = 20_000
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


def wary_app(name: str) -> App:
    """The app whose read model parks what it cannot take."""
    return App(name, aggregates=[Tally], projections=[wary])


@dataclass(slots=True)
class Mixture:
    """A log, made as it is stored; each bad event has an entity of its own, whose later events wait behind it."""

    events: int
    bad: int
    entities: int
    parked: dict[int, str] = field(default_factory=dict[int, str])
    """Position → kind of each bad event."""
    behind: set[int] = field(default_factory=set[int])
    rows: dict[str, Total] = field(default_factory=dict[str, Total])

    def store(self, ledger: Ledger) -> int:
        """Append everything; returns the last position."""
        made = self._records()
        last = 0
        while chunk := list(islice(made, CHUNK)):
            last = ledger.append_raw(chunk)
        return last

    def _records(self) -> Iterator[tuple[str, bytes, bytes]]:
        chance = random.Random(11)
        wrong = set(chance.sample(range(1, self.events + 1), self.bad))
        held: set[str] = set()
        kinds = 0
        for position in range(1, self.events + 1):
            entity = f"e-{chance.randrange(self.entities)}"
            if position in wrong:
                while entity in held:
                    entity = f"e-{chance.randrange(self.entities)}"
                kind = KINDS[kinds % len(KINDS)]
                kinds += 1
                held.add(entity)
                self.parked[position] = kind
                yield entity, *_bad(kind, position)
                continue
            before = self.rows.get(entity)
            amount = Decimal(chance.randrange(1, 60_000)) / 100
            data = Added(number=before.last + 1 if before else 1, amount=amount)
            if entity in held:
                self.behind.add(position)
            else:
                self.rows[entity] = added(before, entity, data.number, data.amount)
            yield entity, _headers(position), b'{"number":%d,"amount":"%s"}' % (data.number, str(amount).encode())


def _headers(position: int, type_name: str = "tally.added", schema: str = "1", version: str = NEXT) -> bytes:
    pairs = [("Nats-Msg-Id", f"id-{position}"), ("Ej-Type", type_name), ("Ej-Schema", schema), ("Ej-Version", version)]
    return header_block(pairs)


def _bad(kind: str, position: int) -> tuple[bytes, bytes]:
    """(header block, body)."""
    good = b'{"number":1,"amount":"1.00"}'
    return {
        "poison": (_headers(position), b'{"number":1,"amount":"666.00"}'),
        "unknown type": (_headers(position, "tally.stranger"), good),
        "bad JSON": (_headers(position), b'{"number":1,'),
        "wrong version": (_headers(position, version="first"), good),
        "wrong schema": (_headers(position, schema="-1"), good),
        "not UTF-8": (_headers(position), b'{"number":1,"amount":"\xff\xfe"}'),
    }[kind]
