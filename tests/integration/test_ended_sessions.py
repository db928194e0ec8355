"""However a handler ends, empties or leaves its session or connection: its writes are kept once, or it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Connection, insert, text
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Session, make_transient

from eventjet import Recorded
from eventjet.errors import DefinitionError, HandlerFailed, ProjectionStopped
from eventjet.sql import checkpoint
from eventjet.writers.batch import Batch
from eventjet.writers.sql_writer import SqlWriter
from tests.integration.by_hand import bound_with, table_rows, totals_table
from tests.integration.projecting import Added, Closed, Opened, database_with, on

EVENTS = [on(number, Added(amount=Decimal(number))) for number in (1, 2, 3)]
KEPT = [("1", 1), ("2", 1), ("3", 1)]


class Base(DeclarativeBase):
    pass


class Total(Base):
    __table__ = totals_table


async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None: ...


async def closed(event: Recorded[Closed], connection: AsyncConnection) -> None: ...


async def totals_after(database: str, added: Any) -> list[Any]:
    """The rows that a worker's transaction with this handler leaves; raises what stops it, after the rollback."""
    resolved = bound_with(opened, added, closed, tables=[totals_table])
    where = database_with(database, resolved)
    engine = where.engine()
    where.dialect.configure_for_handlers(engine.sync_engine)
    try:
        await _write(engine, resolved)
    finally:
        await engine.dispose()
        rows = table_rows(where, tables=[totals_table])["totals"]
        assert rows in ([], KEPT), rows
    return rows


async def _write(engine: AsyncEngine, resolved: Any) -> None:
    async with engine.connect() as connection:
        await connection.run_sync(checkpoint.ensure, "ledger", 1)
        before = await connection.run_sync(checkpoint.read, "ledger", 1)
        await connection.commit()
        assert before is not None
        async with connection.begin():
            await SqlWriter(resolved, lease_s=30).write(connection, before, Batch(0, 3, "id-3", EVENTS))


async def inside(session: AsyncSession) -> None:
    async with session:
        pass


async def begins(session: AsyncSession) -> None:
    async with session.begin():
        pass


async def keeps_a_savepoint(session: AsyncSession) -> None:
    await session.begin_nested()


async def undoes_a_savepoint(session: AsyncSession) -> None:
    try:
        async with session.begin_nested():
            session.add(Total(name="1", n=1))
            await session.flush()
            session.add(Total(name="1", n=1))
    except IntegrityError:
        pass
    except Exception:  # noqa: BLE001 - SQLAlchemy knows the first object
        pass


async def ends_the_transaction(session: AsyncSession) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    await transaction.commit()


async def rolls_its_transaction_back(session: AsyncSession) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    await transaction.rollback()


async def rolls_its_savepoint_back(session: AsyncSession) -> None:
    await session.flush()
    savepoint = (await session.connection()).get_nested_transaction()
    assert savepoint is not None
    await savepoint.rollback()


async def closes_its_connection(session: AsyncSession) -> None:
    await (await session.connection()).close()


async def rolls_its_connection_back(session: AsyncSession) -> None:
    await session.flush()
    await (await session.connection()).rollback()


async def expires(session: AsyncSession) -> None:
    session.expire(next(iter(session.new), None) or next(iter(session.dirty)))


async def refreshes(session: AsyncSession) -> None:
    """An object that another change is made to, since a new one has nothing to be read again."""
    await session.flush()
    total = next(iter(session.identity_map.values()))
    total.n = 7
    await session.refresh(total)


async def makes_transient(session: AsyncSession) -> None:
    await session.flush()
    total = next(iter(session.identity_map.values()))
    with session.no_autoflush:
        total.n = 7
        make_transient(total)


async def flushes_and_makes_transient(session: AsyncSession) -> None:
    await session.flush()
    make_transient(next(iter(session.identity_map.values())))


async def flushes_and_refreshes(session: AsyncSession) -> None:
    await session.flush()
    await session.refresh(next(iter(session.identity_map.values())))


async def flushes_and_expunges(session: AsyncSession) -> None:
    await session.flush()
    session.expunge_all()


async def flushes_and_expires(session: AsyncSession) -> None:
    await session.flush()
    session.expire_all()


