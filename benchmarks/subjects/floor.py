"""The limit by hand: nats-py, a fold for this one read model, and SQL.

`python -m benchmarks.subjects.floor <nats> <database> <count> bodies|records`. With `records` every event is decoded by
eventjet's own decoder, so that the fold is given what a projection is given; with `bodies` only what this fold needs is
decoded, by the same validator, and nothing else is looked at. Pulls overlap: the next is asked for before the batch in
hand is folded. A batch's rows and the position are one transaction; while the database works, the client reads on.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sqlite3
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Protocol

import nats
import psycopg
from nats.aio.client import Client
from nats.aio.msg import Msg

from benchmarks.bank import Deposited, bank
from benchmarks.readmodel import POSTGRESQL, SQLITE, cents, libpq, path_of
from benchmarks.subjects.clock import Clock
from eventjet.codec.records import Decoder

BATCH = 1_000
AHEAD = 3
"""Batches asked for at once."""

Rows = dict[str, tuple[Decimal, int]]


class Sink(Protocol):
    """Where balances and position go, together."""

    async def write(self, rows: Rows, position: int) -> None: ...


class Postgres:
    """One round trip a batch: the statements of the transaction travel as a pipeline."""

    _UPSERT = (
        "insert into account_balance as b select * from unnest(%s::text[], %s::numeric[], %s::int[]) "
        "on conflict (account_id) do update "
        "set balance = b.balance + excluded.balance, postings = b.postings + excluded.postings"
    )

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, url: str) -> Postgres:
        connection = await psycopg.AsyncConnection.connect(libpq(url), autocommit=True)
        await connection.execute(POSTGRESQL)
        await connection.execute("create table checkpoint (name text primary key, position bigint not null)")
        await connection.execute("insert into checkpoint values ('balances', 0)")
        return cls(connection)

    async def write(self, rows: Rows, position: int) -> None:
        # Arrays as literals: text takes psycopg a fraction of what lists of Decimals take.
        ids = "{" + ",".join(rows) + "}"
        sums = "{" + ",".join([str(balance) for balance, _ in rows.values()]) + "}"
        counts = "{" + ",".join([str(count) for _, count in rows.values()]) + "}"
        async with self._connection.pipeline(), self._connection.transaction():
            await self._connection.execute(self._UPSERT, (ids, sums, counts), prepare=True)
            await self._connection.execute(
                "update checkpoint set position = %s where name = 'balances'", (position,), prepare=True
            )


class Sqlite:
    """In a thread, so that the client reads on; sqlite3 releases the interpreter while it works."""

    _UPSERT = (
        "insert into account_balance as b values (?, ?, ?) on conflict (account_id) do update "
        "set balance = b.balance + excluded.balance, postings = b.postings + excluded.postings"
    )

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("pragma journal_mode=wal")
        self._connection.execute("pragma synchronous=full")
        self._connection.execute(SQLITE)
        self._connection.execute("create table checkpoint (name text primary key, position integer not null)")
        self._connection.execute("insert into checkpoint values ('balances', 0)")

    async def write(self, rows: Rows, position: int) -> None:
        await asyncio.to_thread(self._write, rows, position)

    def _write(self, rows: Rows, position: int) -> None:
        connection = self._connection
        connection.execute("begin immediate")
        connection.executemany(self._UPSERT, [(key, cents(amount), count) for key, (amount, count) in rows.items()])
        connection.execute("update checkpoint set position = ? where name = 'balances'", (position,))
        connection.execute("commit")


class Bodies:
    """Messages of the log into sums of a batch; of the envelope only the type and the account are read."""

    def __init__(self) -> None:
        self.position = 0
        self._decoders: dict[str, Callable[[bytes], Any]] = {}

    def __call__(self, messages: Sequence[Msg]) -> Rows:
        rows: Rows = {}
        decoders = self._decoders
        for message in messages:
            headers = message.headers
            assert headers is not None
            decode = decoders.get(headers["Ej-Type"]) or self._decoder(headers["Ej-Type"])
            event = decode(message.data)
            amount = event.amount if type(event) is Deposited else -event.amount
            account = message.subject.rpartition(".")[2]
            before = rows.get(account)
            rows[account] = (amount, 1) if before is None else (before[0] + amount, before[1] + 1)
        first, last = _position(messages[0]), _position(messages[-1])
        self._advance(first, last, len(messages))
        return rows

    def _advance(self, first: int, last: int, count: int) -> None:
        if first != self.position + 1 or last != self.position + count:
            raise RuntimeError(f"after position {self.position} came {first} to {last}")
        self.position = last

    def _decoder(self, name: str) -> Callable[[bytes], Any]:
        resolved = bank.catalog.resolve(name, 1)
        assert resolved is not None
        return self._decoders.setdefault(name, resolved.decode)


class Records(Bodies):
    """The same through eventjet's decoder, which is given the bytes that nats-py has taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self._decode = Decoder(bank.catalog)

    def __call__(self, messages: Sequence[Msg]) -> Rows:
        rows: Rows = {}
        decode = self._decode
        position = self.position
        for message in messages:
            fields = message.reply.split(".")
            position += 1
            if int(fields[5]) != position:
                raise RuntimeError(f"after position {position - 1} came {fields[5]}")
            assert message.headers is not None
            block = "".join([f"{name}: {value}\r\n" for name, value in message.headers.items()])
            headers = b"NATS/1.0\r\n%b\r\n" % block.encode()
            event = decode((position, int(fields[7]), message.subject.encode(), headers, message.data))
            assert event is not None
            amount = event.data.amount if type(event.data) is Deposited else -event.data.amount
            before = rows.get(event.aggregate_id)
            rows[event.aggregate_id] = (amount, 1) if before is None else (before[0] + amount, before[1] + 1)
        self.position = position
        return rows


