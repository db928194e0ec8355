"""A lake by Spark's own means: `python -m benchmarks.subjects.lake_by_spark SERVERS FOLDER COUNT BATCH`.

A stream of the log goes through `foreachBatch`, which appends to a Delta table of all events and to one for each type.
Spark's checkpoint and Delta's commits know nothing of each other, so a batch that is taken again is there twice.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from deltalake import DeltaTable, write_deltalake
from pyspark.sql.functions import col, from_json

from benchmarks.bank import bank
from benchmarks.usage import Parts
from eventjet.spark.session import spark_session

LOGGED = ["position", "time", "aggregate_id", "version"]
KINDS = ("account.deposited", "account.withdrawn")
WARM = 1_000


def run(spark: Any, servers: str, folder: Path, batch: int, first: int) -> int:
    """Append the log from the position `first` on; return how many events the table of all has then."""

    def append(name: str, rows: Any) -> None:
        write_deltalake(folder / name, rows.toArrow(), mode="append")

    def take(events: Any, _: int) -> None:
        events.persist()
        append("events", events.withColumn("body", col("body").cast("string")))
        for kind in KINDS:
            fields = "tx_id string, amount decimal(38, 18), currency string, memo string"
            body = from_json(col("body").cast("string"), fields, {"mode": "FAILFAST"})
            typed = events.where(col("type") == kind).select(*LOGGED, body.alias("fields"))
            append(kind.replace(".", "_"), typed.select(*LOGGED, "fields.*"))
        events.unpersist()

    options = {"servers": servers, "stream": bank.name, "columns": ",".join([*LOGGED, "type", "body"])}
    options |= {"fromPosition": str(first), "maxPositionsPerTrigger": str(batch)}
    log = spark.readStream.format("jetstream").options(**options).load()
    writer = log.writeStream.foreachBatch(take).option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return DeltaTable(folder / "events").count()


def main(servers: str, folder: Path, count: int, batch: int) -> None:
    parts = Parts(0, 0, os.getpid())
    with spark_session("local[2]") as started:
        run(started.spark, servers, folder / "warm", batch, count - WARM + 1)
        began_s, began_cpu_s = time.perf_counter(), sum(parts.cpu_s().values())
        stored = run(started.spark, servers, folder / "lake", batch, 1)
        wall_s, cpu_s = time.perf_counter() - began_s, sum(parts.cpu_s().values()) - began_cpu_s
    print(json.dumps({"count": stored, "wall_s": wall_s, "cpu_s": cpu_s}))


if __name__ == "__main__":
    servers, folder, count, batch = sys.argv[1:]
    main(servers, Path(folder), int(count), int(batch))
