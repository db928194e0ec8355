"""The log as DataFrames: every record as it is stored, and one event type with typed columns."""

from __future__ import annotations

import os
import string
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from eventjet import App, Metadata, Settings
from eventjet.codec.headers import header_block
from eventjet.dev.nats import NatsServer
from eventjet.errors import Unreachable, UsageError
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.spark import AppRef, events
from eventjet.spark.event_rows import stored_columns
from eventjet.spark.session import Started
from tests.logs import fresh_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

APP = string.Template("""
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated

from pydantic import Field

from eventjet import App, aggregate, event, upcaster


class Kind(Enum):
    CASH = "cash"
    WIRE = "wire"


@event("account.opened")
class Opened:
    owner: str
    version: int = 7


@event("account.deposited", schema=2, formerly=("account.paid_in",))
class Deposited:
    amount: Annotated[Decimal, Field(max_digits=12, decimal_places=2)]
    kind: Kind = Kind.CASH
    due: datetime | None = None


@event("account.counted")
class Counted:
    number: int


@dataclass(frozen=True)
class Place:
    zip: str
    Zip: int


@event("account.moved")
class Moved:
    place: Place


@aggregate("account")
class Account:
    balance: Decimal = Decimal(0)

    def do(self, event: Opened | Deposited | Counted | Moved) -> Opened | Deposited | Counted | Moved:
        return event

    def evolve(self, event: Opened | Deposited | Counted | Moved) -> "Account":
        return replace(self, balance=self.balance + getattr(event, "amount", 0))


@upcaster("account.deposited", schema=1)
def in_cents(body: dict) -> dict:
    return {"amount": str(Decimal(body["cents"]) / 100)}


app = App("$name", aggregates=[Account], upcasters=[in_cents], retired_events=["account.frozen"])
""")


@pytest.fixture
def settings(nats: NatsServer) -> Settings:
    return Settings.load({"servers": nats.url}, {})


@pytest.fixture
async def app(settings: Settings, tmp_path: Path) -> App:
    """Return an app with a log of valid, retired, undeclared and invalid events."""
    name = fresh_name()
    (tmp_path / f"{name}.py").write_text(APP.substitute(name=name))
    loaded_app: Any = AppRef.parse(f"{name}:app", tmp_path).load()
    module = sys.modules[name]
    async with loaded_app.connect(servers=settings.servers) as jet:
        await jet.init()
        accounts = jet.repository(module.Account)
        command = accounts.command(
            "c 1", metadata=Metadata("talk", "cause", "ada", f"00-{'1' * 32}-{'2' * 16}-01", {"channel": "w%b"})
        )
        await command.execute("a.*>", module.Account.do, module.Opened(owner="ä"))
        at = datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC)
        await accounts.execute(
            "a-2", module.Account.do, module.Deposited(amount=Decimal("0.10"), kind=module.Kind.WIRE, due=at)
        )
    put(settings, f"{name}.account.a-2", headers_of("account.deposited", 1, 2), b'{"cents": 25}')
    put(settings, f"{name}.account.a-2", headers_of("account.paid_in", 2, 3), b'{"amount": "1.50", "new": 1}')
    put(settings, f"{name}.account.a-2", headers_of("account.frozen", 1, 4), b"{}")
    put(settings, f"{name}.account.a-2", headers_of("account.unheard_of", 3, 5), b"not json")
    put(settings, f"{name}.account.=zz", b"", b"\xff")
    put(
        settings,
        f"{name}.account.a-9",
        headers_of("account.opened", 1, 1, recorded_at="2001-02-03T04:05:06Z"),
        b'{"owner":"o"}',
    )
    return loaded_app


def headers_of(type_name: str, schema: int, version: int, recorded_at: str | None = None) -> bytes:
    pairs = [("Nats-Msg-Id", f"{type_name}-{version}-{fresh_name()}"), ("Ej-Type", type_name)]
    pairs += [("Ej-Schema", str(schema)), ("Ej-Version", str(version))]
    return header_block([*pairs, ("Ej-Recorded-At", recorded_at)] if recorded_at else pairs)


def put(settings: Settings, subject: str, headers: bytes, body: bytes) -> None:
    with NatsConnection.open(Endpoint.of(settings)) as link:
        sid = link.subscribe(f"{link.inbox}.ack")
        link.publish(subject, body, reply=f"{link.inbox}.ack", headers=headers)
        (frame,) = link.receive(10)
        assert frame[0] == sid
        assert b"error" not in frame[4], frame[4]


