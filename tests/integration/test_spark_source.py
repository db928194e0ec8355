"""The data source `jetstream`, read at once: columns, ranges, aggregates, filters, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.examples.bank.account import Deposited
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.spark.session import Started
from eventjet.spark.source import connection_options, seal
from tests.integration.shared_spark import configured
from tests.integration.source_log import api, bank_log, frame_of, positions_of, run_stream
from tests.integration.wire_log import make_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def spark(spark: Started) -> Iterator[Any]:
    """A session that pushes filters, which is not Spark's default."""
    with configured(spark, {PUSHDOWN: "true"}) as session:
        yield session


def test_columns_describe_the_events(nats: NatsServer, spark: Any) -> None:
    log = bank_log(nats)
    log.append([("a-1", Deposited(amount=Decimal(1)))])
    log.append_raw([("=C3=A9", b"", b"{}")])
    columns = "version,type,aggregate_id,aggregate,time,body,position"
    frame = frame_of(spark, nats, log.name, columns=columns)
    assert frame.columns == columns.split(",")
    first, second = sorted(frame.collect(), key=lambda row: row.position)
    (event,) = log.recorded(1)
    assert (first.version, first.type, first.aggregate_id, first.aggregate, bytes(first.body)) == (
        event.version, "account.deposited", "a-1", "ledger", b'{"amount":"1"}',
    )  # fmt: skip
    assert first.time.astimezone() == event.recorded_at.astimezone()
    assert (second.version, second.type, second.aggregate_id) == (None, None, "é")


def test_a_schema_of_the_user_selects_columns(nats: NatsServer, spark: Any) -> None:
    log = bank_log(nats, 3)
    reader = spark.read.format("jetstream").options(servers=nats.url, stream=log.name)
    assert reader.schema("version bigint, position bigint").load().where("version = 1").count() == 3
    with pytest.raises(Exception, match="position is bigint, not int"):
        reader.schema("position int").load().collect()


def test_the_server_selects_one_aggregate_type_or_one_id(nats: NatsServer, spark: Any) -> None:
    log = bank_log(nats, 500)
    hostile = "a.*>é"
    log.append_raw([("a=2E=2A=3E=C3=A9", b"", b"1"), ("a-1x", b"", b"2")])
    everything = frame_of(spark, nats, log.name, columns="position,aggregate_id").collect()
    expected = sorted(row.position for row in everything if row.aggregate_id == "a-1")
    assert len(expected) > 5
    assert positions_of(frame_of(spark, nats, log.name, aggregate="ledger", id="a-1", partitions="3")) == expected
    assert positions_of(frame_of(spark, nats, log.name, aggregate="ledger", id=hostile)) == [501]
    assert positions_of(frame_of(spark, nats, log.name, aggregate="ledger", id="nobody")) == []
    assert positions_of(frame_of(spark, nats, log.name, aggregate="other")) == []
    assert frame_of(spark, nats, log.name, aggregate="ledger").count() == 502


def test_a_frame_reads_the_same_positions_however_often_it_is_used(nats: NatsServer, spark: Any) -> None:
    log = bank_log(nats, 1)
    frame = frame_of(spark, nats, log.name)
    assert positions_of(frame) == [1]
    log.append([("a-1", Deposited(amount=Decimal(1)))])
    assert positions_of(frame) == [1]
    assert positions_of(frame_of(spark, nats, log.name)) == [1, 2]


def test_a_log_may_begin_after_position_one_and_missing_events_are_an_error(nats: NatsServer, spark: Any) -> None:
    stream = make_log(Endpoint((nats.url,)), [b"{}"] * 10)
    api(nats, f"STREAM.PURGE.{stream}", {"seq": 5})
    assert positions_of(frame_of(spark, nats, stream)) == [5, 6, 7, 8, 9, 10]
    assert positions_of(frame_of(spark, nats, stream, columns="position", toPosition="6")) == [5, 6]
    for selected in ({}, {"aggregate": "account"}):
        with pytest.raises(Exception, match="broken at position 4: the log begins at position 5"):
            frame_of(spark, nats, stream, fromPosition="4", **selected).collect()
        with pytest.raises(Exception, match="broken at position 11: the log ends at 10"):
            frame_of(spark, nats, stream, toPosition="12", **selected).collect()
    api(nats, f"STREAM.MSG.DELETE.{stream}", {"seq": 7})
    for selected in ({}, {"aggregate": "account"}, {"aggregate": "account", "id": "1"}):
        with pytest.raises(Exception, match="broken at position 7: it is missing"):
            frame_of(spark, nats, stream, **selected).collect()
    assert frame_of(spark, nats, stream, fromPosition="8", aggregate="account").count() == 3
    api(nats, f"STREAM.PURGE.{stream}")
    assert positions_of(frame_of(spark, nats, stream)) == []
    assert positions_of(frame_of(spark, nats, stream, columns="position,type", aggregate="account")) == []


@pytest.mark.parametrize(
    "condition",
    [
        "position > 10 and position <= 20",
        "position >= 31 and position < 33",
        "position = 7",
        "position > 0 and position < -5",
        "position between 3 and 1000000",
        "5 > position or position = 90",
        "position in (1, 2, 95)",
        "position > 10 and not position = 11 and version = 1",
        "subject = '{log}.ledger.a-3'",
        "subject = '{log}.ledger.a-3' and position > 50 and type = 'account.deposited'",
        "subject = '{log}.ledger.a-3' and subject like '%3'",
        "subject = '{log}.ledger.*'",
        "subject = '{log}.>'",
        "subject = 'nobody.listens.here'",
        "subject = ''",
        "position <=> 7",
        "position is null",
        "subject <> '{log}.ledger.a-3' and position < 40",
    ],
)
def test_pushed_filters_return_the_rows_that_they_describe(
    nats: NatsServer, spark: Any, filtered: str, filtered_rows: Any, condition: str
) -> None:
    where = condition.format(log=filtered)
    pushed = frame_of(spark, nats, filtered, pushFilters="true", columns="position,subject,type,version")
    assert positions_of(pushed.where(where)) == positions_of(filtered_rows.where(where))