def _position(message: Msg) -> int:
    return int(message.reply.split(".")[5])


async def main(server: str, database: str, count: int, kind: str) -> None:
    sink: Sink = Sqlite(path_of(database)) if database.startswith("sqlite") else await Postgres.open(database)
    connection = await nats.connect(server)
    consumer = await _consumer(connection)
    inbox = connection.new_inbox()
    batches: asyncio.Queue[list[Msg]] = asyncio.Queue()
    received: list[Msg] = []
    arrived = 0

    async def take(message: Msg) -> None:
        nonlocal received, arrived
        if not message.reply:
            raise RuntimeError(f"the pull ended with {message.headers}")
        received.append(message)
        arrived += 1
        if len(received) == BATCH or arrived == count:
            batches.put_nowait(received)
            received = []

    async def ask() -> None:
        request = json.dumps({"batch": BATCH, "expires": 60_000_000_000}).encode()
        await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{bank.name}.{consumer}", request, reply=inbox)

    await connection.subscribe(inbox, cb=take, pending_msgs_limit=-1, pending_bytes_limit=-1)
    # As eventjet's worker does, for a tenth: what lives for a batch makes no cycles.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    fold = Records() if kind == "records" else Bodies()
    clock = Clock()
    clock.start()
    for _ in range(AHEAD):
        await ask()
    while fold.position < count:
        batch = await asyncio.wait_for(batches.get(), 60)
        await ask()
        await sink.write(fold(batch), fold.position)
    clock.stop(count)
    await connection.close()


async def _consumer(connection: Client) -> str:
    config = {"ack_policy": "none", "deliver_policy": "all", "mem_storage": True, "inactive_threshold": 60_000_000_000}
    body = json.dumps({"stream_name": bank.name, "config": config}).encode()
    answer = json.loads((await connection.request(f"$JS.API.CONSUMER.CREATE.{bank.name}", body, timeout=5)).data)
    if "error" in answer:
        raise RuntimeError(f"no consumer: {answer['error']}")
    return str(answer["name"])


if __name__ == "__main__":
    server, database, count, kind = sys.argv[1:]
    asyncio.run(main(server, database, int(count), kind))
