"""Helpers for the tests of the quarantine: bad events of every kind, and the expected rows."""

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
    """The fold raises it for the amount `BAD`."""


def wary(row: Balance | None, event: Recorded[Any]) -> Balance | None:
    if isinstance(event.data, Added) and event.data.amount == BAD:
        raise Poisoned(f"no {event.data.amount}\nplease")
    return balances.fold(row, event)


QUARANTINING = resolve(replace(balances, on_error="quarantine"), CATALOG)
QUARANTINING = replace(QUARANTINING, declared=replace(QUARANTINING.declared, fold=wary))  # type: ignore[arg-type]
MENDED = replace(QUARANTINING, declared=replace(QUARANTINING.declared, fold=balances.fold))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class QuarantineRow:
    """A row of the quarantine table, without times."""

    position: int
    aggregate: str
    aggregate_id: str
    resolution: str
    reason: str
    payload: bytes | None


def bad_records() -> dict[str, tuple[bytes, bytes]]:
    """Return (headers, body) of an event that cannot be handled, by kind."""
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
    """Return random histories with a bad event after every `every` events, of each kind in turn."""
    chance = random.Random(seed)
    kinds = list(bad_records())
    records: list[tuple[str, bytes, bytes]] = []
    for number, (aggregate_id, data) in enumerate(history(count, accounts, seed)):
        encoded = CATALOG.encode(data)
        records.append((aggregate_id, block(encoded.type_name, encoded.schema), encoded.body))
        if number % every == 0:
            headers, body = bad_records()[kinds[number // every % len(kinds)]]
            records.append((f"a-{chance.randrange(accounts)}", headers, body))
    return records


def expected(
    ledger: Ledger,
    last: int,
    fold: Callable[..., Any] = wary,
    *,
    dropped: Iterable[int] = (),
) -> tuple[list[Balance], dict[int, str]]:
    """Return the expected rows, and the resolutions by position, by a plain loop over the log."""
    decode = Decoder(CATALOG, QUARANTINING.events)
    codec = RowCodec(QUARANTINING.table, QUARANTINING.row_type, POSTGRES)
    rows: dict[str, Any] = {}
    blocked_subjects: set[bytes] = set()
    resolutions: dict[int, str] = {}
    for records in read_range(ledger.endpoint, ledger.name, 1, last + 1):
        for record in records:
            position, subject = record[0], record[2]
            if position in dropped:
                continue
            try:
                event = decode(record)
                if event is None:
                    continue
                if subject in blocked_subjects:
                    resolutions[position] = "blocked"
                    continue
                row = fold(rows.get(event.aggregate_id), event)
                rows[event.aggregate_id] = None if row is None else codec.normalise(row)
            except (Poisoned, RowRefused, CodecError):
                resolutions[position] = "blocked" if subject in blocked_subjects else "quarantined"
                blocked_subjects.add(subject)
    return sorted((row for row in rows.values() if row is not None), key=lambda row: row.account_id), resolutions


def quarantine_rows(connection: Connection, name: str = "balances", revision: int = 1) -> list[QuarantineRow]:
    columns = quarantine.c
    query = select(
        columns.position, columns.aggregate, columns.aggregate_id, columns.resolution, columns.reason, columns.payload
    ).where(columns.projection == name, columns.revision == revision)
    return [QuarantineRow(*row) for row in connection.execute(query.order_by(columns.position))]


def state_of(ledger: Ledger) -> tuple[list[Any], list[QuarantineRow]]:
    """Return the rows of the read model and of the quarantine."""
    with reading(ledger.settings.database) as connection:
        return rows_of(connection, QUARANTINING), quarantine_rows(connection)


def resolutions(rows: Iterable[QuarantineRow]) -> dict[int, str]:
    return {row.position: row.resolution for row in rows}
