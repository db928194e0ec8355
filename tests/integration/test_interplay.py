"""Combined features: promotions of new revisions, drops during a rebuild, takeovers and ended transactions."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from eventjet import Recorded
from eventjet.dev.nats import NatsServer
from eventjet.errors import PromotionRefused, RebuildError
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.protocol import publish_frame
from eventjet.rebuild import rebuild, verify
from eventjet.rebuild.job import open_job
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.runner import catching_up
from eventjet.rebuild.shadow import shadow_of
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.sql.revisions import attempt, promote, retire
from eventjet.sql.table_moves import NotNow
from eventjet.subscriptions.context import Session
from tests.caught_up import wait_caught_up
from tests.integration import by_hand
from tests.integration.by_hand import LEDGER, QUICK, bound_with, changed, expected, log_of, table_rows
from tests.integration.deploys import DEPLOYS, NEWER, OPTIONS, deployed
from tests.integration.ledger_log import Ledger, history
from tests.integration.projecting import BALANCES, Added, Opened
from tests.integration.revision_log import checkpoints, folded, init, rows, stands
from tests.logs import block


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("eventjet_database"))
    return f"sqlite:///{tmp_path}/read.db"


@pytest.fixture
def ledger(eventjet_nats: NatsServer, url: str) -> Ledger:
    """Return the old deploy, with its tables."""
    ledger = Ledger(Settings(servers=(eventjet_nats.url,), database=url))
    ledger.create()
    init(ledger, "old")
    return ledger


@pytest.fixture
def log(eventjet_nats: NatsServer, url: str) -> Ledger:
    return log_of(eventjet_nats, url)


async def build_revisions(ledger: Ledger) -> int:
    """Let the old deploy project events, and create the tables of the new deploy."""
    last = ledger.append(history(300))
    async with ledger.working(options=OPTIONS):
        await ledger.caught_up(last)
    init(ledger, "fold")
    return last


async def test_a_revision_that_is_behind_is_not_promoted(ledger: Ledger) -> None:
    last = await build_revisions(ledger)
    with pytest.raises(PromotionRefused, match=f"it is {last} events behind revision 1"):
        await asyncio.to_thread(promote, Database(ledger.settings.database), NEWER, patience_s=0)
    assert checkpoints(ledger)["balances", 1].location == ""
    assert rows(ledger, BALANCES) == folded(ledger, 1, last)


async def test_a_worker_does_not_replace_a_newer_revision(ledger: Ledger) -> None:
    last = await build_revisions(ledger)
    third = replace(NEWER, revision=3)
    engine = Database(ledger.settings.database).sync_engine()
    create_tables(engine, [third])
    async with deployed("fold", ledger.settings, ledger.name).working(options=OPTIONS):
        await stands(ledger, 2, location="")
    async with Ledger(ledger.settings, ledger.name, projections={"balances": third}).working(options=OPTIONS):
        await stands(ledger, 3, location="")
    # The worker of revision 2 does this when it has looked for a newer revision too early.
    with pytest.raises(NotNow, match="revision 3"), engine.begin() as connection:
        attempt(connection, NEWER, epoch=checkpoints(ledger)["balances", 2].epoch)
    assert checkpoints(ledger)["balances", 3].location == ""
    assert rows(ledger, third) == folded(ledger, 2, last)
    engine.dispose()


async def test_another_process_does_not_continue_after_a_handler_ended_the_transaction(log: Ledger) -> None:
    async def added(event: Recorded[Added], connection: AsyncConnection) -> None:
        await by_hand.added(event, connection)
        await (await connection.get_raw_connection()).driver_connection.commit()  # type: ignore[union-attr]

    last = log.append([("a-1", Added(amount=Decimal(1)))] * 3)
    async with changed(log, bound_with(by_hand.opened, added, by_hand.closed)).working(options=QUICK):
        await log.failed()
    async with log.working(options=QUICK):
        log.append([("a-1", Added(amount=Decimal(1)))])
        await asyncio.sleep(1)
        assert (await log.status()).state == "failed"
        assert (await log.status()).position == last
    # A rebuild repairs the tables, and the projection continues.
    await rebuild(log, ["ledger"], log.settings, engine="local")
    last = log.append([("a-1", Added(amount=Decimal(1)))])
    async with log.working(options=QUICK):
        await wait_caught_up(log.settings.database, LEDGER, last, 30)
    assert table_rows(log.where) == expected(log.recorded(last))


async def test_a_revision_dropped_during_its_rebuild_does_not_replace_another(ledger: Ledger) -> None:
    last = await build_revisions(ledger)
    async with deployed("fold", ledger.settings, ledger.name).working(options=OPTIONS):
        await stands(ledger, 2, location="")
    database = Database(ledger.settings.database)
    engine = database.sync_engine()
    with (
        open_job(ledger, ledger.settings, Watch(), "local") as job,
        shadow_of(database, BALANCES, job.log.identity, job.watch) as shadow,
    ):
        shadow.finish()
        with catching_up(shadow, job, 0) as follower:
            follower.to(last)
            with engine.begin() as connection:
                retire(connection, "balances", 1, DEPLOYS["fold"][1])
            with pytest.raises(RebuildError, match="was dropped while it was rebuilt"):
                shadow.swap(job.log.identity, follower.to)
    assert checkpoints(ledger)["balances", 1].state == "retired"
    assert rows(ledger, NEWER) == folded(ledger, 2, last)
    engine.dispose()


async def test_a_dropped_revision_is_not_verified_against_another_revisions_table(ledger: Ledger) -> None:
    await build_revisions(ledger)
    async with deployed("fold", ledger.settings, ledger.name).working(options=OPTIONS):
        await stands(ledger, 2, location="")
    engine = Database(ledger.settings.database).sync_engine()
    with engine.begin() as connection:
        retire(connection, "balances", 1, DEPLOYS["fold"][1])
    engine.dispose()
    with pytest.raises(RebuildError, match="has no live read model"):
        await verify(ledger, "balances", ledger.settings)


async def test_a_takeover_happens_while_events_keep_arriving(
    eventjet_nats: NatsServer, eventjet_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits take longer than the next event, so the worker keeps up and is never at the end."""
    ledger = Ledger(Settings(servers=(eventjet_nats.url,), database=eventjet_database))
    ledger.create()
    init(ledger, "old")
    await build_revisions(ledger)
    write, done = Session.write, threading.Event()

    async def slowly(session: Session, *call: Any, **named: Any) -> Any:
        await asyncio.sleep(0.05)
        return await write(session, *call, **named)

    def continue_commits() -> None:
        with NatsConnection.open(ledger.endpoint) as link:
            for version in count(1):
                if done.wait(0.004):
                    return
                encoded = ledger.catalog.encode(Opened(owner="ada"))
                subject, headers = f"{ledger.name}.ledger.a-new", block(encoded.type_name, encoded.schema, version)
                link.send(publish_frame(subject, encoded.body, headers=headers))

    monkeypatch.setattr(Session, "write", slowly)
    pouring = asyncio.create_task(asyncio.to_thread(continue_commits))
    try:
        newer = deployed("fold", ledger.settings, ledger.name)
        async with ledger.working("balances", options=OPTIONS), newer.working("balances", options=OPTIONS):
            await stands(ledger, 2, location="")
    finally:
        done.set()
        await pouring
    assert checkpoints(ledger)["balances", 1].location != ""
