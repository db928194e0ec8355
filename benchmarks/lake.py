"""`eventjet lake sync` beside appends by hand that are not exactly once: `python -m benchmarks.lake`.

They read the same log and write the same tables, in batches of one size: all events, and one for each type. By hand it
is a loop over eventjet's reader, where bodies are parsed and not validated, and the position is in a file beside the
tables; and `foreachBatch` of a stream of Spark on two cores, whose session is there before the clock starts. They take
turns. CPU holds for a busy machine, too; rates only for a quiet one.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

from benchmarks.bank import bank
from benchmarks.laps import result_of
from benchmarks.log import fill
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.peers import python
from benchmarks.usage import own_cpu_s, own_peak_mb
from eventjet.codec.headers import MSG_ID, TYPE, VERSION, header, number_of, recorded_at
from eventjet.codec.subjects import entity_of
from eventjet.dev import NatsServer
from eventjet.jetstream.reader import read_range
from eventjet.lake import sync, verify
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings

BATCH = 100_000
BY_SPARK = "by hand, Spark's foreachBatch to Delta, not exactly once"
_LOGGED = {
    "position": pa.int64(),
    "recorded_at": pa.timestamp("us", "UTC"),
    "aggregate_id": pa.string(),
    "version": pa.int64(),
    "event_id": pa.string(),
}
_WHOLE = pa.schema({**_LOGGED, "type": pa.string(), "body": pa.string()})
_TYPED = pa.schema(
    {
        **_LOGGED,
        "tx_id": pa.string(),
        "amount": pa.decimal128(38, 18),
        "currency": pa.string(),
        "memo": pa.string(),
    }
)
Append = Callable[[str, pa.Table], None]


def by_hand(url: str, count: int, folder: Path, append: Append) -> None:
    """All tables of the log, each appended to after a batch; then the position is written."""
    rows: dict[str, list[tuple[Any, ...]]] = {}

    def flush(position: int) -> None:
        for name, pending in rows.items():
            schema = _WHOLE if name == "events" else _TYPED
            columns = zip(zip(*pending, strict=True), schema, strict=True)
            arrays = [pa.array(values, field.type) for values, field in columns]
            append(name, pa.Table.from_arrays(arrays, schema=schema))
        rows.clear()
        (folder / "position").write_text(str(position))

    read = 0
    for records in read_range(Endpoint((url,)), bank.name, 1, count + 1):
        for record in records:
            position, _, subject, block, body = record
            logged = (
                position,
                recorded_at(record),
                entity_of(subject)[1],
                number_of(block, VERSION),
                header(block, MSG_ID),
            )
            kind, value = header(block, TYPE) or "", orjson.loads(body)
            rows.setdefault("events", []).append((*logged, kind, body.decode()))
            fields = (value["tx_id"], Decimal(value["amount"]), value["currency"], value["memo"])
            rows.setdefault(kind.replace(".", "_"), []).append((*logged, *fields))
        read += len(records)
        if read % BATCH < len(records) or read == count:
            flush(records[-1][0])


def to_delta(folder: Path) -> Append:
    return lambda name, rows: write_deltalake(folder / name, rows, mode="append")


def to_iceberg(folder: Path) -> Append:
    catalog = load_catalog("bench", type="sql", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
    catalog.create_namespace("bank")
    return lambda name, rows: catalog.create_table_if_not_exists(("bank", name), rows.schema).append(rows)


def rows_in(folder: Path) -> int:
    return DeltaTable(folder / "events").count()


def main(events: int, runs: int) -> int:
    print(conditions())
    rates = Figures(f"a lake of {events:,} events", "events/s", higher_is_better=True)
    costs = Figures(f"a lake of {events:,} events, CPU", "µs", higher_is_better=False)
    with tempfile.TemporaryDirectory() as place, NatsServer(sync_interval="1m") as nats:
        fill(nats.url, events)
        settings = Settings.load({"servers": nats.url}, {})

        def ours(kind: str) -> Callable[[Path], None]:
            return lambda folder: asyncio.run(_synced(folder, settings, kind, events))

        subjects: dict[str, Callable[[Path], None]] = {
            "eventjet lake sync, Delta": ours("delta"),
            "by hand, Delta, not exactly once": lambda folder: by_hand(nats.url, events, folder, to_delta(folder)),
            "eventjet lake sync, Iceberg": ours("iceberg"),
            "by hand, Iceberg, not exactly once": lambda folder: by_hand(nats.url, events, folder, to_iceberg(folder)),
        }
        for _ in range(runs):
            folder = Path(tempfile.mkdtemp(dir=place))
            result = result_of(python("lake_by_spark")(nats.url, folder, events, BATCH))
            assert result["count"] == events
            rates.add(BY_SPARK, events / result["wall_s"])
            costs.add(BY_SPARK, result["cpu_s"] / events * 1e6)
            shutil.rmtree(folder)
            for name, run in subjects.items():
                folder = Path(tempfile.mkdtemp(dir=place))
                started, cpu_s = time.perf_counter(), own_cpu_s()
                run(folder)
                rates.add(name, events / (time.perf_counter() - started))
                costs.add(name, (own_cpu_s() - cpu_s) / events * 1e6)
                if name == "eventjet lake sync, Delta":
                    assert asyncio.run(verify(bank, str(folder), settings)).sound
                if "Delta" in name:
                    assert rows_in(folder) == events
                shutil.rmtree(folder)
    ours_and_theirs = [(f"eventjet lake sync, {kind}", f"by hand, {kind}, not exactly once") for kind in _KINDS]
    ours_and_theirs.append(("eventjet lake sync, Delta", BY_SPARK))
    comparisons = [Comparison(each, mine, theirs) for each in (rates, costs) for mine, theirs in ours_and_theirs]
    note = f"\nlargest resident memory of this process: {own_peak_mb():.0f} MB"
    report([rates, costs], comparisons, note)
    return 0


_KINDS = ("Delta", "Iceberg")


async def _synced(folder: Path, settings: Settings, kind: str, events: int) -> None:
    report = await sync(bank, str(folder), settings, table_format=kind, batch_events=BATCH)
    assert report.position == events


if __name__ == "__main__":
    parser = parser_of(__doc__, runs=2)
    parser.add_argument("--events", type=int, default=200_000)
    options = parser.parse_args()
    raise SystemExit(main(options.events, options.runs))
