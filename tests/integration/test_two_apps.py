"""A read model, its table and its quarantine belong to one of the apps that share a database."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from sqlalchemy import MetaData

from eventjet.dev.nats import NatsServer
from eventjet.errors import EventjetError, NotCaughtUp, Unreachable
from eventjet.operations.quarantine import CommandConnections, Quarantine
from eventjet.operations.tables import revision_tables
from eventjet.rebuild import preview, rebuild, verify
from eventjet.settings import Settings
from eventjet.sql import migrations
from eventjet.sql.checkpoint import Checkpoint, read_all
from eventjet.sql.locations import check_tables, create_tables
from eventjet.sql.revisions import pause, promote, reset, resume, retire, unused
from eventjet.sql.waiting import Checkpoints, Waiting
from eventjet.subscriptions.status import status
from tests.integration.by_hand import QUICK
from tests.integration.ledger_log import Ledger, history
from tests.integration.projecting import BALANCES, MOVEMENTS
from tests.tables import execute, reading


def app_over(nats: NatsServer, database: str) -> Ledger:
    """Return an app with `balances` and its own log."""
    app = Ledger(Settings(servers=(nats.url,), database=database))
    app.projections = {"balances": replace(BALANCES, app=app.name)}
    app.create()
    return app


def checkpoints(database: str) -> list[tuple[Checkpoint, float]]:
    with reading(database) as connection:
        return read_all(connection)


def row_of(database: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in execute(database, "select * from eventjet_projection order by name")]


async def initialised(other: Ledger) -> None:
    await asyncio.to_thread(other.init)


async def worked(other: Ledger) -> None:
    async with other.working():
        pass


async def rebuilt(other: Ledger) -> None:
    await rebuild(other, ["balances"], other.settings, engine="local")


async def verified(other: Ledger) -> None:
    await verify(other, "balances", other.settings, engine="local")


async def previewed(other: Ledger) -> None:
    (refusal,) = (await preview(other, ["balances"], other.settings, engine="local")).refusals
    raise EventjetError(refusal)


async def promoted(other: Ledger) -> None:
    await asyncio.to_thread(promote, other.where, replace(other.projections["balances"], revision=2))


async def begun_anew(other: Ledger) -> None:
    await asyncio.to_thread(reset, other.where, other.projections["balances"])


async def paused(other: Ledger) -> None:
    await pause(other.settings.database, [("balances", 1)], app=other.name)


async def resumed(other: Ledger) -> None:
    await resume(other.settings.database, [("balances", 1)], app=other.name)


def quarantine_of(other: Ledger) -> Quarantine:
    return Quarantine(CommandConnections(other, other.settings), "balances")  # type: ignore[arg-type]


async def quarantine_listed(other: Ledger) -> None:
    await quarantine_of(other).listed(resolved=True)


async def quarantined_event_shown(other: Ledger) -> None:
    await quarantine_of(other).event(1)


async def quarantine_retried(other: Ledger) -> None:
    await quarantine_of(other).retry(None)


async def quarantine_dropped(other: Ledger) -> None:
    await quarantine_of(other).drop([1])


async def outcomes_shown(other: Ledger) -> None:
    await quarantine_of(other).outcomes([1])


async def rows_shown(other: Ledger) -> None:
    with reading(other.settings.database) as connection:
        revision_tables(connection, other, "balances", 1)  # type: ignore[arg-type]


async def waited_for(other: Ledger) -> None:
    stored = Checkpoints(other.settings.database)
    waiting = Waiting(other.name, stored)
    try:
        await waiting.caught_up(other.projections["balances"], 1, 60)
    finally:
        await waiting.close()
        await stored.close()


ALL = [
    initialised, worked, rebuilt, verified, previewed, promoted, begun_anew, paused, resumed, quarantine_listed,
    quarantine_retried, quarantine_dropped, quarantined_event_shown, outcomes_shown, rows_shown,
    waited_for,
]  # fmt: skip


async def test_every_action_of_another_app_on_a_read_model_is_refused_and_the_owner_named(
    nats: NatsServer, database: str
) -> None:
    shop, bank = app_over(nats, database), app_over(nats, database)
    shop.init()
    last = shop.append(history(20))
    async with shop.working(options=QUICK):
        await shop.caught_up(last)
    before, rows = row_of(database), execute(database, "select * from balances")
    for action in ALL:
        with pytest.raises((EventjetError, NotCaughtUp), match=f"the app '{shop.name}'"):
            await action(bank)
        assert row_of(database) == before, action.__name__
    assert execute(database, "select * from balances") == rows
    (work_status,) = await status(bank, bank.settings)
    assert (work_status.state, work_status.position) == ("failed", 0)
    assert f"belongs to the app '{shop.name}'" in str(work_status.reason)
    last = shop.append(history(20))
    async with shop.working(options=QUICK):
        await shop.caught_up(last)


async def test_a_standby_of_another_app_does_not_take_a_free_lease(nats: NatsServer, database: str) -> None:
    """The row belongs to the bank for a moment, by a manual statement, while the bank's worker begins to stand by."""
    shop, bank = app_over(nats, database), app_over(nats, database)
    shop.init()
    async with AsyncExitStack() as working:
        async with shop.working(options=QUICK):
            await shop.caught_up(shop.append(history(20)))
            execute(database, f"update eventjet_projection set app = '{bank.name}'")
            await working.enter_async_context(bank.working(options=QUICK))
            execute(database, f"update eventjet_projection set app = '{shop.name}'")
        async with shop.working(options=QUICK):
            await shop.caught_up(shop.append(history(5)))
        ((checkpoint, _),) = checkpoints(database)
        assert (checkpoint.state, checkpoint.app) == ("active", shop.name)


