"""Helpers for the tests of restores: a bank's log, its archive, and another, empty server."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eventjet import App, Imported, Metadata
from eventjet.archive.reading import ArchivedFile, Segment, dump_segment
from eventjet.codec.headers import MSG_ID, RawRecord, header
from eventjet.examples.bank.account import Account, Deposited, Opened
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from tests import logs
from tests.archives import batch_of

NAME = "bank"


def endpoint(url: str) -> Endpoint:
    return Endpoint((url,))


def records_of(url: str, name: str = NAME) -> list[RawRecord]:
    """Return all records of a log."""
    return logs.records_of(endpoint(url), name)


def append_raw(url: str, records: Iterable[tuple[str, bytes, bytes]]) -> int:
    """Store (subject after the stream's name, headers, body) triples; returns the last position."""
    return logs.append(endpoint(url), NAME, records)


async def fill(app: App, url: str, count: int = 1_500, seed: int = 3) -> None:
    """Fill the log with saves, commands with metadata, transactions and an import: all kinds of headers."""
    chance = random.Random(seed)
    async with app.connect(servers=url) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        for name in ("ada", "bob"):
            await accounts.execute(name, Account.open, name)
        for number in range(20):
            once = accounts.command(f"c-{number}", metadata=Metadata(actor="ada", extra={"till": str(number)}))
            await once.execute("ada", Account.deposit, Decimal(number + 1))
        for _ in range(5):
            await jet.transact(
                accounts.decide("ada", Account.withdraw, Decimal(2)),
                accounts.decide("bob", Account.deposit, Decimal(2)),
            )
        long_ago = datetime(2001, 5, 1, tzinfo=UTC)
        opened = [Imported(Account, f"a-{number}", Opened(owner=f"o-{number}"), long_ago) for number in range(40)]
        deposits = [
            Imported(Account, f"a-{chance.randrange(40)}", Deposited(amount=Decimal(chance.randrange(1, 999)) / 100),
                     long_ago + timedelta(seconds=number), Metadata(actor="till", correlation=f"day-{number % 7}"))
            for number in range(count)
        ]  # fmt: skip
        await jet.append_many(opened + deposits, source="till")


def seal(folder: Path, records: Sequence[RawRecord], log: str, *, name: str = NAME, segments: int = 2) -> str:
    """Write an archive as `eventjet archive` does, with two files per segment; return its URL."""
    size = -(-len(records) // segments)
    for start in range(0, len(records), size):
        part = records[start : start + size]
        files = [_file(folder, part, piece) for piece in (part[: len(part) // 2], part[len(part) // 2 :]) if piece]
        last_id = header(part[-1][3], MSG_ID) or ""
        segment = Segment(name, log, part[0][0], part[-1][0], part[0][1], part[-1][1], last_id, tuple(files))
        line = folder / "manifest" / segment.name / "part-00000.txt"
        line.parent.mkdir(parents=True)
        line.write_text(dump_segment(segment) + "\n")
    return str(folder)


def _file(folder: Path, segment: Sequence[RawRecord], records: Sequence[RawRecord]) -> ArchivedFile:
    name = f"{segment[0][0]:020d}-{segment[-1][0]:020d}"
    path = f"events/{name}/part-{records[0][0]}.parquet"
    at = folder / path
    at.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_batches([batch_of(records)]), at, compression="zstd")
    content = at.read_bytes()
    return ArchivedFile(path, records[0][0], records[-1][0], len(content), hashlib.sha256(content).hexdigest())


def delete(url: str, name: str = NAME) -> None:
    """Delete the stream if it exists."""
    with NatsConnection.open(endpoint(url)) as link:
        if name in (link.api("STREAM.NAMES").get("streams") or []):
            link.api(f"STREAM.DELETE.{name}")
