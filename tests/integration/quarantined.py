"""What the tests of the quarantine share: a projection that parks, bad events of every kind, and what must become of
them by the plainest loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from sqlalchemy import Connection, select

from eventjet.codec.headers import header_block
from eventjet.codec.records import Decoder
from eventjet.domain.recorded import Recorded
from eventjet.errors import CodecError, RowRefused
from eventjet.jetstream.reader import read_range
from eventjet.projections.resolve import resolve
from eventjet.projections.row_codec import RowCodec
from eventjet.sql.own_tables import quarantine
from eventjet.sql.postgres import POSTGRES
from tests.integration.ledger_log import Ledger, history
from tests.integration.projecting import CATALOG, Added, Balance, Opened, balances, rows_of
from tests.logs import block
from tests.tables import reading

BAD = Decimal(666)


class Poisoned(Exception):
    """What the function raises for the poison."""


def wary(row: Balance | None, event: Recorded[Any]) -> Balance | None:
    if isinstance(event.data, Added) and event.data.amount == BAD:
        raise Poisoned(f"no {event.data.amount}\nplease")
    return balances.fold(row, event)


PARKING = resolve(replace(balances, on_error="quarantine"), CATALOG)
PARKING = replace(PARKING, declared=replace(PARKING.declared, fold=wary))  # type: ignore[arg-type]
MENDED = replace(PARKING, declared=replace(PARKING.declared, fold=balances.fold))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class QuarantineRow:
    """A row of the quarantine, without times."""

    position: int
    aggregate: str
    aggregate_id: str
    resolution: str
    reason: str
    payload: bytes | None


def bad_records() -> dict[str, tuple[bytes, bytes]]:
    """Kind → (headers, body) of an event that cannot be taken."""
    added = CATALOG.encode(Added(amount=Decimal(1))).body
    return {
        "poison": (block("ledger.added"), CATALOG.encode(Added(amount=BAD)).body),
        "unknown": (block("ledger.stranger"), b"{}"),
        "json": (block("ledger.added"), b"{"),
        "version": (header_block([("Ej-Type", "ledger.added"), ("Ej-Schema", "1"), ("Ej-Version", "x")]), added),
        "schema": (header_block([("Ej-Type", "ledger.added"), ("Ej-Schema", "-"), ("Ej-Version", "1")]), added),
        "headers": (b"NATS/1.0\r\nNats-Msg-Id: x\r\n\r\n", added),
        "no headers": (b"", added),
        "encoding": (header_block([("Ej-Type", "ledger.added"), ("Ej-Schema", "1"), ("Ej-Version", "1"),
                                   ("Ej-Encoding", "zip")]), added),
        "time": (block("ledger.added", Ej_Recorded_At="0001-01-01T00:00:00+23:59"), added),
        "cut": (block("ledger.added", Ej_Recorded_At="2026-01-01T00:00:00Z")[:-4], added),
        "digits": (block("ledger.added", Ej_Version="1" * 5_000), added),
        "depth": (block("ledger.added"), b'{"amount":' * 5_000),
        "utf-8": (block("ledger.added"), b'{"amount":"\xff"}'),
        "column": (block("ledger.opened"), CATALOG.encode(Opened(owner="x" * 21)).body),
        "scale": (block("ledger.added"), CATALOG.encode(Added(amount=Decimal("0.005"))).body),
    }  # fmt: skip


def mixed(count: int, *, every: int = 20, accounts: int = 40, seed: int = 5) -> list[tuple[str, bytes, bytes]]:
    """Random histories with a bad event now and then, of every kind in turn."""
    chance = random.Random(seed)
    kinds = list(bad_records())
    found: list[tuple[str, bytes, bytes]] = []
    for number, (aggregate_id, data) in enumerate(history(count, accounts, seed)):
        encoded = CATALOG.encode(data)
        found.append((aggregate_id, block(encoded.type_name, encoded.schema), encoded.body))
        if number % every == 0:
            headers, body = bad_records()[kinds[number // every % len(kinds)]]
            found.append((f"a-{chance.randrange(accounts)}", headers, body))
    return found


def expected(
    ledger: Ledger,
    last: int,
    fold: Callable[..., Any] = wary,
    *,
    dropped: Iterable[int] = (),
) -> tuple[list[Balance], dict[int, str]]:
    """(rows, position → parked or blocked) by the plainest loop over the log, one event at a time."""
    decode = Decoder(CATALOG, PARKING.events)
    codec = RowCodec(PARKING.table, PARKING.row_type, POSTGRES)
    rows: dict[str, Any] = {}
    held: set[bytes] = set()
    kept: dict[int, str] = {}
    for records in read_range(ledger.endpoint, ledger.name, 1, last + 1):
        for record in records:
            position, subject = record[0], record[2]
            if position in dropped:
                continue
            try:
                event = decode(record)
                if event is None:
                    continue
                if subject in held:
                    kept[position] = "blocked"
                    continue
                row = fold(rows.get(event.aggregate_id), event)
                rows[event.aggregate_id] = None if row is None else codec.normalise(row)
            except (Poisoned, RowRefused, CodecError):
                kept[position] = "blocked" if subject in held else "parked"
                held.add(subject)
    return sorted((row for row in rows.values() if row is not None), key=lambda row: row.account_id), kept


def quarantine_rows(connection: Connection, name: str = "balances", revision: int = 1) -> list[QuarantineRow]:
    columns = quarantine.c
    query = select(
        columns.position, columns.aggregate, columns.aggregate_id, columns.resolution, columns.reason, columns.payload
    ).where(columns.projection == name, columns.revision == revision)
    return [QuarantineRow(*row) for row in connection.execute(query.order_by(columns.position))]


def state_of(ledger: Ledger) -> tuple[list[Any], list[QuarantineRow]]:
    """(live rows, quarantine)."""
    with reading(ledger.settings.database) as connection:
        return rows_of(connection, PARKING), quarantine_rows(connection)


def resolutions(kept: Iterable[QuarantineRow]) -> dict[int, str]:
    return {one.position: one.resolution for one in kept}
