"""A handler's writes are committed once or the handler stops, whatever it does to its session or connection."""

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
WRITTEN = [("1", 1), ("2", 1), ("3", 1)]


class Base(DeclarativeBase):
    pass


class Total(Base):
    __table__ = totals_table


async def opened(event: Recorded[Opened], connection: AsyncConnection) -> None: ...


async def closed(event: Recorded[Closed], connection: AsyncConnection) -> None: ...


async def totals_after(database: str, added: Any) -> list[Any]:
    """Return the rows after a worker's transaction with this handler; raise its error after the rollback."""
    resolved = bound_with(opened, added, closed, tables=[totals_table])
    where = database_with(database, resolved)
    engine = where.engine()
    where.dialect.configure_for_handlers(engine.sync_engine)
    try:
        await _write(engine, resolved)
    finally:
        await engine.dispose()
        rows = table_rows(where, tables=[totals_table])["totals"]
        assert rows in ([], WRITTEN), rows
    return rows


async def _write(engine: AsyncEngine, resolved: Any) -> None:
    async with engine.connect() as connection:
        await connection.run_sync(checkpoint.ensure, "ledger", 1)
        before = await connection.run_sync(checkpoint.read, "ledger", 1)
        await connection.commit()
        assert before is not None
        async with connection.begin():
            await SqlWriter(resolved, lease_s=30).write(connection, before, Batch(0, 3, "id-3", EVENTS))


async def enter_session(session: AsyncSession) -> None:
    async with session:
        pass


async def begin_again(session: AsyncSession) -> None:
    async with session.begin():
        pass


async def open_savepoint(session: AsyncSession) -> None:
    await session.begin_nested()


async def undo_savepoint(session: AsyncSession) -> None:
    try:
        async with session.begin_nested():
            session.add(Total(name="1", n=1))
            await session.flush()
            session.add(Total(name="1", n=1))
    except IntegrityError:
        pass
    except Exception:  # noqa: BLE001 - SQLAlchemy knows the first object
        pass


async def commit_transaction(session: AsyncSession) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    await transaction.commit()


async def roll_back_transaction(session: AsyncSession) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    await transaction.rollback()


async def roll_back_savepoint(session: AsyncSession) -> None:
    await session.flush()
    savepoint = (await session.connection()).get_nested_transaction()
    assert savepoint is not None
    await savepoint.rollback()


async def close_connection(session: AsyncSession) -> None:
    await (await session.connection()).close()


async def roll_back_connection(session: AsyncSession) -> None:
    await session.flush()
    await (await session.connection()).rollback()


async def expire_object(session: AsyncSession) -> None:
    session.expire(next(iter(session.new), None) or next(iter(session.dirty)))


async def refresh_object(session: AsyncSession) -> None:
    """Refresh an object with a pending change; a new object has nothing to be read again."""
    await session.flush()
    total = next(iter(session.identity_map.values()))
    total.n = 7
    await session.refresh(total)


async def make_object_transient(session: AsyncSession) -> None:
    await session.flush()
    total = next(iter(session.identity_map.values()))
    with session.no_autoflush:
        total.n = 7
        make_transient(total)


async def flush_and_make_transient(session: AsyncSession) -> None:
    await session.flush()
    make_transient(next(iter(session.identity_map.values())))


async def flush_and_refresh(session: AsyncSession) -> None:
    await session.flush()
    await session.refresh(next(iter(session.identity_map.values())))


async def flush_and_expunge(session: AsyncSession) -> None:
    await session.flush()
    session.expunge_all()


async def flush_and_expire(session: AsyncSession) -> None:
    await session.flush()
    session.expire_all()


async def continue_after_failed_flush(session: AsyncSession) -> None:
    await session.execute(insert(totals_table).values(name="x", n=1))
    session.add(Total(name="x", n=1))
    try:
        await session.flush()
    except IntegrityError:
        pass


async def commit_in_sql(session: AsyncSession) -> None:
    await session.execute(text("/* why not */ -- so\n commit and chain"))


