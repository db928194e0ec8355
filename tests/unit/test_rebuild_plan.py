"""The plan of a rebuild: its ranges, passes, partitions and engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Column, Integer, MetaData, String, Table

from eventjet.codec.catalog import Catalog
from eventjet.domain.aggregate import event
from eventjet.domain.recorded import Recorded
from eventjet.errors import UsageError
from eventjet.jetstream.reader import EVENTS_PER_RANGE, range_count, split
from eventjet.projections.projection import projection
from eventjet.projections.resolve import resolve
from eventjet.rebuild.folding import key_token
from eventjet.rebuild.job import EngineOptions, open_engine, options_of
from eventjet.rebuild.plan import (
    ENGINES,
    EVENTS_PER_PARTITION,
    KEYS_PER_PARTITION,
    SPARK_EVENTS,
    Plan,
    Route,
    choose_engine,
    make_plan,
)
from eventjet.rebuild.progress import Watch
from tests.integration.projecting import BALANCES, MOVEMENTS


@event("thing.seen")
class Seen:
    by: str


@dataclass(frozen=True, slots=True)
class Count:
    by: str
    times: int


def by(event: Recorded[Seen]) -> str:
    return event.data.by


@projection(
    "counts",
    table=Table("counts", MetaData(), Column("by", String, primary_key=True), Column("times", Integer, nullable=False)),
    key=by,
)
def counts(row: Count | None, event: Recorded[Seen]) -> Count | None:
    return Count(event.data.by, row.times + 1 if row else 1)


COUNTS = resolve(counts, Catalog([Seen]))


def planned(*resolved: Any, engine: Any = "spark", last: int = 1_000, keys: int = 10, cores: int = 2) -> Plan:
    return make_plan("app", 1, last, resolved, keys=keys, engine=engine, cores=cores)


@given(st.integers(1, 10**7), st.integers(0, 10**6), st.integers(1, 500))
def test_ranges_cover_every_position_once_and_in_order(first: int, length: int, count: int) -> None:
    parts = split(first, first + length - 1, count)
    assert sum(map(len, parts)) == length
    assert len(parts) <= count
    if parts:
        assert (parts[0].start, parts[-1].end) == (first, first + length)
        assert all(part.end == next_part.start for part, next_part in pairwise(parts))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranges_are_small_enough_to_show_progress() -> None:
    assert range_count(10 * EVENTS_PER_RANGE + 1, at_least=2) == 11
    assert range_count(1, at_least=2) == 2


def test_a_plan_of_an_empty_log_reads_nothing() -> None:
    plan = planned(BALANCES, last=0)
    assert (plan.events, plan.ranges) == (0, ())


def test_folds_by_aggregate_and_entries_share_a_pass_over_the_log() -> None:
    plan = planned(BALANCES, COUNTS, MOVEMENTS)
    assert [(plan_pass.route, plan_pass.projections) for plan_pass in plan.passes] == [
        (Route.BY_AGGREGATE, ("balances", "movements")),
        (Route.BY_KEY, ("counts",)),
    ]


def test_entries_alone_need_no_shuffle() -> None:
    assert [plan_pass.route for plan_pass in planned(MOVEMENTS).passes] == [Route.UNSHUFFLED]


def test_the_local_engine_reads_the_log_once_for_all_projections() -> None:
    plan = planned(BALANCES, COUNTS, MOVEMENTS, engine="local")
    assert [plan_pass.projections for plan_pass in plan.passes] == [("balances", "counts", "movements")]
    assert plan.partitions == 1


def test_many_keys_are_spread_over_more_partitions_than_cores() -> None:
    assert planned(BALANCES, keys=10 * KEYS_PER_PARTITION).partitions == 10
    assert planned(BALANCES, keys=10).partitions == 2


def test_archived_events_are_not_read_from_the_log() -> None:
    plan = make_plan("app", 5, 100, [BALANCES], archived=60, keys=1, engine="local", cores=1)
    assert (plan.events, plan.archived, plan.ranges[0].start, plan.ranges[-1].end) == (96, 60, 61, 101)


def test_snapshots_of_many_events_are_folded_in_more_partitions_than_cores() -> None:
    few = make_plan("app", 1, 10, engine="spark", cores=2)
    many = make_plan("app", 1, 5 * EVENTS_PER_PARTITION, engine="spark", cores=2)
    assert (few.partitions, many.partitions, many.events) == (2, 5, 5 * EVENTS_PER_PARTITION)


def test_an_unknown_engine_is_refused() -> None:
    flink: Any = "flink"
    with pytest.raises(UsageError, match="Use auto, spark or local"):
        options_of(flink)


def test_the_local_engine_writes_no_archive() -> None:
    job: Any = None
    with (
        open_engine("local", EngineOptions("local"), Watch()) as engine,
        pytest.raises(UsageError, match="Only Spark writes archives"),
    ):
        engine.seal(job, "past", [(1, 10)])


def test_every_engine_is_found_by_its_name() -> None:
    for name in ENGINES:
        with open_engine(name, EngineOptions(name), Watch()) as engine:
            assert engine.name == name


@given(st.lists(st.tuples(st.text(), st.integers(), st.text()), unique=True, min_size=2, max_size=2))
def test_different_keys_have_different_tokens(keys: list[tuple[str, int, str]]) -> None:
    assert key_token(keys[0]) != key_token(keys[1])


@pytest.mark.parametrize(
    ("events", "options", "engine", "says"),
    [
        (1, {}, "local", "local, for 1 event; from 5,000,000 on"),
        (SPARK_EVENTS - 1, {}, "local", "4,999,999 events; .* or as `--engine` says"),
        (SPARK_EVENTS, {}, "spark", "Spark on this machine, for 5,000,000 events; below 5,000,000 it is local"),
        (SPARK_EVENTS, {"installed": False}, "local", "pyspark is not installed, though 5,000,000"),
        (1, {"cluster": "spark://head:7077"}, "spark", "Spark on spark://head:7077, which is configured"),
        (1, {"remote_archive": True}, "spark", "no folder of this machine"),
    ],
)
def test_the_engine_is_chosen_by_size(events: int, options: dict[str, Any], engine: str, says: str) -> None:
    chosen, why = choose_engine(events, **options)
    assert chosen == engine
    assert re.search(says, why), why
