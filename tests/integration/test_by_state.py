"""Keys from the state of an aggregate give the same rows in workers, rebuilds, `verify` and tests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import inspect

from eventjet import App, projection
from eventjet.dev.stack import running_stack
from eventjet.domain.recorded import Recorded
from eventjet.errors import Unreachable
from eventjet.operations.tables import revision_tables
from eventjet.projections.app_ref import AppRef
from eventjet.rebuild import archive, rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.sql.revisions import pause, reset, resume, retire, unused
from eventjet.subscriptions.status import status
from eventjet.subscriptions.supervisor import run_workers
from eventjet.testing import on, projected, running
from eventjet.testing.read_model import ReadModelCase, read_model_case
from tests.integration import orders as app
from tests.integration.ledger_log import eventually
from tests.integration.orders import (
    NAMES,
    Added,
    Closed,
    Filed,
    Noted,
    Order,
    OrderEvent,
    Paid,
    Payment,
    Placed,
    Reassigned,
    Spend,
    append,
    expected,
    history,
    orders,
    rows_of,
)
from tests.tables import execute

PATIENT_S = 300.0
REF = AppRef.parse(f"{app.__name__}:orders")
Pairs = list[tuple[str, OrderEvent | Paid | Filed]]

CUSTOMERS = st.sampled_from(["ada", "bob"])
EVENTS: Any = st.one_of(
    st.builds(Added, amount=st.integers(0, 9), tag=st.sampled_from(["", "red"])),
    st.builds(Reassigned, customer=st.none() | CUSTOMERS),
    st.just(Noted(text="x")),
    st.just(Closed()),
)


@st.composite
def histories(draw: st.DrawFn) -> Pairs:
    """Draw events of three orders, some payments and complaints, in the order of a log."""
    pairs: Pairs = []
    known: set[str] = set()
    for name in draw(st.lists(st.sampled_from(["o-1", "o-2", "o-3", "pay", "complain"]), max_size=25)):
        if name == "pay":
            paid = draw(st.builds(Paid, customer=CUSTOMERS, amount=st.integers(0, 9)))
            pairs.append((f"p-{len(pairs)}", paid))
            continue
        if name == "complain":
            order = draw(st.none() | st.sampled_from(["o-1", "o-2", "o-4"]))
            pairs.append((draw(st.sampled_from(["c-1", "c-2"])), Filed(order=order)))
            continue
        pairs.append((name, draw(EVENTS) if name in known else Placed(customer=draw(CUSTOMERS), ref=name)))
        known.add(name)
    return pairs


def recorded(pairs: Pairs) -> list[Recorded[Any]]:
    """Return the events as the log would give them."""
    return [event for name, data in pairs for event in on(name, data)]


def values(rows: dict[Any, Any]) -> set[Any]:
    return {tuple(getattr(row, field) for field in row.__slots__) for row in rows.values()}


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Any:
    with read_model_case(orders.projections[request.param]) as case:
        yield case


@given(histories(), st.lists(st.integers(1, 25), max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_history_in_any_batches_gives_the_rows_of_a_plain_fold(
    case: ReadModelCase, pairs: Pairs, ends: Sequence[int]
) -> None:
    name = case.resolved.name
    log = [
        event.__class__(event.data, event.aggregate_id, 1, n, event.recorded_at, f"e-{n}")
        for n, event in enumerate(recorded(pairs), 1)
    ]
    projected(getattr(app, name), recorded(pairs)).rows(*expected(pairs)[name].values())
    want = values(expected(pairs)[name])
    for rows in (case.in_one_pass(log), case.written(log, [end for end in ends if end <= len(log)])):
        assert {tuple(row.values()) for row in rows[name]} == want


@pytest.mark.parametrize("postgres", [False, True], ids=["sqlite", "postgres"])
async def test_live_rebuilt_and_verified_rows_are_the_same(postgres: bool) -> None:
    pairs = history(7, 900)
    async with running(orders, postgres=postgres) as jet:
        where = jet.settings.database
        for start in range(0, len(pairs), 300):
            last = append(jet.settings, pairs[start : start + 300])
            for name in NAMES:
                await jet.caught_up(name, position=last, timeout_s=PATIENT_S)
        live = rows_of(where)
        want = expected(pairs)
        assert {name: live[name] for name in NAMES} == {name: values(want[name]) for name in NAMES}
        for name in NAMES:
            assert (await verify(REF, name, jet.settings, engine="local")).differences == 0
        report = await rebuild(REF, NAMES, jet.settings, engine="local")
        assert {rebuilt.projection: rebuilt.rows for rebuilt in report.projections} == {
            name: len(live[name]) for name in NAMES
        }
        assert rows_of(where) == live
        # The workers go on from the states that the rebuild made.
        more = history(8, 1_000, ids=20)[900:]
        last = append(jet.settings, [(name, data) for name, data in more if not isinstance(data, Placed)])
        for name in NAMES:
            await jet.caught_up(name, position=last, timeout_s=PATIENT_S)
            assert (await verify(REF, name, jet.settings, engine="local")).differences == 0


@pytest.mark.parametrize(
    ("postgres", "damage"),
    [
        (False, "delete from ej_state_spend"),
        (True, "delete from ej_state_spend"),
        (False, "update ej_state_spend set shape = 'other'"),
        (True, "update ej_state_spend set version = 2"),
    ],
    ids=["sqlite, lost", "postgres, lost", "other code", "other version"],
)
async def test_a_damaged_state_stops_the_projection_until_a_rebuild(postgres: bool, damage: str) -> None:
    async with running(orders, postgres=postgres) as jet:
        repository = jet.repository(Order)
        done = await repository.execute("o-1", Order.record, Placed(customer="ada", ref="o-1"))
        await jet.caught_up("spend", position=done.position, timeout_s=PATIENT_S)
        where = jet.settings.database
        await pause(where, [("spend", 1)], app="orders")
        # In a thread, since a worker of this loop may have the only writing transaction.
        await asyncio.to_thread(execute, where, damage)
        report = await verify(REF, "spend", jet.settings, engine="local")
        assert [example.key for example in report.examples] == [("ej_state_spend", "order", "o-1")]
        done = await repository.execute("o-1", Order.record, Added(amount=3))
        await resume(where, [("spend", 1)], app="orders")

        async def reason_of_failure() -> str:
            (spend,) = [work for work in await status(orders, jet.settings) if work.name == "spend"]
            return spend.reason or "" if spend.state == "failed" else ""

        async def has_failed() -> bool:
            return bool(await reason_of_failure())

        await eventually(has_failed, "the projection to stop")
        reason = await reason_of_failure()
        assert "ej_state_spend" in reason or "other code" in reason
        assert "eventjet rebuild spend" in reason
        await rebuild(REF, ["spend"], jet.settings, engine="local")
        await jet.caught_up("spend", position=done.position, timeout_s=PATIENT_S)
        assert rows_of(where)["spend"] == {("ada", 3, "o-1 3 0")}


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.usefixtures("spark")
async def test_spark_and_an_archive_give_the_same_rows_in_sqlite(tmp_path: Path) -> None:
    """`test_workers_rebuilds_archives_and_lakes_give_the_same_rows` tests PostgreSQL."""
    pairs = history(11, 4_000, ids=300)
    async with running(orders) as jet:
        last = append(jet.settings, pairs)
        for name in NAMES:
            await jet.caught_up(name, position=last, timeout_s=PATIENT_S)
        where = jet.settings.database
        live = rows_of(where)
        assert {name: live[name] for name in NAMES} == {name: values(rows) for name, rows in expected(pairs).items()}
        await archive(REF, str(tmp_path / "past"), jet.settings)
        for engine in ("spark", "local"):
            report = await rebuild(REF, NAMES, jet.settings, engine=engine)
            assert report.rows == sum(len(live[name]) for name in NAMES)
            assert rows_of(where) == live, engine
            await rebuild(REF, NAMES, jet.settings, engine=engine, from_archive=str(tmp_path / "past"))
            assert rows_of(where) == live, f"{engine}, from the archive"
        assert (await verify(REF, "spend", jet.settings, engine="spark")).differences == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("postgres", [False, True], ids=["sqlite", "postgres"])
async def test_killed_workers_neither_lose_states_nor_count_events_twice(postgres: bool) -> None:
    pairs = history(5, 1_200)

    async def worker(settings: Settings, failpoint: str = "") -> asyncio.subprocess.Process:
        environ = {**os.environ, "EVENTJET_APP": f"{app.__name__}:orders", "EVENTJET_DATABASE": settings.database}
        environ |= {"EVENTJET_SERVERS": ",".join(settings.servers), "EVENTJET_FAILPOINT": failpoint}
        program = (str(Path(sys.executable).with_name("eventjet")), "worker", *NAMES)
        return await asyncio.create_subprocess_exec(*program, env=environ, stdout=asyncio.subprocess.DEVNULL)

    with running_stack(postgres=postgres) as stack:
        settings = Settings(servers=(stack.servers,), database=stack.database)
        async with orders.connect(servers=settings.servers, database=settings.database) as jet:
            await jet.init()
            create_tables(Database(settings.database).sync_engine(), orders.projections.values())
            steps = ("worker.batch_folded:kill:3", "worker.rows_written:kill:2", "worker.after_commit:kill:4")
            for number, step in enumerate(steps):
                append(settings, pairs[number * 300 : number * 300 + 300])
                process = await worker(settings, step)
                async with asyncio.timeout(PATIENT_S):
                    assert await process.wait() == -signal.SIGKILL
            last = append(settings, pairs[900:])
            rivals = [await worker(settings) for _ in range(2)]
            try:
                for name in NAMES:
                    await jet.caught_up(name, position=last, timeout_s=PATIENT_S)
            finally:
                for process in rivals:
                    process.terminate()
                    await process.wait()
        live = await asyncio.to_thread(rows_of, settings.database)
        assert {name: live[name] for name in NAMES} == {name: values(rows) for name, rows in expected(pairs).items()}
        for name in NAMES:
            assert (await verify(REF, name, settings, engine="local")).differences == 0


def by_order(row: Spend | None, event: Recorded[Added]) -> Spend:
    row = row or Spend(event.aggregate_id)
    return replace(row, amount=row.amount + event.data.amount)


def declaring(spend: Any) -> App:
    return App("orders", aggregates=[Order, Payment], projections=[spend])


@pytest.mark.parametrize("postgres", [False, True], ids=["sqlite", "postgres"])
async def test_a_key_of_events_can_become_a_key_of_states_and_back(postgres: bool) -> None:
    by_event, by_both = projection("spend")(by_order), declaring(app.spend)
    pairs = history(4, 300)
    with running_stack(postgres=postgres) as stack:
        settings = Settings(servers=(stack.servers,), database=stack.database)
        engine = Database(settings.database).sync_engine()
        async with orders.connect(servers=settings.servers, database=settings.database) as jet:
            await jet.init()
            last = append(settings, pairs[:200])
        create_tables(engine, declaring(by_event).projections.values())
        await rebuild(declaring(by_event), ["spend"], settings, engine="local")
        with pytest.raises(Unreachable, match=r"and it declares .*Raise its revision, or run `eventjet rebuild"):
            await run_workers(by_both, settings, ["spend"], stop=asyncio.Event())
        await rebuild(by_both, ["spend"], settings, engine="local")
        assert (await verify(by_both, "spend", settings, engine="local")).differences == 0
        await rebuild(declaring(by_event), ["spend"], settings, engine="local")
        assert not inspect(engine).has_table("ej_state_spend")
        newer = declaring(replace(app.spend, revision=2))
        create_tables(engine, newer.projections.values())
        last = append(settings, pairs[200:])
        stop = asyncio.Event()
        worker = asyncio.create_task(run_workers(newer, settings, ["spend"], stop=stop))
        async with newer.connect(servers=settings.servers, database=settings.database) as jet:
            await jet.caught_up("spend", position=last, timeout_s=PATIENT_S)
            await rebuild(newer, ["spend"], settings, engine="local")
            await jet.caught_up("spend", position=last, timeout_s=PATIENT_S)
        assert (await verify(newer, "spend", settings, engine="local")).differences == 0
        stop.set()
        await worker


@pytest.mark.parametrize("postgres", [False, True], ids=["sqlite", "postgres"])
async def test_each_revision_has_its_own_states_which_are_dropped_with_it(postgres: bool) -> None:
    newer = App("orders", aggregates=[Order, Payment], projections=[replace(app.spend, revision=2)])
    pairs = history(3, 200)
    want = values(expected(pairs)["spend"])
    with running_stack(postgres=postgres) as stack:
        settings = Settings(servers=(stack.servers,), database=stack.database)
        engine = Database(settings.database).sync_engine()
        async with orders.connect(servers=settings.servers, database=settings.database) as jet:
            await jet.init()
            last = append(settings, pairs)
        for declared in (orders, newer):
            create_tables(engine, declared.projections.values())
            stop = asyncio.Event()
            worker = asyncio.create_task(run_workers(declared, settings, ["spend"], stop=stop))
            async with declared.connect(servers=settings.servers, database=settings.database) as jet:
                await jet.caught_up("spend", position=last, timeout_s=PATIENT_S)

                async def is_in_place(declared: App = declared) -> bool:
                    revision = declared.projections["spend"].revision
                    works = await status(declared, settings)
                    (spend,) = [work for work in works if (work.name, work.revision) == ("spend", revision)]
                    return spend.state == "active" and spend.location == ""

                await eventually(is_in_place, "the revision to take the declared place")
            stop.set()
            await worker
            rows = await asyncio.to_thread(rows_of, settings.database, ["spend"])
            assert rows["spend"] == want
            assert len(rows["ej_state_spend"]) == len(
                {name for name, data in pairs if not isinstance(data, Paid | Filed)}
            )
        with engine.connect() as connection:
            shown = revision_tables(connection, newer, "spend", 2, table="ej_state_spend")
            assert [table.name for table in shown.tables] == ["spend", "ej_state_spend"]
            assert shown.page is not None
            assert "state" in shown.page.columns
        with engine.begin() as connection:
            (old,) = [
                table
                for table in unused(connection, newer.projections.values(), "orders")
                if table.projection == "spend"
            ]
            assert len(old.tables) == 2
            retire(connection, "spend", 1, newer.projections.values(), "orders")
        assert (await asyncio.to_thread(rows_of, settings.database, ["spend"]))["spend"] == want
        reset(Database(settings.database), newer.projections["spend"])
        emptied = await asyncio.to_thread(rows_of, settings.database, ["spend"])
        assert emptied == {"spend": set(), "ej_state_spend": set()}