async def goes_on_after_a_flush_failed(session: AsyncSession) -> None:
    await session.execute(insert(totals_table).values(name="x", n=1))
    session.add(Total(name="x", n=1))
    try:
        await session.flush()
    except IntegrityError:
        pass


async def commits_in_text(session: AsyncSession) -> None:
    await session.execute(text("/* why not */ -- so\n commit and chain"))


WAY_OUT = r"a worker commits what handlers write together with the checkpoint; leave the session open"
SESSIONS: dict[str, tuple[Callable[[AsyncSession], Awaitable[object]], str | None]] = {
    "close": (AsyncSession.close, r"must not call session\.close\(\): " + WAY_OUT),
    "aclose": (AsyncSession.aclose, r"must not call session\.close\(\)"),
    "async with": (inside, r"must not call session\.close\(\)"),
    "reset": (AsyncSession.reset, r"must not call session\.reset\(\)"),
    "commit": (AsyncSession.commit, r"must not call session\.commit\(\): " + WAY_OUT),
    "rollback": (AsyncSession.rollback, r"use `async with session\.begin_nested\(\)` around what may fail"),
    "invalidate": (AsyncSession.invalidate, r"must not call session\.invalidate\(\)"),
    "begin": (begins, r"must not call session\.begin\(\)"),
    "commit underneath": (lambda session: session.run_sync(lambda sync: sync.commit()), r"session\.commit\(\)"),
    "transaction": (ends_the_transaction, "must not end the transaction of its session"),
    "transaction back": (rolls_its_transaction_back, "must not end the transaction of its session"),
    "savepoint back": (rolls_its_savepoint_back, "ended the transaction of its session: " + WAY_OUT),
    "close connection": (closes_its_connection, r"must not call connection\.close\(\)"),
    "connection back": (rolls_its_connection_back, r"must not call connection\.rollback\(\)"),
    "text": (commits_in_text, r"must not execute COMMIT: "),
    "expunge": (
        lambda s: s.run_sync(lambda sync: sync.expunge_all()),
        r"expunge_all\(\): .* `await session\.flush\(\)`",
    ),
    "expire": (expires, r"must not call session\.expire\(\): its session holds changes"),
    "expire_all": (lambda s: s.run_sync(lambda sync: sync.expire_all()), r"session\.expire_all\(\)"),
    "refresh": (refreshes, r"must not call session\.refresh\(\): its session holds changes"),
    "make_transient": (makes_transient, r"must not make an object transient: .* `await session\.flush\(\)`"),
    "failed flush": (goes_on_after_a_flush_failed, r"went on after an error of the database.*session\.begin_nested"),
    "flush, expunge": (flushes_and_expunges, None),
    "flush, expire": (flushes_and_expires, None),
    "flush, refresh": (flushes_and_refreshes, None),
    "flush, make_transient": (flushes_and_makes_transient, None),
    "flush": (AsyncSession.flush, None),
    "savepoint": (keeps_a_savepoint, None),
    "savepoint undone": (undoes_a_savepoint, None),
}


@pytest.mark.parametrize(("changes", "hides"), [(False, False), (True, True)], ids=["adds", "changes, hides"])
@pytest.mark.parametrize("kind", SESSIONS)
async def test_what_a_handler_wrote_in_its_session_is_kept_once_or_the_handler_is_stopped(
    database: str, kind: str, changes: bool, hides: bool
) -> None:
    act, said = SESSIONS[kind]

    async def added(event: Recorded[Added], session: AsyncSession) -> None:
        total: Any = Total(name=str(event.position), n=0 if changes else 1)
        session.add(total)
        if changes:
            await session.flush()
            total.n = 1
        if event.position == 2:
            try:
                await act(session)
            except Exception:
                if not hides:
                    raise

    if said is None:
        assert await totals_after(database, added) == KEPT
        return
    with pytest.raises(HandlerFailed, match=said) as caught:
        await totals_after(database, added)
    assert "added" in caught.value.reason
    assert caught.value.position == 2


async def invalidates(connection: AsyncConnection) -> None:
    await connection.invalidate()


async def closes_its_transaction(connection: AsyncConnection) -> None:
    transaction = connection.get_transaction()
    assert transaction is not None
    await transaction.close()


