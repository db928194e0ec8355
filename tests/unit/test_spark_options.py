"""The options of the data source `jetstream`, and the page that documents them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from eventjet.errors import Refused, UsageError
from eventjet.spark.columns import STORED, arrow_batch, parse_columns, schema_of
from eventjet.spark.source import POSITIONS_PER_TRIGGER, FilteringReader, LogOptions

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "spark-source.md"
EVERY = "position,time_ns,subject,headers,body,time,aggregate,aggregate_id,type,version"


def test_without_options_a_record_is_read_as_stored() -> None:
    options = LogOptions.parse({"stream": "bank"})
    assert schema_of(options.columns) == (
        "position bigint, time_ns bigint, subject string, headers binary, body binary"
    )
    assert (options.subject, options.first, options.last, options.partitions) == (None, None, None, None)
    assert (options.positions_per_trigger, options.push_filters) == (POSITIONS_PER_TRIGGER, False)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("aggregate_id", "subject"),
    [
        (None, "bank.account.*"),
        ("a-1", "bank.account.a-1"),
        ("a.*>", "bank.account.a=2E=2A=3E"),
        ("é", "bank.account.=C3=A9"),
    ],
)
def test_an_aggregate_is_read_by_the_subject_of_its_events(aggregate_id: str | None, subject: str) -> None:
    chosen = {"stream": "bank", "aggregate": "account"} | ({"id": aggregate_id} if aggregate_id is not None else {})
    assert LogOptions.parse(chosen).subject == subject


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": ""}, "needs to know the stream"),
        ({"postion": "1"}, "no option 'postion'"),
        ({"servers": "nats://a:b@host"}, "would show in Spark's plans"),
        ({"fromposition": "x"}, "fromPosition is 'x'"),
        ({"partitions": "0"}, "partitions is '0'"),
        ({"columns": "position,body,postion"}, "no column 'postion'"),
        ({"columns": ""}, "names none, or one twice"),
        ({"columns": "body, Body"}, "names none, or one twice"),
        ({"id": "a-1"}, "`id` is one aggregate's"),
        ({"aggregate": "*"}, r"'\*' is no aggregate"),
        ({"aggregate": ""}, "'' is no aggregate"),
        ({"stream": "bank.>"}, "cannot be the name of a stream"),
        ({"stream": "bank\r\nPUB x 0"}, "cannot be the name of a stream"),
        ({"maxPositionsPerTrigger": "0"}, "maxPositionsPerTrigger is '0'"),
        ({"fromPosition": "-1"}, "fromPosition is '-1'"),
        ({"toPosition": "9" * 19}, "toPosition is '9999"),
        ({"pushFilters": "yes"}, "pushFilters is 'yes'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LogOptions.parse({"stream": "bank", **options})


@pytest.mark.parametrize("aggregate_id", ["", "x" * 201])
def test_an_invalid_id_of_an_aggregate_is_refused(aggregate_id: str) -> None:
    with pytest.raises(Refused):
        LogOptions.parse({"stream": "bank", "aggregate": "account", "id": aggregate_id})


def test_a_batch_has_the_columns_in_the_requested_order() -> None:
    block = b"NATS/1.0\r\nEj-Type: account.opened\r\nEj-Schema: 1\r\nEj-Version: 3\r\n\r\n"
    records: Any = [
        (7, 1_700_000_000_123_456_789, b"bank.account.=C3=A9", block, b"{}"),
        (8, 0, b"elsewhere", b"", b""),
    ]
    batch = arrow_batch(records, parse_columns(f" {EVERY.upper()} "))
    assert ",".join(batch.schema.names) == EVERY
    first, second = batch.to_pylist()
    assert (first["aggregate"], first["aggregate_id"], first["type"], first["version"]) == (
        "account", "é", "account.opened", 3,
    )  # fmt: skip
    assert first["time"].isoformat() == "2023-11-14T22:13:20.123456+00:00"
    assert [second[name] for name in ("aggregate", "aggregate_id", "type", "version")] == [None] * 4
    assert (second["position"], second["subject"], second["headers"], second["body"]) == (8, "elsewhere", b"", b"")
    assert arrow_batch(records).schema.names == list(STORED)


def test_filters_that_are_not_pushed_are_returned_as_the_same_objects() -> None:
    from pyspark.sql import datasource as spark

    reader = FilteringReader(LogOptions.parse({"stream": "bank"}), STORED)
    pushed = [
        spark.IsNotNull(("position",)),
        spark.GreaterThan(("position",), 10),
        spark.GreaterThanOrEqual(("position",), 5),
        spark.LessThanOrEqual(("position",), 90),
        spark.LessThan(("position",), 90),
        spark.EqualTo(("subject",), "bank.account.a-1"),
    ]
    not_taken = [
        spark.IsNull(("position",)),
        spark.Not(spark.EqualTo(("position",), 11)),
        spark.In(("position",), (1, 2)),
        spark.EqualNullSafe(("position",), 7),
        spark.EqualTo(("subject",), "bank.account.a-2"),
        spark.StringStartsWith(("subject",), "bank."),
        spark.IsNotNull(("type",)),
        spark.GreaterThan(("version",), 1),
    ]
    given_back = list(reader.pushFilters([*pushed, *not_taken]))
    assert list(map(id, given_back)) == list(map(id, not_taken))
    assert (reader.at_least, reader.at_most, reader.options.subject) == (11, 89, "bank.account.a-1")


@pytest.mark.parametrize("subject", ["bank.account.*", "bank.>", "", "a b", ".", "bank..x"])
def test_a_filter_on_a_subject_with_wildcards_is_left_to_spark(subject: str) -> None:
    from pyspark.sql import datasource as spark

    reader = FilteringReader(LogOptions.parse({"stream": "bank"}), STORED)
    assert len(list(reader.pushFilters([spark.EqualTo(("subject",), subject)]))) == 1
    assert reader.options.subject is None


def test_the_page_names_every_option_and_column() -> None:
    page = PAGE.read_text(encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        LogOptions.parse({"nonsense": ""})
    options = str(refused.value).rpartition("It has: ")[2].rstrip(".").split(", ")
    assert len(options) > 15
    assert [name for name in (*options, *EVERY.split(",")) if f"`{name}`" not in page and f'"{name}"' not in page] == []
