"""The data source `jetstream` as a stream: contents of micro-batches, refused checkpoints, and the sink."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text

from eventjet.dev.nats import NatsServer
from eventjet.examples.bank import turnover_sink
from eventjet.nats.endpoint import Endpoint
from eventjet.spark.session import Started
from tests.integration.shared_spark import configured
from tests.integration.source_log import api, bank_log, fill, frame_of, positions_of, run_stream, turnover
from tests.integration.wire_log import append, make_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def spark(spark: Started) -> Iterator[Any]:
    with configured(spark, {"spark.sql.shuffle.partitions": "2"}) as session:
        yield session


class Batches:
    """The positions of each batch that a query was given."""

    def __init__(self) -> None:
        self.positions: list[list[int]] = []

    def __call__(self, batch: Any, number: int) -> None:
        self.positions.append(positions_of(batch))


def test_micro_batches_are_bounded_and_a_restart_continues_after_the_last(
    nats: NatsServer, spark: Any, tmp_path: Path
) -> None:
    log = bank_log(nats, 50)
    identity = api(nats, f"STREAM.INFO.{log.name}")["config"]["metadata"]["eventjet.log"]
    options = {"fromPosition": "11", "maxPositionsPerTrigger": "15", "partitions": "3", "columns": "position"}
    batches = Batches()
    run_stream(frame_of(spark, nats, log.name, streaming=True, **options), tmp_path / "checkpoint", batches)
    assert batches.positions == [list(range(11, 26)), list(range(26, 41)), list(range(41, 51))]
    assert last_offset(tmp_path / "checkpoint") == {"position": 50, "log": identity}
    fill(log, 3)
    run_stream(frame_of(spark, nats, log.name, streaming=True, **options), tmp_path / "checkpoint", batches)
    assert batches.positions[3:] == [[51, 52, 53]]


def test_a_failed_batch_is_repeated_with_the_same_events(nats: NatsServer, spark: Any, tmp_path: Path) -> None:
    log = bank_log(nats, 20)
    batches = Batches()

    def fail_after_batch(batch: Any, number: int) -> None:
        batches(batch, number)
        fill(log, 1)
        raise RuntimeError("not today")

    with pytest.raises(Exception, match="not today"):
        run_stream(frame_of(spark, nats, log.name, streaming=True), tmp_path / "checkpoint", fail_after_batch)
    run_stream(frame_of(spark, nats, log.name, streaming=True), tmp_path / "checkpoint", batches)
    assert batches.positions == [list(range(1, 21)), list(range(1, 21)), [21]]


def test_one_aggregate_can_be_followed(nats: NatsServer, spark: Any, tmp_path: Path) -> None:
    log = bank_log(nats, 200)
    expected = positions_of(
        frame_of(spark, nats, log.name, columns="position,aggregate_id").where("aggregate_id='a-3'")
    )
    batches = Batches()
    selection = {"aggregate": "ledger", "id": "a-3", "maxPositionsPerTrigger": "100"}
    run_stream(frame_of(spark, nats, log.name, streaming=True, **selection), tmp_path / "checkpoint", batches)
    assert [position for batch in batches.positions for position in batch] == expected
    assert len(batches.positions) == 2


def test_a_recreated_log_is_refused_by_its_checkpoint(nats: NatsServer, spark: Any, tmp_path: Path) -> None:
    log = bank_log(nats, 10)
    run_stream(frame_of(spark, nats, log.name, streaming=True), tmp_path / "checkpoint", Batches())
    log.delete()
    log.create()
    fill(log, 20)
    batches = Batches()
    with pytest.raises(Exception, match="checkpoint was made from the log"):
        run_stream(frame_of(spark, nats, log.name, streaming=True), tmp_path / "checkpoint", batches)
    assert batches.positions == []


def test_a_query_continues_over_a_promoted_mirror_up_to_its_end(nats: NatsServer, spark: Any, tmp_path: Path) -> None:
    log = bank_log(nats, 10)
    batches = Batches()
    for promoted_at in (None, 10, 15):
        if promoted_at is not None:
            log.promote(promoted_at)
            fill(log, 5)
        run_stream(frame_of(spark, nats, log.name, streaming=True), tmp_path / "checkpoint", batches)
    assert [position for batch in batches.positions for position in batch] == list(range(1, 21))
    log.promote(18)
    with pytest.raises(Exception, match=r"up to position 18 only.*another checkpoint location"):
        run_stream(frame_of(spark, nats, log.name, streaming=True), tmp_path / "checkpoint", batches)


def test_a_shorter_log_without_an_identity_is_refused(nats: NatsServer, spark: Any, tmp_path: Path) -> None:
    endpoint = Endpoint((nats.url,))
    stream = make_log(endpoint, [b"{}"] * 10)
    batches = Batches()
    run_stream(frame_of(spark, nats, stream, streaming=True), tmp_path / "checkpoint", batches)
    append(endpoint, stream, [b"{}"])
    run_stream(frame_of(spark, nats, stream, streaming=True), tmp_path / "checkpoint", batches)
    assert batches.positions == [list(range(1, 11)), [11]]
    assert last_offset(tmp_path / "checkpoint") == {"position": 11}
    api(nats, f"STREAM.DELETE.{stream}")
    api(nats, f"STREAM.CREATE.{stream}", {"name": stream, "subjects": [f"{stream}.*.*"]})
    append(endpoint, stream, [b"{}"] * 10)
    with pytest.raises(Exception, match=r"position 11 was read, and the log ends at 10"):
        run_stream(frame_of(spark, nats, stream, streaming=True), tmp_path / "checkpoint", batches)
    assert len(batches.positions) == 2


@pytest.mark.parametrize("selected", [{}, {"aggregate": "account"}])
def test_a_missing_position_fails_the_query(
    nats: NatsServer, spark: Any, tmp_path: Path, selected: dict[str, str]
) -> None:
    stream = make_log(Endpoint((nats.url,)), [b"{}"] * 10)
    api(nats, f"STREAM.MSG.DELETE.{stream}", {"seq": 7})
    frame = frame_of(spark, nats, stream, streaming=True, maxPositionsPerTrigger="5", **selected)
    batches = Batches()
    with pytest.raises(Exception, match="broken at position 7: it is missing"):
        run_stream(frame, tmp_path / "checkpoint", batches)
    assert batches.positions == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fromPosition": "12"}, "fromPosition is 12, and the log ends at 10"),
        ({"toPosition": "5"}, "A stream has no end"),
    ],
)
def test_a_stream_that_cannot_begin_is_refused(
    nats: NatsServer, spark: Any, tmp_path: Path, options: dict[str, str], problem: str
) -> None:
    log = bank_log(nats, 10)
    with pytest.raises(Exception, match=problem):
        run_stream(frame_of(spark, nats, log.name, streaming=True, **options), tmp_path / "checkpoint", Batches())


CRASHING = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import create_engine
from eventjet.spark.session import spark_session
from eventjet.examples.bank import turnover_sink
from tests.integration.source_log import run_stream

database, stream, checkpoint = sys.argv[1:]
engine = create_engine(database)
turnover_sink.create_tables(engine)

def take_and_die(events, batch):
    turnover_sink.take(engine, events)
    if batch == 1:
        os.kill(os.getpid(), signal.SIGKILL)

with spark_session("local[2]", conf={"spark.sql.shuffle.partitions": "2"}) as started:
    log = turnover_sink.log_of(started.spark, engine, stream, maxPositionsPerTrigger="300")
    run_stream(log, Path(checkpoint), take_and_die)
"""


