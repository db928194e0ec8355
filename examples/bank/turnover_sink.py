"""What moved on each account, kept in SQL by Spark: every event counts once, whatever crashes and whatever is deleted.

The position up to which the table is true is part of the transaction that changes it. Spark's checkpoint only saves
work: a micro-batch that comes again, in whole or in part, holds nothing after that position, or only what is new.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it
from sqlalchemy import Engine, text

TABLES = (
    "create table if not exists turnover (account_id varchar(200) primary key, cents bigint not null)",
    "create table if not exists turnover_position (only_one integer primary key, position bigint not null)",
    "insert into turnover_position values (1, 0) on conflict do nothing",
)
POSITION = text("select position from turnover_position")
ADVANCE = text("update turnover_position set position = :last where position = :before")
ADD = text(
    "insert into turnover (account_id, cents) values (:account_id, :cents) "
    "on conflict (account_id) do update set cents = turnover.cents + excluded.cents"
)


def create_tables(engine: Engine) -> None:
    """Create what is missing, on PostgreSQL or SQLite."""
    with engine.begin() as connection:
        for statement in TABLES:
            connection.execute(text(statement))


def log_of(spark: Any, engine: Engine, stream: str, **options: str) -> Any:
    """The log as a stream; without a checkpoint it begins where the table ends."""
    with engine.connect() as connection:
        after = connection.execute(POSITION).scalar_one()
    columns = "position,aggregate_id,type,body"
    chosen = {"stream": stream, "columns": columns, "fromPosition": str(after + 1), **options}
    return spark.readStream.format("jetstream").options(**chosen).load()


def take(engine: Engine, events: Any) -> None:
    """Add up what is new of a micro-batch, and store it with the position it leads to, in one transaction."""
    with engine.connect() as connection:
        before = connection.execute(POSITION).scalar_one()
    body = F.from_json(F.col("body").cast("string"), "amount decimal(18, 2)", {"mode": "FAILFAST"})
    moves = F.col("type").isin("account.deposited", "account.withdrawn")
    sums = (
        events.where(F.col("position") > before)
        .groupBy(F.col("aggregate_id").alias("account_id"))
        .agg(
            F.coalesce(F.sum(F.when(moves, (body.amount * 100).cast("long"))), F.lit(0)).alias("cents"),
            F.min("position").alias("first"),
            F.max("position").alias("last"),
        )
        .collect()
    )
    if not sums:
        return
    first, last = min(row.first for row in sums), max(row.last for row in sums)
    if first != before + 1:
        raise RuntimeError(f"The table ends at {before}, the batch begins at {first}. Start with a fresh checkpoint.")
    with engine.begin() as connection:
        if connection.execute(ADVANCE, {"last": last, "before": before}).rowcount != 1:
            raise RuntimeError("Another query keeps this table. Stop one of them.")
        connection.execute(ADD, [{"account_id": row.account_id, "cents": row.cents} for row in sums])