async def commits_its_transaction(connection: AsyncConnection) -> None:
    transaction = connection.get_transaction()
    assert transaction is not None
    await transaction.commit()


async def enters(connection: AsyncConnection) -> None:
    with pytest.raises(InvalidRequestError, match="already started"):
        async with connection:
            pass


async def changes_its_isolation(connection: AsyncConnection) -> None:
    with pytest.raises(InvalidRequestError, match="may not be altered"):
        await connection.execution_options(isolation_level="AUTOCOMMIT")


CONNECTIONS: dict[str, tuple[Callable[[AsyncConnection], Awaitable[object]], str | None]] = {
    "close": (AsyncConnection.close, r"must not call connection\.close\(\): .* leave the connection open"),
    "aclose": (AsyncConnection.aclose, r"must not call connection\.close\(\)"),
    "commit": (AsyncConnection.commit, r"must not call connection\.commit\(\)"),
    "rollback": (AsyncConnection.rollback, r"must not call connection\.rollback\(\).*connection\.begin_nested"),
    "invalidate": (invalidates, r"must not call connection\.invalidate\(\)"),
    "begin": (AsyncConnection.begin, r"must not call connection\.begin\(\)"),
    "transaction": (closes_its_transaction, "must not roll back"),
    "transaction commit": (commits_its_transaction, "must not commit"),
    "savepoint": (AsyncConnection.begin_nested, r"left a savepoint open; use `async with connection\.begin_nested"),
    "async with": (enters, None),
    "isolation": (changes_its_isolation, None),
}


@pytest.mark.parametrize("hides", [False, True], ids=["raises", "hides"])
@pytest.mark.parametrize("kind", CONNECTIONS)
async def test_what_a_handler_wrote_on_its_connection_is_kept_once_or_the_handler_is_stopped(
    database: str, kind: str, hides: bool
) -> None:
    act, said = CONNECTIONS[kind]

    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await connection.execute(insert(totals_table).values(name=str(event.position), n=1))
        if event.position == 2:
            try:
                await act(connection)
            except Exception:
                if not hides:
                    raise

    if said is None:
        assert await totals_after(database, added) == KEPT
        return
    with pytest.raises(HandlerFailed, match=said) as caught:
        await totals_after(database, added)
    assert "added" in caught.value.reason
    assert caught.value.position == 2


@pytest.mark.parametrize("ending", ["commit", "rollback", "close", "close the pooled one"])
async def test_a_transaction_that_ended_in_the_driver_stops_the_projection(database: str, ending: str) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await connection.execute(insert(totals_table).values(name=str(event.position), n=1))
        if event.position == 3 and ending == "close the pooled one":
            await connection.run_sync(lambda sync: sync.connection.close())
        elif event.position == 3:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            await getattr(driver, ending)()

    with pytest.raises(ProjectionStopped, match=r"added ended the transaction at position 3.*half of a batch"):
        await totals_after(database, added)


async def test_a_session_is_closed_for_what_a_handler_left_running(database: str) -> None:
    tasks: list[asyncio.Task[None]] = []
    is_over = asyncio.Event()

    async def late(session: AsyncSession) -> None:
        await is_over.wait()
        session.add(Total(name="late", n=1))
        await session.flush()

    async def added(event: Recorded[Added], session: AsyncSession) -> None:
        session.add(Total(name=str(event.position), n=1))
        if not tasks:
            tasks.append(asyncio.create_task(late(session)))

    assert await totals_after(database, added) == KEPT
    is_over.set()
    with pytest.raises(InvalidRequestError, match="permanently closed"):
        await tasks[0]


def test_a_handler_of_a_blocking_session_or_connection_is_refused_with_the_way_out() -> None:
    async def added(event: Recorded[Added], session: Session) -> None: ...
    async def opened(event: Recorded[Opened], connection: Connection) -> None: ...

    with pytest.raises(DefinitionError) as caught:
        bound_with(added, opened, closed)
    text = str(caught.value)
    assert "takes `session: Session`, which no worker gives it; take AsyncSession of sqlalchemy.ext.asyncio" in text
    assert "takes `connection: Connection`, which no worker gives it; take AsyncConnection of" in text
