"""PostgreSQL behind poolers that drop startup options, or give each transaction another session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing

import pytest
from sqlalchemy import text

from eventjet.dev.nats import NatsServer
from eventjet.errors import Unreachable
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.sql import postgres_connections
from eventjet.sql.database import WORKER, Database
from tests.integration.by_hand import QUICK
from tests.integration.ledger_log import Ledger, history
from tests.integration.pooler import Pooler
from tests.integration.projecting import BALANCES, database_with
from tests.tables import execute

HOSTILE = {
    "timezone": "Asia/Tokyo", "datestyle": "German", "intervalstyle": "sql_standard", "extra_float_digits": "-10",
    "bytea_output": "escape", "client_encoding": "LATIN1", "default_transaction_isolation": "serializable",
    "standard_conforming_strings": "off",
}  # fmt: skip
"""Settings that a role or a database may have by default."""
SETTINGS = (
    "select current_setting('lock_timeout'), current_setting('statement_timeout'), "
    "current_setting('idle_in_transaction_session_timeout'), current_setting('timezone'), "
    "current_setting('datestyle'), current_setting('intervalstyle'), current_setting('extra_float_digits'), "
    "current_setting('bytea_output'), current_setting('client_encoding'), current_setting('transaction_isolation'), "
    "current_setting('standard_conforming_strings'), current_setting('search_path')"
)
ALWAYS = ("UTC", "ISO, MDY", "postgres", "1", "hex", "UTF8", "read committed", "on")


async def by_async(database: Database) -> tuple[object, ...]:
    engine = database.engine()
    try:
        async with engine.connect() as connection:
            return tuple((await connection.execute(text(SETTINGS))).one())
    finally:
        await engine.dispose()


async def by_engine(database: Database) -> tuple[object, ...]:
    with database.sync_engine(limits=WORKER).connect() as connection:
        return tuple(connection.execute(text(SETTINGS)).one())


async def by_copy(database: Database) -> tuple[object, ...]:
    with closing(database.connect(limits=WORKER)) as connection:
        return tuple(connection.execute(SETTINGS).fetchone() or ())


@pytest.mark.parametrize("ask", [by_async, by_engine, by_copy])
@pytest.mark.parametrize("pooled", [False, True])
async def test_every_session_has_its_settings_despite_database_defaults_and_poolers(
    eventjet_database: str, ask: Callable[[Database], object], pooled: bool
) -> None:
    name = eventjet_database.rpartition("/")[2].partition("?")[0]
    execute(
        eventjet_database, *(f"alter database {name} set {setting} = '{value}'" for setting, value in HOSTILE.items())
    )
    pooler = Pooler(eventjet_database, by_transaction=False)
    with pooler.listening() as pooled_url:
        url = (pooled_url if pooled else eventjet_database) + "?options=-c%20search_path%3D%22shop%5C%20one%22,public"
        values: object = await ask(Database(url))  # type: ignore[misc]
    assert values == ("2s", "15s", "2500ms", *ALWAYS, '"shop one",public')
    assert bool(pooler.startup_parameters) == pooled
    assert all("lock_timeout" in startup["options"] for startup in pooler.startup_parameters)


async def test_workers_rebuilds_and_verifications_work_behind_a_session_pooler(
    nats: NatsServer, eventjet_database: str
) -> None:
    with Pooler(eventjet_database, by_transaction=False).listening() as pooled_url:
        app = Ledger(Settings(servers=(nats.url,), database=pooled_url))
        database_with(pooled_url, *app.projections.values())
        app.create()
        last = app.append(history(60))
        async with app.working(options=QUICK):
            await app.caught_up(last)
        await rebuild(app, ["balances"], app.settings, engine="local")
        assert (await verify(app, "balances", app.settings, engine="local")).differences == 0


@pytest.mark.parametrize("lifo", [False, True])
async def test_a_transaction_pooler_is_refused_before_any_write(
    nats: NatsServer, eventjet_database: str, lifo: bool
) -> None:
    """`lifo`: each transaction happens to get the same session, as long as there are no others."""
    app = Ledger(Settings(servers=(nats.url,), database=eventjet_database), projections={"balances": BALANCES})
    app.create()
    app.init()
    before = execute(eventjet_database, "select * from eventjet_projection")
    with Pooler(eventjet_database, by_transaction=True, lifo=lifo).listening() as pooled_url:
        app.settings = Settings(servers=(nats.url,), database=pooled_url)

        async def work() -> None:
            async with app.working(options=QUICK):
                pass

        async def check() -> None:
            await asyncio.to_thread(Database(pooled_url).check_sessions)

        async def rebuild_balances() -> None:
            await rebuild(app, ["balances"], app.settings, engine="local")

        for action in (check, work, rebuild_balances):
            with pytest.raises(
                Unreachable, match=r"a pooler gives its transactions several sessions.*pool_mode = session"
            ):
                await action()
    assert execute(eventjet_database, "select * from eventjet_projection") == before


async def test_a_pooler_with_a_single_session_is_refused_without_a_wait(
    eventjet_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connections, "_SECOND_S", 1.0)
    pooler = Pooler(eventjet_database, by_transaction=False, sessions_max=1)
    with (
        pooler.listening() as pooled_url,
        pytest.raises(Unreachable, match=r"a second connection was given no session"),
    ):
        await asyncio.to_thread(Database(pooled_url).check_sessions)