def test_the_frame_of_a_log_has_every_stored_record(spark: Started, app: App, settings: Settings) -> None:
    frame = events(spark.spark, app, settings=settings)
    assert dict(frame.dtypes) == {name: form.ddl for name, form in stored_columns().items()}
    rows = [row.asDict() for row in frame.orderBy("position").collect()]
    assert [row["position"] for row in rows] == list(range(1, 9))
    first = rows[0]
    assert first.pop("event_id")
    assert datetime.now(UTC) - first.pop("recorded_at").astimezone(UTC) < timedelta(minutes=5)
    assert first == {
        "position": 1,
        "type": "account.opened",
        "schema": 1,
        "aggregate": "account",
        "aggregate_id": "a.*>",
        "version": 1,
        "command_id": "c 1",
        "correlation": "talk",
        "causation": "cause",
        "actor": "ada",
        "metadata": {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "channel": "w%b"},
        "body": '{"owner":"ä","version":7}',
    }
    types = ["account.deposited"] * 2 + ["account.paid_in", "account.frozen", "account.unheard_of", None]
    assert [row["type"] for row in rows[1:7]] == types
    assert [row["body"] for row in rows[4:7]] == ["{}", "not json", None]
    stranger = {name: value for name, value in rows[6].items() if value not in (None, {})}
    assert set(stranger) == {"position", "recorded_at", "aggregate"}
    assert rows[7]["recorded_at"].astimezone(UTC) == datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC)


def test_one_event_type_has_its_upcast_fields_as_columns(spark: Started, app: App, settings: Settings) -> None:
    deposited = sys.modules[app.name].Deposited
    frame = events(spark.spark, app, deposited, settings=settings)
    assert frame.dtypes[-3:] == [("amount", "decimal(12,2)"), ("kind", "string"), ("due", "timestamp")]
    rows = frame.orderBy("position").collect()
    assert [(row.position, row.version, row.amount, row.kind) for row in rows] == [
        (2, 1, Decimal("0.10"), "wire"),
        (3, 2, Decimal("0.25"), "cash"),
        (4, 3, Decimal("1.50"), "cash"),
    ]
    assert rows[0].due.astimezone(UTC) == datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC)
    frame.createOrReplaceTempView("deposits")
    assert spark.spark.sql("select sum(amount) from deposits").collect()[0][0] == Decimal("1.85")


def test_a_frame_as_of_a_position_or_time_has_no_later_events(spark: Started, app: App, settings: Settings) -> None:
    deposited = sys.modules[app.name].Deposited
    assert events(spark.spark, app, as_of=5, settings=settings).count() == 5
    assert events(spark.spark, app, deposited, as_of=2, settings=settings).count() == 1
    assert events(spark.spark, app, as_of=0, settings=settings).count() == 0
    (third,) = events(spark.spark, app, settings=settings).where("position = 3").collect()
    third_time = third.recorded_at.astimezone(UTC)
    rows = events(spark.spark, app, as_of=third_time, settings=settings).collect()
    # The last one was imported, with the time at which it happened.
    assert sorted(row.position for row in rows) == [1, 2, 3, 8]
    assert events(spark.spark, app, deposited, as_of=third_time, settings=settings).count() == 2


def test_a_frame_is_the_log_at_the_time_of_its_creation(spark: Started, app: App, settings: Settings) -> None:
    frame = events(spark.spark, app, settings=settings)
    put(settings, f"{app.name}.account.a-3", headers_of("account.opened", 1, 1), b'{"owner": "late"}')
    assert frame.count() == frame.count() == 8
    assert events(spark.spark, app, settings=settings).count() == 9


@pytest.mark.parametrize(
    ("schema", "body", "problem"),
    [
        (3, b"{}", "position 9 is 'account.deposited' schema 3"),
        (2, b'{"amount": "1.001"}', "position 9 .'account.deposited'"),
    ],
)
def test_an_event_of_the_type_that_cannot_be_read_fails_the_query(
    spark: Started, app: App, settings: Settings, schema: int, body: bytes, problem: str
) -> None:
    put(settings, f"{app.name}.account.a-2", headers_of("account.deposited", schema, 6), body)
    frame = events(spark.spark, app, sys.modules[app.name].Deposited, settings=settings)
    with pytest.raises(Exception, match=problem):
        frame.count()
    assert events(spark.spark, app, settings=settings).count() == 9


def test_a_value_that_its_column_cannot_hold_fails_the_query(spark: Started, app: App, settings: Settings) -> None:
    put(settings, f"{app.name}.account.a-2", headers_of("account.counted", 1, 6), b'{"number": "9223372036854775808"}')
    frame = events(spark.spark, app, sys.modules[app.name].Counted, settings=settings)
    with pytest.raises(Exception, match=r"number of the event at position 9 .*does not fit"):
        frame.count()
    text = events(spark.spark, app, settings=settings).where("position = 9")
    assert text.selectExpr("get_json_object(body, '$.number')").collect()[0][0] == "9223372036854775808"