def test_the_sink_counts_once_after_a_kill_and_a_deleted_checkpoint(
    nats: NatsServer, spark: Any, tmp_path: Path, eventjet_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = bank_log(nats, 1_000)
    checkpoint = tmp_path / "checkpoint"
    command = [sys.executable, "-c", CRASHING, eventjet_database, log.name, str(checkpoint)]
    monkeypatch.setenv("EVENTJET_SERVERS", nats.url)
    process = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert process.returncode == -9, process.stderr
    assert sorted(path.name for path in (checkpoint / "offsets").glob("[0-9]*")) == ["0", "1"]
    assert sorted(path.name for path in (checkpoint / "commits").glob("[0-9]*")) == ["0"]
    engine = create_engine(eventjet_database, poolclass=NullPool)
    assert sink_state(engine) == (600, turnover(log, 600))

    options = {"servers": nats.url, "maxPositionsPerTrigger": "300"}
    batch_numbers: list[int] = []

    def take(events: Any, number: int) -> None:
        batch_numbers.append(number)
        turnover_sink.take(engine, events)

    run_stream(turnover_sink.log_of(spark, engine, log.name, **options), checkpoint, take)
    assert batch_numbers == [1, 2, 3]
    assert sink_state(engine) == (1_000, turnover(log, 1_000))

    shutil.rmtree(checkpoint)
    last = fill(log, 450)
    run_stream(turnover_sink.log_of(spark, engine, log.name, **options), checkpoint, take)
    assert batch_numbers == [1, 2, 3, 0, 1]
    assert sink_state(engine) == (last, turnover(log, last))

    # From the beginning of the log, without the option that skips known positions.
    shutil.rmtree(checkpoint)
    fill(log, 50)
    options["fromPosition"] = "1"
    run_stream(turnover_sink.log_of(spark, engine, log.name, **options), checkpoint, take)
    assert sink_state(engine) == (last + 50, turnover(log, last + 50))

    # A database from a backup, older than the checkpoint: no event may be skipped silently.
    with engine.begin() as connection:
        connection.execute(text("update turnover_position set position = 100"))
    fill(log, 10)
    with pytest.raises(Exception, match="Start with a fresh checkpoint"):
        run_stream(turnover_sink.log_of(spark, engine, log.name, **options), checkpoint, take)
    engine.dispose()


def sink_state(engine: Engine) -> tuple[int, dict[str, int]]:
    """Return (position, cents by account) of the sink's tables."""
    with engine.connect() as connection:
        rows = connection.execute(text("select account_id, cents from turnover")).all()
        return connection.execute(turnover_sink.POSITION).scalar_one(), {str(name): int(cents) for name, cents in rows}


def last_offset(checkpoint: Path) -> dict[str, Any]:
    newest = max((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    return json.loads(newest.read_text().splitlines()[-1])
