"""Leases end by the database's clock, sessions cannot lock a row for ever, and readers wait for a position."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from eventjet.domain.position import ACTIVE, BUILDING, FAILED, PAUSED, RETIRED
from eventjet.errors import NotCaughtUp, Unreachable, UsageError
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import BULK, COMMAND, WORKER, Database, SessionLimits
from eventjet.sql.dialect import READ_ONLY
from eventjet.sql.locations import create_tables
from eventjet.writers.sql_writer import driver_of
from tests.caught_up import wait_caught_up
from tests.integration.projecting import BALANCES, MOVEMENTS, database_with


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = database_with(database, BALANCES, MOVEMENTS).sync_engine()
    with engine.begin() as connection:
        checkpoint.ensure(connection, "balances", 1)
    yield engine
    engine.dispose()


def take(engine: Engine, owner: str, ttl_s: float = 30.0) -> Checkpoint | None:
    with engine.begin() as connection:
        return checkpoint.take(connection, "balances", 1, owner, ttl_s)


def take_lease(engine: Engine, owner: str = "w-1") -> Checkpoint:
    lease = take(engine, owner)
    assert lease is not None
    return lease


def test_concurrent_processes_create_the_tables_once(database: str) -> None:
    engine = Database(database).sync_engine()
    with ThreadPoolExecutor(4) as pool:
        created = list(pool.map(lambda _: create_tables(engine, [BALANCES, MOVEMENTS]), range(4)))
    assert sorted(name for names in created for name in names) == [
        "balances",
        "eventjet_action",
        "eventjet_alembic_version",
        "eventjet_projection",
        "eventjet_quarantine",
        "eventjet_rebuild",
        "movements",
    ]
    assert create_tables(engine, [BALANCES]) == []
    engine.dispose()


def test_a_lease_that_is_not_renewed_may_be_taken_though_the_clock_was_ahead(engine: Engine) -> None:
    first = take_lease(engine)
    with engine.begin() as connection:
        assert checkpoint.renew(connection, first, 3_600)  # the database's clock was an hour ahead
        observed = checkpoint.read(connection, "balances", 1)
        assert observed is not None
        assert not checkpoint.is_free(connection, "balances", 1, "w-2", silent=first)
        assert checkpoint.is_free(connection, "balances", 1, "w-2", silent=observed)
    with engine.begin() as connection:
        assert checkpoint.renew(connection, first, 30)
        # The owner renews its lease after all.
        assert checkpoint.take(connection, "balances", 1, "w-2", 30, silent=observed) is None
        observed = checkpoint.read(connection, "balances", 1)
    with engine.begin() as connection:
        second = checkpoint.take(connection, "balances", 1, "w-2", 30, silent=observed)
        assert second is not None
        assert (second.epoch, second.owner) == (first.epoch + 1, "w-2")
        assert not checkpoint.renew(connection, first, 30)
        assert not checkpoint.advance(connection, first, 0, 1, "e", 30)
        assert checkpoint.take(connection, "balances", 1, "w-1", 30, silent=observed) is None


def test_a_lease_has_a_single_owner_and_each_owner_a_new_epoch(engine: Engine) -> None:
    first = take_lease(engine)
    assert (first.epoch, first.owner, first.state, first.position) == (1, "w-1", BUILDING, 0)
    assert take(engine, "w-2") is None
    with engine.begin() as connection:
        assert not checkpoint.is_free(connection, "balances", 1, "w-2")
        assert checkpoint.release(connection, first)
        assert checkpoint.is_free(connection, "balances", 1, "w-2")
    assert take_lease(engine, "w-2").epoch == 2
    with engine.begin() as connection:
        assert not checkpoint.renew(connection, first, 30)
        assert not checkpoint.release(connection, first)
        assert not checkpoint.note_state(connection, first, FAILED, "too late")
        assert not checkpoint.adopt(connection, first, "bank", "another", "[]")


def test_a_lease_ends_by_the_databases_clock(engine: Engine) -> None:
    first = take_lease(engine)
    assert take(engine, "w-2") is None
    with engine.begin() as connection:
        assert checkpoint.renew(connection, first, 0.2)
    deadline = time.monotonic() + 30
    while (second := take(engine, "w-2")) is None:
        assert time.monotonic() < deadline
    assert second.epoch == 2


def test_an_owner_takes_its_own_lease_again(engine: Engine) -> None:
    assert take_lease(engine).epoch == 1
    assert take_lease(engine).epoch == 2


def take_with_code(engine: Engine, owner: str, code: str) -> Checkpoint:
    """Take the lease as an owner with this code."""
    with engine.begin() as connection:
        lease = checkpoint.take(connection, "balances", 1, owner, 30.0, code=code)
        assert lease is not None
        return lease


def advance_to(engine: Engine, first: Checkpoint, position: int) -> None:
    with engine.begin() as connection:
        assert checkpoint.advance(connection, first, first.position, position, "e", 30)


def test_the_codes_that_wrote_rows_are_recorded_in_order_and_limited(engine: Engine) -> None:
    take_with_code(engine, "w-1", "unused")
    advance_to(engine, take_with_code(engine, "w-1", "a"), 1)
    for code in ("b", "c", "b", "", "b"):
        last = take_with_code(engine, "w-1", code).code
    assert last == "a,c,b"
    for number in range(20):
        last = take_with_code(engine, "w-1", str(number)).code
    assert last == "a,13,14,15,16,17,18,19"
    holder = take_with_code(engine, "w-1", "z")
    with engine.begin() as connection:
        restarted = checkpoint.reset(connection, holder)
        assert restarted is not None
        assert restarted.code == ""


def test_a_proof_is_recorded_only_if_no_other_code_can_have_written(engine: Engine) -> None:
    def proved(observed: Checkpoint, code: str) -> bool:
        with engine.begin() as connection:
            return checkpoint.note_proof(connection, observed, code)

    def current_checkpoint() -> Checkpoint:
        with engine.begin() as connection:
            current = checkpoint.read(connection, "balances", 1)
            assert current is not None
            return current

    first = take_with_code(engine, "w-1", "a")
    advance_to(engine, first, 1)
    second = take_with_code(engine, "w-1", "b")
    assert not proved(current_checkpoint(), "c"), "the owner has other code"
    assert not proved(first, "b"), "another owner was there since"
    observed = current_checkpoint()
    advance_to(engine, second, 2)
    assert proved(observed, "b"), "the owner goes on with the same code"
    observed = current_checkpoint()
    advance_to(engine, observed, 3)
    with engine.begin() as connection:
        assert checkpoint.release(connection, observed)
    assert not proved(observed, "c"), "other code wrote before it let go"
    assert proved(current_checkpoint(), "c")
    assert current_checkpoint().code == "c"


@pytest.mark.parametrize("state", [PAUSED, RETIRED])
def test_a_paused_or_retired_projection_cannot_be_taken(engine: Engine, state: str) -> None:
    first = take_lease(engine)
    with engine.begin() as connection:
        if state == PAUSED:
            assert checkpoint.pause(connection, first) is not None
        else:
            checkpoint.retire(connection, first.name, first.revision)
        assert not checkpoint.is_free(connection, "balances", 1, "w-1")
    assert take(engine, "w-1") is None


def test_a_failed_projection_is_taken_by_an_owner_that_did_not_fail_at_its_position(engine: Engine) -> None:
    first = take_lease(engine)
    with engine.begin() as connection:
        checkpoint.note_state(connection, first, FAILED, "because")
        checkpoint.release(connection, first)
    with engine.begin() as connection:
        assert not checkpoint.is_free(connection, "balances", 1, "w-1", failed_at=0)
        assert checkpoint.take(connection, "balances", 1, "w-1", 30, failed_at=0) is None
        assert checkpoint.is_free(connection, "balances", 1, "w-1", failed_at=7)
    again = take(engine, "w-2")
    assert again is not None
    assert (again.state, again.reason) == (ACTIVE, None)


def test_a_row_that_a_batch_has_locked_cannot_be_taken(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite locks the whole database")
    with engine.begin() as connection:
        checkpoint.lock(connection, "balances", 1)
        assert take(engine, "w-2") is None


def test_an_idle_session_in_a_transaction_loses_its_lock(engine: Engine, database: str) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite frees it when the process resumes or dies")
    stuck = Database(database).sync_engine(limits=SessionLimits(idle_in_transaction_ms=1_500))
    with stuck.connect() as connection:
        transaction = connection.begin()
        checkpoint.lock(connection, "balances", 1)
        with engine.begin() as other:
            assert checkpoint.lock(other, "balances", 1) is not None
        with pytest.raises(DBAPIError, match="idle-in-transaction"):
            connection.execute(text("select 1"))
        transaction.close()
    stuck.dispose()


def test_a_session_that_the_database_ended_is_reported_as_unreachable(database: str) -> None:
    where = Database(database)
    if where.dialect.name == "sqlite":
        pytest.skip("SQLite ends no sessions")
    engine = where.sync_engine(limits=SessionLimits(idle_in_transaction_ms=100))
    with engine.connect() as idle:
        idle.execute(text("select 1"))
        time.sleep(1.0)
        with pytest.raises(Unreachable, match="idle-in-transaction"), where.reaching_sync():
            idle.execute(text("select 1"))
    engine.dispose()


async def test_every_session_of_a_worker_is_bounded_and_in_utc(database: str) -> None:
    where = Database(database)
    engine = where.engine("eventjet test")
    async with engine.connect() as connection:
        if where.dialect.name == "postgresql":
            for name, value in [
                ("lock_timeout", "2s"),
                ("statement_timeout", "15s"),
                ("idle_in_transaction_session_timeout", "2500ms"),
                ("timezone", "UTC"),
                ("application_name", "eventjet test"),
            ]:
                assert await connection.scalar(text(f"show {name}")) == value
        else:
            assert await connection.scalar(text("pragma journal_mode")) == "wal"
            assert await connection.scalar(text("pragma synchronous")) == 2
            assert await connection.scalar(text("pragma busy_timeout")) == 15000
    await engine.dispose()
    assert WORKER.idle_in_transaction_ms < 3_000
    assert WORKER.idle_in_transaction_ms < COMMAND.idle_in_transaction_ms < BULK.idle_in_transaction_ms


def test_a_reader_of_sqlite_does_not_wait_for_a_writer(engine: Engine) -> None:
    if engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL's readers never wait")
    with engine.begin() as writer:
        checkpoint.lock(writer, "balances", 1)
        with engine.connect().execution_options(**{READ_ONLY: True}) as reader:
            assert checkpoint.read(reader, "balances", 1) is not None


async def test_a_position_that_is_not_reached_is_reported(engine: Engine, database: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("update eventjet_projection set position = 7 where name = 'balances'"))
    await wait_caught_up(database, BALANCES, 7, timeout_s=0)
    with pytest.raises(NotCaughtUp, match=r"'balances' is at position 7 and did not reach 8 within 0.1 s"):
        await wait_caught_up(database, BALANCES, 8, timeout_s=0.1)
    with pytest.raises(NotCaughtUp, match=r"'movements' is at position 0 .* \(no worker runs for it: start one"):
        await wait_caught_up(database, MOVEMENTS, 1, timeout_s=0)
    with engine.begin() as connection:
        connection.execute(text("update eventjet_projection set owner = 'w', lease_until = 1e12"))
    with pytest.raises(NotCaughtUp, match=r"did not reach 1 within 0 s\. Look"):
        await wait_caught_up(database, MOVEMENTS, 1, timeout_s=0)


def test_a_blocking_connection_for_bulk_loads_is_configured(database: str) -> None:
    where = Database(database)
    if where.dialect.name == "sqlite":
        loader = where.connect()
        assert loader.execute("pragma journal_mode").fetchone() == ("wal",)
        loader.close()
    else:
        with where.connect("eventjet load") as connection:
            assert connection.execute("show application_name").fetchone() == ("eventjet load",)


async def test_a_host_that_is_gone_without_a_word_is_noticed_unless_the_url_says_otherwise(
    eventjet_database: str,
) -> None:
    def limits(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> list[str | None]:
        parameters = connection.info.get_parameters()
        names = ("tcp_user_timeout", "keepalives_idle", "keepalives_interval", "keepalives_count")
        return [parameters.get(name) for name in names]

    usual = ["20000", "10", "5", "2"]
    engine = Database(eventjet_database).engine("eventjet test")
    async with engine.connect() as connection:
        assert limits(await driver_of(connection)) == usual
    await engine.dispose()
    for url, expected in [
        (eventjet_database, usual),
        (f"{eventjet_database}?tcp_user_timeout=0&keepalives_idle=60", ["0", "60", *usual[2:]]),
    ]:
        with Database(url).connect() as blocking:
            assert limits(blocking) == expected


@pytest.mark.parametrize(
    "url",
    ["postgresql://ada:s3cret@127.0.0.1:1/read", "postgresql+psycopg://127.0.0.1:1/read?password=s3cret&user=ada"],
)
def test_no_password_is_shown(url: str) -> None:
    where = Database(url)
    assert "s3cret" not in repr(where) + where.shown
    with pytest.raises(Unreachable) as raised:
        where.connect()
    assert "s3cret" not in str(raised.value)
    assert "127.0.0.1:1/read" in str(raised.value)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "not a url"])
def test_a_database_that_other_processes_cannot_read_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        Database(url)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="Check that its folder exists"):
        Database(f"sqlite:///{tmp_path}/nowhere/read.db").connect()
