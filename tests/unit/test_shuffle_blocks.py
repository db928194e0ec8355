"""Records packed for Spark's shuffle all arrive at their partitions, in order, in blocks of a limited size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventjet.codec.headers import RawRecord
from eventjet.spark import shuffle_blocks
from eventjet.spark.columns import arrow_batch
from eventjet.spark.shuffle_blocks import BLOCK_BYTES, PackByAggregate, TaskFault, unpack
from eventjet.spark.source import BATCH, read_columns

Row = dict[str, Any]


def record(position: int, subject: bytes, body: bytes = b"{}") -> RawRecord:
    return position, 1_700_000_000_000_000_000 + position, subject, b"NATS/1.0\r\n\r\n", body


def packed(batches: Sequence[Sequence[RawRecord]], partitions: int) -> list[Row]:
    """Return the rows that a task yields after it read these batches."""

    def read(_: Iterator[Any]) -> Iterator[list[RawRecord]]:
        return (list(batch) for batch in batches)

    rows: list[Row] = []
    for batch in PackByAggregate(read, partitions)(iter(())):
        rows += batch.to_pylist()
    return rows


def arrived(rows: Sequence[Row], partition: int) -> list[RawRecord]:
    """Return the records that the task of a partition gets, sorted as Spark sorts them."""
    own = sorted((row for row in rows if row["partition"] == partition), key=lambda row: row["position"])
    batch = shuffle_blocks._batch(own)  # pyright: ignore[reportPrivateUsage]  as tasks make it
    pieces = list(unpack(iter([batch])))
    assert all(events == len(records) for events, records in pieces)
    return [arrived_record for _, records in pieces for arrived_record in records]


SUBJECTS = st.sampled_from([f"app.{kind}.{number}".encode() for kind in ("a", "b") for number in range(20)])


@given(
    st.lists(st.tuples(SUBJECTS, st.binary(max_size=50)), max_size=200),
    st.integers(1, 7),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
    st.integers(1, 100),
)
def test_every_record_arrives_once_and_ids_stay_together_in_the_order_of_the_log(
    drawn: list[tuple[bytes, bytes]], partitions: int, file: int, chance: Random, batch: int
) -> None:
    log = [record(position, subject, body) for position, (subject, body) in enumerate(drawn, 1)]
    files = [log[at : at + file] for at in range(0, len(log), file)]
    # Spark gives a task the files of an archive by their size.
    chance.shuffle(files)
    read = [file_record for records in files for file_record in records]
    arrow = [arrow_batch(read[at : at + batch]) for at in range(0, len(read), batch)]
    rows = packed(list(read_columns(iter(arrow))), partitions)
    by_partition = {partition: arrived(rows, partition) for partition in range(partitions)}
    assert sorted(arrived_record for records in by_partition.values() for arrived_record in records) == log
    assert all(records == sorted(records) for records in by_partition.values())
    homes: dict[bytes, set[int]] = {}
    for partition, records in by_partition.items():
        for arrived_record in records:
            homes.setdefault(arrived_record[2].rpartition(b".")[2], set()).add(partition)
    assert all(len(partitions_of_id) == 1 for partitions_of_id in homes.values())


def test_a_block_is_no_larger_than_its_limit_or_a_single_record() -> None:
    large = 300_000
    log = [record(position, b"app.a.1", bytes(large)) for position in range(1, 41)]
    log.append(record(41, b"app.a.1", bytes(2 * BLOCK_BYTES)))
    rows = packed([log], 2)
    assert [row["events"] for row in rows if row["size"] > BLOCK_BYTES] == [1]
    assert sum(row["events"] for row in rows) == len(log)
    (home,) = {row["partition"] for row in rows}
    assert arrived(rows, home) == log


def test_a_task_yields_its_records_before_they_are_many() -> None:
    batches = [[record(at * 10 + n, b"app.a.%d" % n, bytes(50_000)) for n in range(1, 10)] for at in range(60)]
    batches_read: list[int] = []

    def read(_: Iterator[Any]) -> Iterator[list[RawRecord]]:
        for number, batch in enumerate(batches):
            batches_read.append(number)
            yield batch

    first = next(iter(PackByAggregate(read, 2)(iter(()))))
    assert first.num_rows
    assert len(batches_read) < 5


def test_a_fault_of_a_reading_task_is_raised_where_its_records_are_unpacked() -> None:
    batch = shuffle_blocks._batch([{"fault": "Position 7 cannot be read."}])  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(TaskFault, match="Position 7"):
        list(unpack(iter([batch])))


def test_the_columns_of_an_archive_are_read_as_the_same_records() -> None:
    log = [record(position, b"app.a.%d" % position) for position in range(1, 2_502)]
    read = list(read_columns(iter([arrow_batch(log[:2_300]), arrow_batch(log[2_300:])])))
    assert [read_record for records in read for read_record in records] == log
    assert max(map(len, read)) <= BATCH