@pytest.fixture(scope="module")
def filtered(nats: NatsServer) -> str:
    return bank_log(nats, 100).name


@pytest.fixture(scope="module")
def filtered_rows(nats: NatsServer, spark: Any, filtered: str) -> Any:
    """Return the same rows as a DataFrame without a data source."""
    read = frame_of(spark, nats, filtered, columns="position,subject,type,version")
    return spark.createDataFrame(read.collect(), read.schema)


def test_positions_excluded_by_a_pushed_filter_are_not_read(nats: NatsServer, spark: Any, filtered: str) -> None:
    frame = frame_of(spark, nats, filtered, pushFilters="true").where("position > 98 and position < 100")
    assert "Filter (" not in plan_of(frame)
    assert frame.rdd.getNumPartitions() == 1
    assert positions_of(frame) == [99]
    spark.conf.set(PUSHDOWN, "false")
    try:
        unpushed = frame_of(spark, nats, filtered, pushFilters="true").where("position > 98 and position < 100")
        assert "Filter (" in plan_of(unpushed)
        assert positions_of(unpushed) == [99]
    finally:
        spark.conf.set(PUSHDOWN, "true")


def test_a_frame_that_is_used_twice_is_correct_unless_filters_are_pushed(
    nats: NatsServer, spark: Any, filtered: str
) -> None:
    """The second assertion shows a fault of Spark: once it fails, filters can be pushed by default."""

    def twice(**options: str) -> int:
        frame = frame_of(spark, nats, filtered, **options)
        return frame.where("position <= 20").union(frame.where("position > 70")).count()

    assert twice() == 50
    assert twice(pushFilters="true") != 50


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"columns": "position,amount"}, "no column 'amount'"),
        ({"stream": "nobody_s"}, "The stream 'nobody_s': it does not exist"),
        ({"id": "a-1"}, "`id` is one aggregate's"),
        ({"pushFilters": "maybe"}, "pushFilters is 'maybe'"),
    ],
)
def test_invalid_options_are_refused(
    nats: NatsServer, spark: Any, filtered: str, options: dict[str, str], problem: str
) -> None:
    with pytest.raises(Exception, match=problem):
        spark.read.format("jetstream").options(**{"servers": nats.url, "stream": filtered, **options}).load().collect()


def test_no_secret_is_in_a_plan_or_a_checkpoint(spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    secret = "c4nary-s3cret"
    with NatsServer(
        sync_interval="1m", config=f"authorization {{ timeout: 30, user: ada, password: {secret} }}"
    ) as strict:
        settings = Settings.load({"servers": strict.url.replace("//", f"//ada:{secret}@")}, {})
        stream = make_log(Endpoint.of(settings), [b"{}"] * 20)
        (tmp_path / "secrets").mkdir()
        options = connection_options(settings, tmp_path / "secrets") | {"stream": stream}
        frame = spark.read.format("jetstream").options(**options).load()
        assert frame.count() == 20
        frame.where("position > 3").explain("extended")
        positions: list[int] = []
        streamed = spark.readStream.format("jetstream").options(**options).load()
        run_stream(streamed, tmp_path / "checkpoint", lambda batch, _: positions.extend(positions_of(batch)))
        assert len(positions) == 20
        streamed.explain("extended")
        options["passwordFile"] = seal(tmp_path / "secrets", "password", "wrong" + secret)
        with pytest.raises(Exception, match="Authorization Violation") as refused:
            spark.read.format("jetstream").options(**options).load().collect()
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    printed = capfd.readouterr()
    assert "Physical Plan" in printed.out
    assert secret not in printed.out + printed.err + str(refused.value)


OWN_PORT = {"SPARK_TESTING": "1"}
"""Otherwise every Spark Connect server of this machine takes the same one."""
CONNECT = """
import sys
from eventjet.spark.session import spark_session

servers, stream, checkpoint = sys.argv[1:]
with spark_session(conf={"spark.sql.python.filterPushdown.enabled": "true"}) as started:
    spark = started.spark
    assert "connect" in type(spark).__module__, type(spark)
    options = {"servers": servers, "stream": stream, "columns": "position,aggregate_id"}
    print(spark.read.format("jetstream").options(**options).load().count())
    pushed = spark.read.format("jetstream").options(**options, pushFilters="true").load().where("position > 90")
    print(pushed.count())
    streamed = spark.readStream.format("jetstream").options(**options, maxPositionsPerTrigger="60").load()
    writer = streamed.writeStream.format("memory").queryName("seen").option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    print(spark.table("seen").count(), len(query.recentProgress))
"""


@pytest.mark.skipif(
    "EVENTJET_TEST_CLUSTER_EVENTS" not in os.environ, reason="a minute of a second JVM: `make faults` runs it"
)
def test_spark_connect_reads_and_follows_the_log(nats: NatsServer, filtered: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONNECT, nats.url, filtered, str(tmp_path / "checkpoint")]
    environ = {**os.environ, "SPARK_REMOTE": "local[2]", **OWN_PORT}
    process = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[:3] == ["100", "10", "100"]


def plan_of(frame: Any) -> str:
    return frame._jdf.queryExecution().executedPlan().toString()
