"""The log in another JetStream: of a domain behind a leaf node, or of another account under a prefix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import orjson
import pytest

from eventjet import App, Jet
from eventjet.codec.subjects import snapshot_bucket
from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.errors import Forbidden, NoResponders, StreamMissing, Unreachable
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.examples.bank.read_models import balances_table
from eventjet.nats.api import direct_last, stream_info
from eventjet.nats.client import connect, connected
from eventjet.nats.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.rebuild import rebuild
from eventjet.settings import Settings
from eventjet.snapshots.kv import KeyValueSnapshots
from tests.among import LOCAL
from tests.contracts.unique_contract import User
from tests.integration.doctored import FAULT, UNREACHABLE, Sick
from tests.logs import fresh_name

BOUND_S = 60.0


@dataclass(frozen=True)
class Link:
    """A hub of the domain `hub`, and a leaf node of it."""

    hub: NatsServer
    leaf: NatsServer

    def through(self, database: Path) -> Settings:
        """Of an application that is connected to the leaf node, and has its log in the hub."""
        return Settings(servers=(self.leaf.url,), jetstream_domain="hub", database=f"sqlite:///{database}/models.db")


def started(folder: Path, name: str, jetstream: str, links: str) -> NatsServer:
    store = f'jetstream {{ store_dir: "{folder / name}/data", sync_interval: always {jetstream} }}'
    return NatsServer(
        folder / name, jetstream=False, config=f"server_name: {name}\n{links}\n{'' if jetstream == 'none' else store}"
    )


@pytest.fixture(scope="module", params=["none", "", ", domain: leaf"], ids=["no-jetstream", "no-domain", "own-domain"])
def link(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    folder = tmp_path_factory.mktemp("link")
    with reserved_port() as port:
        hub = started(folder, "hub", ", domain: hub", f'leafnodes {{ listen: "127.0.0.1:{port}" }}')
        remote = f'leafnodes {{ remotes: [ {{ url: "nats://127.0.0.1:{port}" }} ] }}'
        with hub, started(folder, "leaf", request.param, remote) as leaf:
            found = Link(hub, leaf)
            asyncio.run(reached(found.through(folder)))
            yield found


async def reached(settings: Settings) -> None:
    """Return once the API of the other JetStream answers."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                await (await connect(settings)).close()
                return
            except Unreachable:
                await asyncio.sleep(0.05)


async def test_workers_reactors_processes_and_doctor_work_through_a_leaf_node(link: Link, tmp_path: Path) -> None:
    sick = await Sick(link.through(tmp_path), tmp_path).made()
    await sick.begun()
    found = await sick.found()
    for one in found: print(one)
    assert [one for one in found if one.level in (FAULT, UNREACHABLE)] == []
