"""`verify`: prove that a live read model is what the log says, row by row, with nothing paused."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import String, Table

from eventjet import failpoints
from eventjet.errors import RebuildError
from eventjet.projections.app_ref import AppRef, loaded
from eventjet.projections.application import Application
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.rebuild.catchup import check_loaded, replaying
from eventjet.rebuild.compare import compare_table
from eventjet.rebuild.engine import EngineOptions
from eventjet.rebuild.job import Job, in_thread, open_job
from eventjet.rebuild.orphaned_runs import remove_orphaned
from eventjet.rebuild.plan import EngineName, Plan
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.runner import load, projections_of
from eventjet.rebuild.runs import new_run
from eventjet.rebuild.shadow import Shadow, shadow_of
from eventjet.rebuild.since import since_when
from eventjet.settings import Settings
from eventjet.sql.checkpoint import RETIRED
from eventjet.sql.database import READ_ONLY
from eventjet.workers.reader import check_log

EXAMPLES_MAX = 20
"""Differences that are looked into; all are counted."""

UNKNOWN_SINCE = "since when is not known of SQL by hand"

_FETCH = 2_000
_TOLD_EVERY = 10_000


@dataclass(frozen=True, slots=True)
class Difference:
    """One key whose live row is not what the log says."""

    key: tuple[Any, ...]
    """For SQL by hand the table's name comes first."""
    live: Any
    """The live row; None when there is none."""
    expected: Any
    """The row folded from the log; None when there should be none."""
    since: str
    """`missed since N`: equal before the event at position N; or `never equal`. Not known for SQL by hand."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found."""

    projection: str
    revision: int
    engine: EngineName
    position: int
    """Where the live read model stood when its rows were copied."""
    events: int
    rows: int
    """Live rows compared."""
    differences: int
    examples: tuple[Difference, ...]
    """The first differences, by key."""
    seconds: Mapping[str, float]


async def verify(
    app: Application | AppRef,
    name: str,
    settings: Settings,
    *,
    engine: EngineName | EngineOptions = "local",
    from_archive: str | None = None,
    progress: Report | None = None,
) -> VerifyReport:
    """Rebuild a read model to a shadow at the live one's position and compare them; the live one is only read.

    `from_archive` is as `rebuild` has it. Raises as that does, and `LogRolledBack` when the live read model was made
    from another past.
    """

    def work(watch: Watch) -> VerifyReport:
        (resolved,) = projections_of(loaded(app), [name])
        with open_job(app, settings, watch, engine, from_archive) as job:
            return _verify(job, resolved)

    return await in_thread(settings, progress, work)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a comparison found."""

    rows: int
    differences: int
    examples: tuple[Difference, ...]


def _verify(job: Job, resolved: AnyResolved) -> VerifyReport:
    with job.watch.phase("start"):
        remove_orphaned(job.database)
    plan, found = _verify_tables(job, resolved) if isinstance(resolved, ResolvedSql) else _verify_rows(job, resolved)
    return VerifyReport(
        projection=resolved.name,
        revision=resolved.revision,
        engine=plan.engine,
        position=plan.last,
        events=plan.events,
        rows=found.rows,
        differences=found.differences,
        examples=found.examples,
        seconds=job.watch.seconds,
    )


def _verify_rows(job: Job, resolved: ResolvedProjection) -> tuple[Plan, _Found]:
    """By the fold, on the job's engine; then both tables are read in the order of their keys."""
    run = new_run()
    with shadow_of(job.database, resolved, run, job.watch, to_swap=False) as shadow:
        plan = _planned(job, shadow, run)
        check_loaded(shadow, plan, load(job, plan, [shadow]))
        failpoints.reach("verify.loaded")
        with job.watch.phase("compare"):
            rows, differences, first = _compare(shadow, job.watch)
            found = _Found(rows, differences, _looked_into(job, plan, shadow, first))
        failpoints.reach("verify.compared")
    return plan, found


def _verify_tables(job: Job, resolved: ResolvedSql) -> tuple[Plan, _Found]:
    """By its handlers, sequentially, whatever the engine; then the database compares."""
    run = new_run()
    with shadow_of(job.database, resolved, run, job.watch, to_swap=False) as shadow:
        plan = _planned(job, shadow, run)
        job.source.check(plan, job.watch)
        with replaying(shadow, job) as follower:
            follower.replay(plan)
        failpoints.reach("verify.loaded")
        rows = differences = 0
        examples: list[Difference] = []
        with job.watch.phase("compare"):
            numbered = shadow.space.numbered(shadow.tables)
            with shadow.engine().connect().execution_options(**{READ_ONLY: True}) as connection:
                for pair in shadow.pairs():
                    some, different, first = compare_table(connection, pair, numbered, EXAMPLES_MAX, job.watch)
                    rows, differences = rows + some, differences + different
                    examples += [Difference(one.key, one.live, one.expected, UNKNOWN_SINCE) for one in first]
        failpoints.reach("verify.compared")
    return plan, _Found(rows, differences, tuple(examples[:EXAMPLES_MAX]))


