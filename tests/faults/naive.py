"""The naive worker, kept as a control: a durable consumer with acknowledgements, and the position in SQL.

It does what many do: fetch, skip what is not beyond the stored position, write rows and position in one transaction,
acknowledge. It loses events whenever it dies between fetch and acknowledgement, since the server then hands later ones
to its successor first, and what comes again afterwards is "done already". Same arguments as `tests.faults.worker`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Any

import nats
from nats.js.api import ConsumerConfig
from sqlalchemy import Connection, text

from eventjet import failpoints
from eventjet.codec.headers import RawRecord, header_block
from eventjet.codec.records import Decoder
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.database import Database
from eventjet.sql.locations import located
from tests.faults.tally import Added, Total, added, tally_app, totals_table

DURABLE = "naive"
ACK_WAIT_S = 4.0
TABLES = (
    "create table naive_checkpoint (position bigint not null)",
    "insert into naive_checkpoint values (0)",
    "create table naive_journal (position bigint not null, entity varchar(40), number integer, amount varchar(20))",
)


class Naive:
    """A process of the naive worker."""

    def __init__(self, database: str, name: str, batch_max: int) -> None:
        where = Database(database)
        self._engine = where.sync_engine("naive")
        self._table = located(totals_table, DECLARED, where.dialect)
        self._lock = " for update" if where.dialect.name == "postgresql" else ""
        self._app = tally_app(name)
        self._batch_max = batch_max

    async def run(self, server: str, stop: asyncio.Event) -> None:
        """Work until `stop` is set."""
        decode = Decoder(self._app.catalog)
        connection = await nats.connect(server)
        config = ConsumerConfig(ack_wait=ACK_WAIT_S, max_deliver=-1)
        pull = await connection.jetstream().pull_subscribe("", DURABLE, stream=self._app.name, config=config)
        print("ready", flush=True)  # noqa: T201
        while not stop.is_set():
            try:
                messages = await pull.fetch(self._batch_max, timeout=0.5)
            except TimeoutError:  # nats-py's own is one too
                continue
            failpoints.reach("worker.batch_taken")
            with self._engine.begin() as transaction:
                self._write(transaction, [decode(_record(message)) for message in messages])
                failpoints.reach("worker.rows_written")
            failpoints.reach("worker.after_commit")
            for message in messages:
                await message.ack()
        await connection.close()

    def _write(self, connection: Connection, events: list[Any]) -> None:
        position = connection.scalar(text(f"select position from naive_checkpoint{self._lock}")) or 0
        fresh = [event for event in events if event.position > position]
        for event in fresh:
            if isinstance(event.data, Added):
                self._apply(connection, event.position, event.aggregate_id, event.data)
        failpoints.reach("worker.before_commit")
        if fresh:
            connection.execute(text("update naive_checkpoint set position = :p"), {"p": fresh[-1].position})

    def _apply(self, connection: Connection, position: int, entity: str, data: Added) -> None:
        table = self._table
        existing = connection.execute(table.select().where(table.c.entity == entity)).one_or_none()
        row = added(None if existing is None else Total(*existing), entity, data.number, data.amount)
        values = {name: getattr(row, name) for name in Total.__slots__}
        if existing is None:
            connection.execute(table.insert().values(**values))
        else:
            connection.execute(table.update().where(table.c.entity == entity).values(**values))
        line = {"p": position, "e": entity, "n": data.number, "a": str(data.amount)}
        connection.execute(text("insert into naive_journal values (:p, :e, :n, :a)"), line)


def _record(message: Any) -> RawRecord:
    sequence = message.metadata.sequence.stream
    return sequence, 0, message.subject.encode(), header_block((message.headers or {}).items()), message.data


async def main(server: str, database: str, name: str, batch_max: int) -> None:
    """Work until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await Naive(database, name, batch_max).run(server, stop)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