@pytest.mark.parametrize("same_app", [False, True])
def test_the_table_of_another_read_model_is_refused_until_that_is_dropped(
    nats: NatsServer, database: str, same_app: bool
) -> None:
    shop = app_over(nats, database)
    shop.init()
    other = shop if same_app else app_over(nats, database)
    table = BALANCES.table.to_metadata(MetaData(), name="Balances" if database.startswith("sqlite") else "balances")
    table.schema = None if database.startswith("sqlite") else "public"
    other.projections = {"sums": replace(BALANCES, name="sums", table=table, app=other.name)}
    before = row_of(database)
    with pytest.raises(Unreachable, match=rf"belongs to the read model 'balances' of the app '{shop.name}'.*--drop"):
        other.init()
    with pytest.raises(Unreachable, match="belongs to"), reading(database) as connection:
        check_tables(connection, other.projections.values())
    assert row_of(database) == before
    with shop.where.sync_engine().begin() as connection:
        retire(connection, "balances", 1, [], shop.name)
    assert other.init() != []


async def test_an_app_lists_only_its_own_read_models(nats: NatsServer, database: str) -> None:
    shop, bank = app_over(nats, database), app_over(nats, database)
    bank.projections = {"movements": replace(MOVEMENTS, app=bank.name)}
    shop.init()
    bank.init()
    with reading(database) as connection:
        assert unused(connection, [], bank.name) != []
        assert [table.projection for table in unused(connection, [], shop.name)] == ["balances"]
        assert unused(connection, list(shop.projections.values()), shop.name) == []
    assert [work_status.name for work_status in await status(bank, bank.settings)] == ["movements"]


async def test_a_checkpoint_of_an_older_eventjet_gets_the_app_of_its_next_worker(
    nats: NatsServer, database: str
) -> None:
    shop = app_over(nats, database)
    shop.init()
    last = shop.append(history(20))
    async with shop.working(options=QUICK):
        await shop.caught_up(last)
    execute(
        database,
        "alter table eventjet_projection drop column app",
        "alter table eventjet_projection drop column code",
        "alter table eventjet_quarantine rename column quarantined_at to parked_at",
        "update eventjet_alembic_version set version_num = '0001'",
    )
    with pytest.raises(Unreachable, match=r"revision 0001.*Run `eventjet db upgrade`"):
        await worked(shop)
    with shop.where.sync_engine().begin() as connection:
        upgraded = ("eventjet_projection.app", "eventjet_projection.code", "eventjet_quarantine.quarantined_at")
        assert migrations.upgrade(connection).columns == upgraded
        assert [checkpoint.app for checkpoint, _ in read_all(connection)] == [""]
    async with shop.working(options=QUICK):
        await shop.caught_up(shop.append(history(5)))
    with reading(database) as connection:
        assert [checkpoint.app for checkpoint, _ in read_all(connection)] == [shop.name]
    with pytest.raises(Unreachable, match=f"the app '{shop.name}'"):
        app_over(nats, database).init()