async def test_the_frame_of_an_empty_log_is_empty(spark: Started, settings: Settings, tmp_path: Path) -> None:
    name = fresh_name()
    (tmp_path / f"{name}.py").write_text(APP.substitute(name=name))
    loaded_app: Any = AppRef.parse(f"{name}:app", tmp_path).load()
    with pytest.raises(Unreachable, match="eventjet init"):
        events(spark.spark, loaded_app, settings=settings)
    async with loaded_app.connect(servers=settings.servers) as jet:
        await jet.init()
    assert events(spark.spark, loaded_app, settings=settings).collect() == []
    assert events(spark.spark, loaded_app, sys.modules[name].Opened, as_of=0, settings=settings).collect() == []


def test_invalid_arguments_are_refused_at_once(spark: Started, app: App, settings: Settings) -> None:
    with pytest.raises(UsageError, match="ends at position 8"):
        events(spark.spark, app, as_of=9, settings=settings)
    with pytest.raises(UsageError, match="no time zone"):
        events(spark.spark, app, as_of=datetime(2026, 1, 1), settings=settings)  # noqa: DTZ001
    with pytest.raises(UsageError, match="in the future"):
        events(spark.spark, app, as_of=datetime.now(UTC) + timedelta(days=1), settings=settings)
    with pytest.raises(UsageError, match="not an event of"):
        events(spark.spark, app, Started, settings=settings)
    nameless = App(app.name, aggregates=list(app.aggregates), upcasters=[sys.modules[app.name].in_cents])
    assert events(spark.spark, nameless, settings=settings).count() == 8
    with pytest.raises(UsageError, match=r"AppRef\.parse"):
        events(spark.spark, nameless, sys.modules[app.name].Opened, settings=settings)


async def test_a_password_is_passed_to_tasks_and_is_in_no_plan(
    spark: Started, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, canary = fresh_name(), "canary-that-sings"
    (tmp_path / f"{name}.py").write_text(APP.substitute(name=name))
    with NatsServer(
        sync_interval="1m", config=f"authorization {{ timeout: 30, user: ada, password: {canary} }}"
    ) as server:
        settings = Settings.load({"servers": server.url, "user": "ada", "password": canary}, {})
        reference = AppRef.parse(f"{name}:app", tmp_path)
        loaded_app: Any = reference.load()
        async with loaded_app.connect(servers=settings.servers, user="ada", password=canary) as jet:
            await jet.init()
            module = sys.modules[name]
            await jet.repository(module.Account).execute("a", module.Account.do, module.Opened(owner="o"))
        frame = events(spark.spark, reference, module.Opened, settings=settings)
        assert [row.owner for row in frame.collect()] == ["o"]
        frame.explain(extended=True)
        plan = capsys.readouterr().out
        assert "jetstream" in plan.lower()
        assert canary not in plan


async def test_nested_fields_that_differ_in_case_can_be_read_with_case_sensitivity(
    spark: Started, app: App, settings: Settings
) -> None:
    module: Any = sys.modules[app.name]
    async with app.connect(servers=settings.servers) as jet:
        await jet.repository(module.Account).execute(
            "a-7", module.Account.do, module.Moved(place=module.Place(zip="small", Zip=7))
        )
    spark.spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        moved = events(spark.spark, app, module.Moved, settings=settings)
        assert moved.select("place.zip", "place.Zip").collect() == [("small", 7)]
    finally:
        spark.spark.conf.unset("spark.sql.caseSensitive")


OWN_PORT = {"SPARK_TESTING": "1"}
"""Otherwise every Spark Connect server of this machine takes the same one."""
RUN = """
import sys
from eventjet.spark import events, spark_session

module = __import__(sys.argv[1])
with spark_session() as started:
    frame = events(started.spark, module.app, module.Deposited)
    print(sorted((row.position, row.amount) for row in frame.collect()))
    print(events(started.spark, module.app).count(), type(frame).__module__)
"""


@pytest.mark.skipif(
    "EVENTJET_TEST_CLUSTER_EVENTS" not in os.environ, reason="a minute of a second JVM: `make faults` runs it"
)
def test_spark_connect_shows_the_same(app: App, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    process = subprocess.run(
        [sys.executable, "run.py", app.name],
        cwd=tmp_path,
        env={**os.environ, "EVENTJET_SERVERS": settings.servers[0], "SPARK_REMOTE": "local[2]", **OWN_PORT},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        "[(2, Decimal('0.10')), (3, Decimal('0.25')), (4, Decimal('1.50'))]",
        "8 pyspark.sql.connect.dataframe",
    ]


def test_workers_import_the_installed_pyspark_which_has_byte_code(spark: Started) -> None:
    (origin,) = spark.spark.sparkContext.parallelize(["pyspark"], 1).map(find_spec).map(attrgetter("origin")).collect()
    assert Path(origin).is_file()
