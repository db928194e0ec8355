"""A whole cluster is killed under load, and the mirror in the other region is promoted.

Every acknowledged command is in the promoted log, or named by position; no row is wrong afterwards. How often it is
tried is said by `EVENTJET_TEST_PROMOTIONS`.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import ExitStack, suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eventjet import Committed, Jet
from eventjet.codec.headers import VERSION, number_of
from eventjet.codec.subjects import subject_of
from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.errors import EventjetError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.jetstream.client import connected
from eventjet.operations import mirrors, promotion
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.integration.reacting import eventually, working
from tests.nats_cluster import wait_agreed
from tests.two_regions import crossing, denied, stored

TRIES = int(os.environ.get("EVENTJET_TEST_PROMOTIONS", "1"))
WRITERS = 8
PATIENT_S = 240.0


def regions(folder: Path, stack: ExitStack) -> tuple[list[NatsServer], NatsServer]:
    """Three servers in the east that form a cluster, and one in the west, a leaf node of each of them."""
    routes = [stack.enter_context(reserved_port()) for _ in range(3)]
    leaves = [stack.enter_context(reserved_port()) for _ in range(3)]
    named = ", ".join(f"nats-route://127.0.0.1:{port}" for port in routes)
    east = [
        NatsServer(
            folder / f"east{number}",
            jetstream=False,
            config=(
                f'server_name: east{number}\nleafnodes {{ listen: "127.0.0.1:{leaf}" }}\n'
                f"cluster {{ name: east, listen: 127.0.0.1:{route}, routes: [{named}] }}\n"
                f'jetstream {{ store_dir: "{folder}/east{number}/data", sync_interval: always, domain: east }}'
            ),
        )
        for number, (route, leaf) in enumerate(zip(routes, leaves, strict=True))
    ]
    urls = ", ".join(f'"nats://127.0.0.1:{port}"' for port in leaves)
    west = NatsServer(
        folder / "west",
        jetstream=False,
        config=(
            f"server_name: west\nleafnodes {{ remotes: [ {{ urls: [{urls}], {denied(stored(bank.name))} }} ] }}\n"
            f'jetstream {{ store_dir: "{folder}/west/data", sync_interval: always, domain: west }}'
        ),
    )
    for server in (*east, west):
        stack.enter_context(server)
    wait_agreed(east, PATIENT_S)
    return east, west


async def writing(jet: Jet, account: str, acknowledged: list[Committed[Account, Any]]) -> None:
    """Deposit until the log answers no more."""
    accounts = jet.repository(Account)
    with suppress(EventjetError):
        await accounts.execute(account, Account.open, account)
        while True:
            acknowledged.append(await accounts.execute(account, Account.deposit, Decimal(1)))


@pytest.mark.timeout(900 * TRIES)
async def test_after_a_cluster_is_killed_every_acknowledged_command_is_there_or_named(tmp_path: Path) -> None:
    for number in range(TRIES):
        await killed_and_promoted(tmp_path / str(number), lags=number % 2 == 0)


async def killed_and_promoted(folder: Path, *, lags: bool) -> None:
    """One disaster; with `lags` the mirror is away when it happens, so that it lacks what was acknowledged last."""
    acknowledged: list[Committed[Account, Any]] = []
    with ExitStack() as stack:
        east, west = await asyncio.to_thread(regions, folder, stack)
        settings = Settings(
            servers=tuple(server.url for server in east),
            read_from=(west.url,),
            database=f"sqlite:///{folder}/models.db",
            replicas=3,
            save_timeout_s=10.0,
        )
        async with bank.connect(settings, save_timeout_s=PATIENT_S) as jet:
            await jet.init()
        create_tables(Database(settings.database).sync_engine(), bank.projections.values())
        await asyncio.to_thread(mirrors.create, bank.name, settings, 1)
        async with bank.connect(settings) as jet, working(bank, settings):
            writers = [asyncio.ensure_future(writing(jet, f"a-{one}", acknowledged)) for one in range(WRITERS)]

            async def busy() -> bool:
                return len(acknowledged) > 300 + random.randrange(300) or all(writer.done() for writer in writers)

            await eventually(busy)
            if lags:
                west.kill()
                seen = len(acknowledged)

                async def further() -> bool:
                    return len(acknowledged) > seen + 50 or all(writer.done() for writer in writers)

                await eventually(further)
            for server in east:
                server.kill()
            await asyncio.wait(writers, timeout=PATIENT_S)
        west.start()
        promoted = await asyncio.to_thread(promotion.promote, bank, settings)
        assert not lags or acknowledged[-1].position > promoted.end
        after = replace(settings.for_reads(), database=settings.database, replicas=1, save_timeout_s=PATIENT_S)
        await none_is_lost_unnamed(after, promoted, acknowledged)
        async with bank.connect(after) as jet, working(bank, after):
            await jet.init()
            done = await jet.repository(Account).execute("new", Account.open, "new")
            assert done.position == promoted.end + 1
            if not promoted.beyond:
                await jet.caught_up("balances", token=done.token, timeout_s=PATIENT_S)
        if promoted.beyond:
            await rebuild(bank, ["balances", "postings"], after, engine="local")
        for name in ("balances", "postings"):
            report = await verify(bank, name, after, engine="local")
            assert (report.differences, report.position) == (0, done.position)
        for server in east:
            server.start()
        await asyncio.to_thread(wait_agreed, east, PATIENT_S)
        assert await asyncio.to_thread(crossing, east[0].url, west.url, bank.name) == set()
        fenced = await asyncio.to_thread(promotion.promote, bank, settings)
        assert fenced.sealed
        assert max(one.position for one in acknowledged) <= fenced.known_last
        lost = sum(one.position > promoted.end for one in acknowledged)
        print(f"{len(acknowledged)} commands acknowledged, {lost} not in the mirror, each of them named")  # noqa: T201


async def none_is_lost_unnamed(
    after: Settings, promoted: promotion.Promotion, acknowledged: list[Committed[Account, Any]]
) -> None:
    """Each acknowledged event up to the mirror's end is at its position in the promoted log."""
    async with connected(after) as client, bank.connect(after) as jet:
        assert client.domain == "west"
        stored = {
            record[0]: (record[2].decode(), number_of(record[3], VERSION)) async for record in jet.store.records()
        }
        assert list(stored) == list(range(1, promoted.end + 1))
        for one in acknowledged:
            if one.position <= promoted.end:
                subject = subject_of(bank.name, "account", one.state.owner or "")
                assert stored[one.position] == (subject, one.version)
