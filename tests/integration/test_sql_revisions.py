"""Revisions of SQL projections run beside each other: in schemas on PostgreSQL, under other names on SQLite."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded, SqlProjection
from eventjet.dev.nats import NatsServer
from eventjet.errors import LocationTaken
from eventjet.projections.sql_projection import ResolvedSql
from eventjet.rebuild import rebuild, verify
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.dialect import READ_ONLY
from eventjet.sql.locations import create_tables, located_tables
from eventjet.sql.revisions import retire, unused
from tests.integration import by_hand
from tests.integration.by_hand import LEDGER, QUICK, TableRows, changed, expected, log_of, table_rows
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import Added, Closed, Opened
from tests.integration.revision_log import checkpoints
from tests.tables import reading

HOME = "ej_ledger_r1"


async def _twice(event: Recorded[Added], connection: AsyncConnection) -> None:
    """Handle the event as revision 2 does."""
    await by_hand.added(event, connection)
    await by_hand._count(connection, "again")


_HANDLERS = (by_hand.opened, _twice, by_hand.closed)


def _revised(*, tables: Sequence[Table] = by_hand.ledger.tables, handlers: Sequence[Any] = _HANDLERS) -> ResolvedSql:
    declaration = SqlProjection("ledger", tables=tables, revision=2)
    for handler in handlers:
        declaration.handler(handler)
    return by_hand.resolved(declaration)


REVISED = _revised()


def revised(events: list[Recorded[Any]]) -> TableRows:
    """Return the expected rows of revision 2."""
    tables = expected(events)
    count = sum(isinstance(event.data, Added) for event in events)
    return {**tables, "totals": sorted([*tables["totals"], *([("again", count)] if count else [])])}


def init(log: Ledger, resolved: ResolvedSql) -> list[str]:
    engine = log.where.sync_engine()
    try:
        return create_tables(engine, [resolved])
    finally:
        engine.dispose()


def checkpoint(log: Ledger, revision: int) -> Checkpoint:
    return checkpoints(log)["ledger", revision]


def rows(log: Ledger, resolved: ResolvedSql) -> TableRows:
    """Return the rows of a revision, wherever its tables are."""
    location = checkpoint(log, resolved.revision).location
    return table_rows(log.where, tables=located_tables(resolved, location, log.where.dialect))


async def wait_taken_over(log: Ledger) -> None:
    async def has_taken_over() -> bool:
        return (await asyncio.to_thread(checkpoint, log, 2)).location == ""

    await eventually(has_taken_over, "revision 2 to take over", 60)


@pytest.fixture
def postgres_log(eventjet_nats: NatsServer, eventjet_database: str) -> Ledger:
    return log_of(eventjet_nats, eventjet_database)


@pytest.fixture
def sqlite_log(eventjet_nats: NatsServer, tmp_path: Path) -> Ledger:
    return log_of(eventjet_nats, f"sqlite:///{tmp_path}/read.db")


class Reader:
    """A reader that polls two of the declared tables together with their checkpoint, in one statement."""

    _QUERY = text(
        "select p.revision, p.position, "
        "(select coalesce(json_agg(json_build_array(name, n)), '[]')::text from totals), "
        "(select count(*) from lines) from eventjet_projection p where p.name = 'ledger' and p.location = ''"
    )

    def __init__(self, log: Ledger) -> None:
        self.snapshots: list[tuple[int, int, str, int]] = []
        self._engine = log.where.sync_engine()
        self._stop = threading.Event()
        self._fault: Exception | None = None

    def _run(self) -> None:
        try:
            with self._engine.connect().execution_options(**{READ_ONLY: True}) as connection:
                while not self._stop.is_set():
                    snapshot = tuple(connection.execute(self._QUERY).one())
                    connection.rollback()
                    if not self.snapshots or self.snapshots[-1][:2] != snapshot[:2]:
                        self.snapshots.append(snapshot)
                    time.sleep(0.01)
        except Exception as error:  # noqa: BLE001 - raised where it is checked
            self._fault = error

    @contextmanager
    def reading(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(20)
            self._engine.dispose()

    async def has_seen(self, revision: int) -> bool:
        return any(snapshot[0] == revision for snapshot in self.snapshots)

    def check(self, log: Ledger) -> set[int]:
        """Assert that each read showed one revision at one position; return the revisions."""
        assert self._fault is None, self._fault
        assert [snapshot[:2] for snapshot in self.snapshots] == sorted(snapshot[:2] for snapshot in self.snapshots)
        positions = [position for _, position, _, _ in self.snapshots]
        assert positions == sorted(positions)
        events = log.recorded(positions[-1])
        for revision, position, totals, lines in self.snapshots:
            due = (expected if revision == 1 else revised)([event for event in events if event.position <= position])
            assert sorted(map(tuple, json.loads(totals))) == due["totals"], (revision, position)
            assert lines == len(due["lines"]), (revision, position)
        return {revision for revision, *_ in self.snapshots}


async def test_a_revision_builds_in_its_own_schema_and_takes_over(
    postgres_log: Ledger,
) -> None:
    log, newer = postgres_log, changed(postgres_log, REVISED)
    events = history(1_200)
    log.append(events[:600])
    log.execute("grant select on accounts to public", "grant usage on sequence lines_id_seq to public")
    reader = Reader(log)
    async with log.working(options=QUICK):
        await log.caught_up(log.append(events[600:650]), LEDGER)
        with reader.reading():
            await eventually(lambda: reader.has_seen(1), "a reader to look at revision 1")
            assert init(newer, REVISED) == [f"ej_ledger_r2.{name}" for name in ("totals", "accounts", "lines")]
            async with newer.working(options=QUICK):
                for number in range(650, 1_100, 45):
                    log.append(events[number : number + 45])
                    await asyncio.sleep(0.05)
                await wait_taken_over(log)
                last = log.append(events[1_100:])
                await log.caught_up(last, REVISED)

                # A worker still runs the older revision, which continues in its own schema.
                async def follows() -> bool:
                    return (await asyncio.to_thread(checkpoint, log, 1)).position >= last - 10

                await eventually(follows, "revision 1 to follow")
                await eventually(lambda: reader.has_seen(2), "a reader to look at revision 2")
    assert reader.check(log) == {1, 2}
    assert (checkpoint(log, 1).location, checkpoint(log, 2).location) == (HOME, "")
    assert (checkpoint(log, 1).reason, checkpoint(log, 2).reason) == (None, None)
    assert table_rows(log.where) == rows(log, REVISED) == revised(log.recorded(last))
    assert rows(log, LEDGER) == expected(log.recorded(checkpoint(log, 1).position))
    granted = "select has_table_privilege('public', 'public.accounts', 'select'), has_sequence_privilege('public', "
    assert query_rows(log, granted + "'public.lines_id_seq', 'usage')") == [(True, True)]


def query_rows(log: Ledger, query: str) -> list[Any]:
    engine = log.where.sync_engine()
    try:
        with engine.begin() as connection:
            return [tuple(row) for row in connection.execute(text(query))]
    finally:
        engine.dispose()


async def build_both_revisions(log: Ledger) -> int:
    """Let revision 2 take over from revision 1; return the last position."""
    last = log.append(history(300))
    async with log.working(options=QUICK):
        await log.caught_up(last, LEDGER)
    newer = changed(log, REVISED)
    init(newer, REVISED)
    async with newer.working(options=QUICK):
        await wait_taken_over(log)
    return last


async def test_each_revision_is_rebuilt_verified_and_dropped_by_itself(postgres_log: Ledger) -> None:
    log, last = postgres_log, await build_both_revisions(postgres_log)
    for revision, resolved in ((1, LEDGER), (2, REVISED)):
        location = HOME if revision == 1 else ""
        log.execute(f"update {location or 'public'}.totals set n = n + 1 where name = 'added'")
        deployed = changed(log, resolved)
        assert (await verify(deployed, "ledger", log.settings)).differences == 1
        report = await rebuild(deployed, ["ledger"], log.settings, engine="local")
        assert report.projections[0].location == checkpoint(log, revision).location == location
        assert (await verify(deployed, "ledger", log.settings)).differences == 0
    assert rows(log, REVISED) == revised(log.recorded(last))
    assert rows(log, LEDGER) == expected(log.recorded(last))
    engine = log.where.sync_engine()
    with engine.begin() as connection:
        assert [(table.revision, len(table.tables)) for table in unused(connection, [REVISED])] == [(1, 3)]
        retire(connection, "ledger", 1, [REVISED])
    engine.dispose()
    assert query_rows(log, f"select nspname from pg_namespace where nspname = '{HOME}'") == []
    assert rows(log, REVISED) == revised(log.recorded(last))


async def test_a_replaced_session_works_in_the_schema_of_its_revision(postgres_log: Ledger) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await _twice(event, connection)
        if event.position > 150:
            await connection.commit()

    log = postgres_log
    last = log.append(history(300))
    async with log.working(options=QUICK):
        await log.caught_up(last, LEDGER)
    committing = _revised(handlers=(by_hand.opened, added, by_hand.closed))
    init(log, committing)

    async def failed() -> bool:
        return (await asyncio.to_thread(checkpoint, log, 2)).state == "failed"

    async with changed(log, committing).working(options=QUICK):
        await eventually(failed, "the handler that commits to be stopped")
    position = checkpoint(log, 2).position
    assert 140 < position < 160
    assert rows(log, committing) == revised(log.recorded(position))
    assert table_rows(log.where) == expected(log.recorded(last))


async def test_on_sqlite_a_revision_with_the_same_tables_is_refused(sqlite_log: Ledger) -> None:
    log, newer = sqlite_log, changed(sqlite_log, REVISED)
    last = log.append(history(100))
    async with log.working(options=QUICK):
        await log.caught_up(last, LEDGER)
    refusal = (
        "Revision 2 of projection 'ledger' .* Declare tables of other names for it, or leave the revision as it was"
    )
    with pytest.raises(LocationTaken, match=refusal):
        init(newer, REVISED)
    with pytest.raises(LocationTaken, match=refusal):
        async with newer.working(options=QUICK):
            pass
    with pytest.raises(LocationTaken, match=refusal):
        await rebuild(newer, ["ledger"], log.settings, engine="local")
    assert table_rows(log.where) == expected(log.recorded(last))
    assert list(checkpoints(log)) == [("ledger", 1)]


counts_table = Table(
    "counts", MetaData(), Column("name", String(20), primary_key=True), Column("n", Integer, nullable=False)
)


async def _counted(event: Recorded[Opened | Added | Closed], connection: AsyncConnection) -> None:
    name = type(event.data).__name__.lower()
    own = counts_table.c.name == name
    if not (await connection.execute(update(counts_table).where(own).values(n=counts_table.c.n + 1))).rowcount:
        await connection.execute(insert(counts_table).values(name=name, n=1))


@pytest.mark.parametrize("kind", ["postgres_log", "sqlite_log"])
async def test_a_revision_with_other_table_names_needs_no_schema_of_its_own(
    request: pytest.FixtureRequest, kind: str
) -> None:
    log: Ledger = request.getfixturevalue(kind)
    resolved = _revised(tables=[counts_table], handlers=[_counted])
    last = log.append(history(300)[:200])
    async with log.working(options=QUICK):
        await log.caught_up(last, LEDGER)
    newer = changed(log, resolved)
    init(newer, resolved)
    async with log.working(options=QUICK), newer.working(options=QUICK):
        last = log.append(history(300)[200:])
        await log.caught_up(last, resolved)
        await log.caught_up(last, LEDGER)
    assert [checkpoint(log, revision).location for revision in (1, 2)] == ["", ""]
    expected_rows = expected(log.recorded(last))
    assert table_rows(log.where) == expected_rows
    with reading(log.settings.database) as connection:
        assert sorted(tuple(row) for row in connection.execute(select(counts_table))) == expected_rows["totals"]
