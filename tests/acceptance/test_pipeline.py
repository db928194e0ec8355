"""A pipeline on Spark, as `spark-pipelines run` runs it: every event once, whatever is killed, and of one log only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from eventjet.dev.nats import NatsServer
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.projections.app_ref import AppRef
from eventjet.rebuild import rebuild
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.integration.ledger_log import Ledger
from tests.logs import block

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_000)]

EXAMPLE = Path(__file__).parents[2] / "examples/bank/pipeline"
RUN_S = 900.0


class Pipeline:
    """The example's pipeline, with its tables in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pipeline"
        for source in (path for path in EXAMPLE.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            target = self.folder / source.relative_to(EXAMPLE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text().replace("/srv/bank/pipeline", str(self.folder)))

    @contextmanager
    def running(self, nats: NatsServer) -> Generator[subprocess.Popen[bytes]]:
        """`eventjet pipeline`; all of its processes have ended after the block."""
        # Otherwise every Spark Connect server of this machine takes the same port.
        environ = {**os.environ, "EVENTJET_SERVERS": nats.url, "SPARK_TESTING": "1"}
        command = [sys.executable, "-m", "eventjet.cli", "pipeline"]
        with (self.folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder.parent, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)

    def run(self, nats: NatsServer) -> int:
        """Return the exit status of a run."""
        with self.running(nats) as process:
            return process.wait(RUN_S)

    def killed(self, nats: NatsServer, when: Callable[[], bool]) -> None:
        """Begin a run, and kill it at a moment."""
        with self.running(nats) as process:
            deadline = time.monotonic() + RUN_S
            while not when():
                assert process.poll() is None, self.log
                assert time.monotonic() < deadline, self.log
                time.sleep(0.002)

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def files(self, table: str) -> set[str]:
        return {path.name for path in (self.folder / "warehouse" / table).glob("*.parquet")}

    def committed(self, table: str) -> set[str]:
        """The files of a streaming table's committed batches, by Spark's own log of them."""
        batches = [path for path in self.folder.glob(f"warehouse/{table}/_spark_metadata/*") if path.name.isdigit()]
        lines = [line for path in batches for line in path.read_text().splitlines()[1:]]
        return {Path(json.loads(line)["path"]).name for line in lines}

    def rows(self, table: str) -> list[dict[str, Any]]:
        committed = (self.folder / f"warehouse/{table}/_spark_metadata").exists()
        names = self.committed(table) if committed else self.files(table)
        return [
            row
            for name in names
            for row in parquet.read_table(self.folder / "warehouse" / table / name, partitioning=None).to_pylist()
        ]


async def filled(nats: NatsServer, first: int, last: int) -> int:
    """Write accounts with some events each; return the last position of the log."""
    async with bank.connect(servers=nats.url) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        position = 0
        for number in range(first, last):
            await accounts.execute(f"a-{number}", Account.open, f"owner {number % 7}")
            await accounts.execute(f"a-{number}", Account.deposit, Decimal(number) + Decimal("0.25"))
            position = (await accounts.execute(f"a-{number}", Account.deposit, Decimal(2_000))).position
            if number % 3 == 0:
                position = (await accounts.execute(f"a-{number}", Account.withdraw, Decimal(1_000))).position
        return position


async def test_a_killed_run_loses_and_repeats_nothing_and_another_log_is_refused(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    with NatsServer(tmp_path / "nats", sync_interval="1m") as nats:
        await filled(nats, 0, 20)
        # The first batch is written, and in no table yet: Spark will write it again.
        pipeline.killed(nats, lambda: bool(pipeline.files("events") - pipeline.committed("events")))
        last = await filled(nats, 20, 30)
        assert pipeline.run(nats) == 0, pipeline.log
        assert sorted(row["position"] for row in pipeline.rows("events")) == list(range(1, last + 1))
        types = {"account.opened", "account.deposited", "account.withdrawn"}
        by_type = {kind: pipeline.rows(kind.replace(".", "_")) for kind in types}
        assert {row["position"]: row["type"] for row in pipeline.rows("events")} == {
            row["position"]: kind for kind, rows in by_type.items() for row in rows
        }
        assert sum(map(len, by_type.values())) == last
        assert {row["position"] for row in pipeline.rows("large_withdrawals")} == {
            row["position"] for row in by_type["account.withdrawn"]
        }
        # Times of any year are read by other programs as they are.
        file = pipeline.folder / "warehouse/events" / min(pipeline.committed("events"))
        (_, recorded_at, *_) = parquet.read_schema(file)
        assert str(recorded_at.type) == "timestamp[us, tz=UTC]"
        assert await folded(nats, tmp_path) == {name: key_sorted(pipeline.rows(name)) for name in bank.projections}
    with NatsServer(tmp_path / "other", sync_interval="1m") as other:
        await filled(other, 0, 40)
        assert pipeline.run(other) == 1
        text = " ".join(pipeline.log.split()).rpartition("eventjet: ")[2]
        assert text.startswith("The pipeline has not finished. A streaming query of 'bank' was refused: its checkpoint")
        assert "eventjet pipeline --full-refresh" in text
        assert len(pipeline.rows("events")) == last


PEOPLE = """
from dataclasses import dataclass
from typing import Any
from eventjet import App, Key, Personal, Recorded, aggregate, event, projection, upcaster

@event("person.named")
class Named:
    name: Personal[str]

@event("person.moved", schema=2)
class Moved:
    city: str

@upcaster("person.moved", schema=1)
def city_of(body: dict[str, Any]) -> dict[str, Any]:
    return {"city": body["address"].rpartition(", ")[2]}

@aggregate("ledger")
class Person:
    def evolve(self, event: Named | Moved) -> "Person":
        return self

@dataclass(frozen=True, slots=True)
class City:
    city: Key[str]
    moves: int

def city(event: Recorded[Moved]) -> str:
    return event.data.city

@projection("cities", key=city)
def cities(row: City | None, event: Recorded[Moved]) -> City:
    return City(event.data.city, (row.moves if row else 0) + 1)

people = App("people", aggregates=[Person], upcasters=[city_of], projections=[cities])
"""


async def test_bodies_of_an_older_schema_are_upcast_and_personal_fields_are_hidden(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    (tmp_path / "people.py").write_text(PEOPLE)
    declaring = "from people import people\nfrom eventjet.spark import pipelines\n\npipelines.declare(people)\n"
    (pipeline.folder / "transformations/bank.py").write_text(declaring)
    with NatsServer(tmp_path / "nats") as nats:
        settings = Settings.load({"servers": nats.url}, {})
        log = Ledger(settings, "people", AppRef.parse("people:people", tmp_path).load().catalog, {})
        log.create()
        bodies = [(1, b'{"address":"Long Lane 1, Ulm"}'), (2, b'{"city":"Ulm"}'), (2, b'{"city":"Bonn"}')]
        log.append_raw(
            [
                ("p-1", block("person.moved", schema, Ej_Version=str(version)), body)
                for version, (schema, body) in enumerate(bodies, 1)
            ]
        )
        assert pipeline.run(nats) == 0, pipeline.log
    moved = {row["position"]: row["city"] for row in pipeline.rows("person_moved")}
    assert moved == {1: "Ulm", 2: "Ulm", 3: "Bonn"}
    assert key_sorted(pipeline.rows("cities")) == [{"city": "Bonn", "moves": 1}, {"city": "Ulm", "moves": 2}]
    bodies_shown = {row["position"]: row["body"] for row in pipeline.rows("events")}
    assert bodies_shown == {1: '{"address":"<personal>"}', 2: '{"city":"Ulm"}', 3: '{"city":"Bonn"}'}


async def folded(nats: NatsServer, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the read models as a rebuild makes them."""
    settings = Settings.load({"servers": nats.url, "database": f"sqlite:///{folder}/read.db"}, {})
    engine = Database(settings.database).sync_engine()
    create_tables(engine, bank.projections.values())
    await rebuild(bank, list(bank.projections), settings, engine="local")
    with engine.connect() as connection:
        return {
            name: key_sorted(dict(row._mapping) for row in connection.execute(resolved.tables[0].select()))
            for name, resolved in bank.projections.items()
        }


def key_sorted(rows: Any) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: next(iter(row.values())))