async def test_a_checkpoint_without_an_app_is_refused_to_an_app_of_another_log(nats: NatsServer, database: str) -> None:
    """An upgrade leaves such a checkpoint until a worker of its own app takes it."""
    shop, bank = app_over(nats, database), app_over(nats, database)
    shop.init()
    async with shop.working(options=QUICK):
        await shop.caught_up(shop.append(history(20)))
    bank.append(history(20))
    execute(database, "update eventjet_projection set app = '', code = ''")
    ((checkpoint, _),) = checkpoints(database)
    before, rows = row_of(database), execute(database, "select * from balances")

    async def initialised_with_its_log(other: Ledger) -> None:
        engine, resolved = other.where.sync_engine(), other.projections.values()
        await asyncio.to_thread(create_tables, engine, resolved, log="bank's")

    async def begun_anew_with_its_log(other: Ledger) -> None:
        await asyncio.to_thread(reset, other.where, other.projections["balances"], "bank's")

    without_their_log = [action for action in ALL if action not in (initialised, waited_for)]
    for action in (initialised_with_its_log, begun_anew_with_its_log, *without_their_log):
        with pytest.raises(EventjetError, match=f"made from the log {checkpoint.log} by an older eventjet"):
            await action(bank)
        assert row_of(database) == before, action.__name__
    assert execute(database, "select * from balances") == rows
    for other in (bank, app_over(nats, database)):
        with reading(database) as connection:
            assert unused(connection, [], other.name) == []
        with pytest.raises(EventjetError, match="no unused revision"), bank.where.sync_engine().begin() as connection:
            retire(connection, "balances", 1, [], other.name)
    assert create_tables(shop.where.sync_engine(), shop.projections.values(), log=checkpoint.log) == []
    # Its own app is refused, too, unless another checkpoint names that app together with the log.
    with pytest.raises(
        EventjetError, match=f"nothing in the database says that this is the log of the app '{shop.name}'"
    ):
        await paused(shop)
    execute(
        database,
        "insert into eventjet_projection (name, revision, app, log) "
        f"values ('movements', 1, '{shop.name}', '{checkpoint.log}')",
    )
    await paused(shop)
    await resumed(shop)
    execute(database, "delete from eventjet_projection where name = 'movements'")
    async with shop.working(options=QUICK):
        await shop.caught_up(shop.append(history(5)))
    ((checkpoint, _),) = checkpoints(database)
    assert (checkpoint.state, checkpoint.app) == ("active", shop.name)


async def test_a_standby_does_not_take_a_checkpoint_without_an_app_of_another_log(
    nats: NatsServer, database: str
) -> None:
    """The worker runs for its other read models when an old row is restored from a dump."""
    shop, bank = app_over(nats, database), app_over(nats, database)
    movements = replace(MOVEMENTS, app=bank.name)
    shop.init()
    async with shop.working(options=QUICK):
        await shop.caught_up(shop.append(history(20)))
    bank.projections = {"movements": movements}
    bank.init()
    bank.projections |= {"balances": replace(BALANCES, app=bank.name)}
    execute(database, "update eventjet_projection set app = '' where name = 'balances'")
    before = execute(database, "select * from eventjet_projection where name = 'balances'")
    async with bank.working(options=QUICK):
        await bank.caught_up(bank.append(history(20)), movements)
    assert execute(database, "select * from eventjet_projection where name = 'balances'") == before