def _planned(job: Job, shadow: Shadow[AnyResolved], run: str) -> Plan:
    """Copy the live rows, and plan to make them again as of the copy's position."""
    with job.watch.phase("copy"):
        at = shadow.copy_live()
        if at is None or at.state == RETIRED:
            raise RebuildError(
                f"{shadow.resolved.name!r} has no live read model yet, so there is nothing to verify. "
                "Start a worker, or run `eventjet rebuild`."
            )
        check_log(job.log.endpoint, job.log.stream, at)
    failpoints.reach("verify.copied")
    return job.plan([shadow.resolved], [run], at.position)


def _compare(shadow: Shadow[ResolvedProjection], watch: Watch) -> tuple[int, int, list[tuple[Any, Any]]]:
    """(live rows, differences, the first pairs of live and expected row), both sides read once in key order."""
    codec = RowCodec(shadow.resolved.table, shadow.resolved.row_type, shadow.target.database.dialect)
    ((copied, made),) = shadow.pairs()
    rows = differences = 0
    first: list[tuple[Any, Any]] = []
    with (
        _in_key_order(shadow, copied, codec) as live,
        _in_key_order(shadow, made, codec) as expected,
    ):
        for one, other in _paired(live, expected, codec):
            rows += one is not None
            if rows % _TOLD_EVERY == 0:
                watch.tell("compare", rows, 0)
            if not _equal(one, other, codec):
                differences += 1
                if len(first) < EXAMPLES_MAX:
                    first.append((one, other))
    return rows, differences, first


@contextmanager
def _in_key_order(shadow: Shadow[ResolvedProjection], table: Table, codec: RowCodec) -> Generator[Iterator[Any]]:
    """The rows of one table, a few at a time, by key as Python sorts it."""
    engine = shadow.engine()
    quote = engine.dialect.identifier_preparer.quote_identifier
    in_bytes = shadow.target.database.dialect.byte_order
    order = ", ".join(
        quote(column.name) + (in_bytes if isinstance(column.type, String) else "")
        for column in shadow.resolved.table.primary_key.columns
    )
    columns = ", ".join(map(quote, codec.columns))
    with engine.connect() as connection:
        options = {"stream_results": True, "yield_per": _FETCH, READ_ONLY: True}
        found = connection.execution_options(**options).exec_driver_sql(
            f"select {columns} from {engine.dialect.identifier_preparer.format_table(table)} order by {order}"
        )
        yield map(codec.load, found)


def _paired(live: Iterator[Any], expected: Iterator[Any], codec: RowCodec) -> Iterator[tuple[Any, Any]]:
    """Rows of the same key together; None where a side has none. Both sides come in the order of their keys."""
    take_live, take_expected = partial(next, live, None), partial(next, expected, None)
    one, other = take_live(), take_expected()
    while one is not None or other is not None:
        if other is None or (one is not None and codec.key(one) < codec.key(other)):
            yield one, None
            one = take_live()
        elif one is None or codec.key(other) < codec.key(one):
            yield None, other
            other = take_expected()
        else:
            yield one, other
            one, other = take_live(), take_expected()


def _equal(one: Any, other: Any, codec: RowCodec) -> bool:
    """Whether two rows are the same values, whatever their class calls equal."""
    if one is None or other is None:
        return one is other
    pairs = zip(codec.dump(one), codec.dump(other), strict=True)
    # A value that is not equal to itself (NaN) is the same as another one.
    return all(a == b or (a != a and b != b) for a, b in pairs)


def _looked_into(
    job: Job, plan: Plan, shadow: Shadow[ResolvedProjection], pairs: list[tuple[Any, Any]]
) -> tuple[Difference, ...]:
    """Say since when each differs."""
    if not pairs:
        return ()
    resolved = shadow.resolved
    codec = RowCodec(resolved.table, resolved.row_type)
    live = {codec.key(one if one is not None else other): one for one, other in pairs}
    since = since_when(job, plan, resolved, live, shadow.target.known)
    return tuple(Difference(key, one, other, since[key]) for (one, other), key in zip(pairs, live, strict=True))