WAY_OUT = r"a worker commits what handlers write together with the checkpoint; leave the session open"
SESSIONS: dict[str, tuple[Callable[[AsyncSession], Awaitable[object]], str | None]] = {
    "close": (AsyncSession.close, r"must not call session\.close\(\): " + WAY_OUT),
    "aclose": (AsyncSession.aclose, r"must not call session\.close\(\)"),
    "async with": (enter_session, r"must not call session\.close\(\)"),
    "reset": (AsyncSession.reset, r"must not call session\.reset\(\)"),
    "commit": (AsyncSession.commit, r"must not call session\.commit\(\): " + WAY_OUT),
    "rollback": (AsyncSession.rollback, r"use `async with session\.begin_nested\(\)` around what may fail"),
    "invalidate": (AsyncSession.invalidate, r"must not call session\.invalidate\(\)"),
    "begin": (begin_again, r"must not call session\.begin\(\)"),
    "commit underneath": (lambda session: session.run_sync(lambda sync: sync.commit()), r"session\.commit\(\)"),
    "transaction": (commit_transaction, "must not end the transaction of its session"),
    "transaction back": (roll_back_transaction, "must not end the transaction of its session"),
    "savepoint back": (roll_back_savepoint, "ended the transaction of its session: " + WAY_OUT),
    "close connection": (close_connection, r"must not call connection\.close\(\)"),
    "connection back": (roll_back_connection, r"must not call connection\.rollback\(\)"),
    "text": (commit_in_sql, r"must not execute COMMIT: "),
    "expunge": (
        lambda s: s.run_sync(lambda sync: sync.expunge_all()),
        r"expunge_all\(\): .* `await session\.flush\(\)`",
    ),
    "expire": (expire_object, r"must not call session\.expire\(\): its session holds changes"),
    "expire_all": (lambda s: s.run_sync(lambda sync: sync.expire_all()), r"session\.expire_all\(\)"),
    "refresh": (refresh_object, r"must not call session\.refresh\(\): its session holds changes"),
    "make_transient": (make_object_transient, r"must not make an object transient: .* `await session\.flush\(\)`"),
    "failed flush": (continue_after_failed_flush, r"went on after an error of the database.*session\.begin_nested"),
    "flush, expunge": (flush_and_expunge, None),
    "flush, expire": (flush_and_expire, None),
    "flush, refresh": (flush_and_refresh, None),
    "flush, make_transient": (flush_and_make_transient, None),
    "flush": (AsyncSession.flush, None),
    "savepoint": (open_savepoint, None),
    "savepoint undone": (undo_savepoint, None),
}


@pytest.mark.parametrize(("changes", "hides"), [(False, False), (True, True)], ids=["adds", "changes, hides"])
@pytest.mark.parametrize("kind", SESSIONS)
async def test_session_writes_are_committed_once_or_the_handler_is_stopped(
    database: str, kind: str, changes: bool, hides: bool
) -> None:
    act, message = SESSIONS[kind]

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

    if message is None:
        assert await totals_after(database, added) == WRITTEN
        return
    with pytest.raises(HandlerFailed, match=message) as caught:
        await totals_after(database, added)
    assert "added" in caught.value.reason
    assert caught.value.position == 2


async def invalidate(connection: AsyncConnection) -> None:
    await connection.invalidate()


async def close_transaction(connection: AsyncConnection) -> None:
    transaction = connection.get_transaction()
    assert transaction is not None
    await transaction.close()


async def commit_connection_transaction(connection: AsyncConnection) -> None:
    transaction = connection.get_transaction()
    assert transaction is not None
    await transaction.commit()


async def enter_connection(connection: AsyncConnection) -> None:
    with pytest.raises(InvalidRequestError, match="already started"):
        async with connection:
            pass


async def change_isolation(connection: AsyncConnection) -> None:
    with pytest.raises(InvalidRequestError, match="may not be altered"):
        await connection.execution_options(isolation_level="AUTOCOMMIT")


CONNECTIONS: dict[str, tuple[Callable[[AsyncConnection], Awaitable[object]], str | None]] = {
    "close": (AsyncConnection.close, r"must not call connection\.close\(\): .* leave the connection open"),
    "aclose": (AsyncConnection.aclose, r"must not call connection\.close\(\)"),
    "commit": (AsyncConnection.commit, r"must not call connection\.commit\(\)"),
    "rollback": (AsyncConnection.rollback, r"must not call connection\.rollback\(\).*connection\.begin_nested"),
    "invalidate": (invalidate, r"must not call connection\.invalidate\(\)"),
    "begin": (AsyncConnection.begin, r"must not call connection\.begin\(\)"),
    "transaction": (close_transaction, "must not roll back"),
    "transaction commit": (commit_connection_transaction, "must not commit"),
    "savepoint": (AsyncConnection.begin_nested, r"left a savepoint open; use `async with connection\.begin_nested"),
    "async with": (enter_connection, None),
    "isolation": (change_isolation, None),
}


@pytest.mark.parametrize("hides", [False, True], ids=["raises", "hides"])
@pytest.mark.parametrize("kind", CONNECTIONS)
async def test_connection_writes_are_committed_once_or_the_handler_is_stopped(
    database: str, kind: str, hides: bool
) -> None:
    act, message = CONNECTIONS[kind]

    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await connection.execute(insert(totals_table).values(name=str(event.position), n=1))
        if event.position == 2:
            try:
                await act(connection)
            except Exception:
                if not hides:
                    raise

    if message is None:
        assert await totals_after(database, added) == WRITTEN
        return
    with pytest.raises(HandlerFailed, match=message) as caught:
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


async def test_a_task_that_outlives_its_handler_finds_the_session_closed(database: str) -> None:
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

    assert await totals_after(database, added) == WRITTEN
    is_over.set()
    with pytest.raises(InvalidRequestError, match="permanently closed"):
        await tasks[0]


def test_a_handler_with_a_blocking_session_is_refused_and_the_async_class_named() -> None:
    async def added(event: Recorded[Added], session: Session) -> None: ...
    async def opened(event: Recorded[Opened], connection: Connection) -> None: ...

    with pytest.raises(DefinitionError) as caught:
        bound_with(added, opened, closed)
    text = str(caught.value)
    assert "takes `session: Session`, which no worker gives it; take AsyncSession of sqlalchemy.ext.asyncio" in text
    assert "takes `connection: Connection`, which no worker gives it; take AsyncConnection of" in text
