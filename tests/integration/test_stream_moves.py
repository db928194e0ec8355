"""Streams are moved or scaled while commands, a read model, a reactor and a process with deadlines work."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from eventjet import Jet
from eventjet.cli.main import main
from eventjet.console import console, status_poller
from eventjet.dev.nats import NatsServer
from eventjet.errors import StoreError, StoreUnavailable
from eventjet.examples.transfer.accounts import Account, Book
from eventjet.examples.transfer.transfers import Stage, Transfer
from eventjet.jetstream.api import StreamState, stream_info
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.log import LogStatus, Move, log_now
from eventjet.rebuild import verify
from eventjet.settings import Settings
from eventjet.subscriptions import process_waking
from tests.integration.doctored import NOTE, OK, Deployment, app_of
from tests.integration.reacting import eventually, until, working
from tests.nats_cluster import SYSTEM, NatsCluster

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_java")]

BOUND_S = 240.0
WRITERS = 3
APP = app_of("bank")
STREAMS = ("bank", "KV_bank_cursors", "KV_bank_snapshots", "EJ_bank_timers")
DURABLES = {"deposits-r1", "receipts", "transfer"}


@dataclass
class Load:
    """Deposits and transfers with two deadlines each, and the positions of all acknowledged deposits."""

    jet: Jet
    positions: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The positions of the acknowledged deposits of each account."""
    transfers: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def deposits(self) -> int:
        return sum(map(len, self.positions.values()))

    async def deposit(self, account: str) -> None:
        while not self.stop.is_set():
            result = await self.jet.repository(Account).execute(account, Account.deposit, Decimal(1))
            self.positions[account].append(result.position)
            await asyncio.sleep(0.02)

    async def transfer(self) -> None:
        while not self.stop.is_set():
            self.transfers += 1
            name, until = f"t-{self.transfers}", datetime.now(UTC) + timedelta(seconds=3)
            await self.jet.repository(Transfer).execute(
                name, Transfer.request, name, "a-0", "frozen", Decimal(1), until=until
            )
            await asyncio.sleep(0.25)


@dataclass
class Moving:
    """A cluster with an app at work."""

    sick: Deployment
    jet: Jet
    load: Load

    async def states(self) -> list[StreamState]:
        assert self.jet.client is not None
        return [await self.jet.client.ask(stream_info(name), 30.0) for name in STREAMS]

    async def place_streams(self, **placement: Any) -> None:
        """Begin to move every stream, as `nats stream edit` does."""
        assert self.jet.client is not None
        for state in await self.states():
            await self.jet.client.api(f"STREAM.UPDATE.{state.name}", {**state.config, "placement": placement})

    async def wait_arrived(self, servers: set[str] | None = None, replicas: int = 3) -> None:
        """Wait until every stream has its copies on these servers, or anywhere; doctor must report no fault."""

        def is_there(state: StreamState) -> bool:
            copies: Sequence[dict[str, Any]] = state.cluster.get("replicas") or ()
            members = {state.cluster.get("leader"), *(copy["name"] for copy in copies)}
            is_right = members == servers if servers else len(members) == replicas
            return is_right and not state.cluster.get("desired") and all(copy.get("current") for copy in copies)

        async def all_arrived() -> bool:
            for finding in await self.sick.findings():
                if finding.check in ("move", "copies"):
                    assert finding.level is NOTE, finding
                elif finding.check in ("setting", "replicas"):
                    assert finding.level is OK or self.sick.settings.replicas == 1, finding
            try:
                return all(map(is_there, await self.states()))
            except StoreUnavailable:  # between two leaders
                return False

        async with asyncio.timeout(BOUND_S):
            while not await all_arrived():
                await asyncio.sleep(0.1)

    async def init(self, *options: str) -> None:
        """Run `eventjet init`, which may meet a stream that has no leader at the moment."""

        async def is_done() -> bool:
            return await asyncio.to_thread(main, ["init", *options]) == 0

        await eventually(is_done)

    async def more(self) -> None:
        """Return once deposits have been acknowledged after now."""
        before = self.load.deposits
        await until(lambda: self.load.deposits > before + 10 * WRITERS)


@asynccontextmanager
async def at_work(
    cluster: NatsCluster, folder: Path, monkeypatch: pytest.MonkeyPatch, replicas: int = 3
) -> AsyncGenerator[Moving]:
    """Run an app; at the end assert that every acknowledged event is stored once and handled by all subscriptions."""
    settings = Settings(tuple(cluster.urls), f"sqlite:///{folder}/models.db", replicas=replicas)
    sick = await Deployment(settings, folder, app=APP).init()
    monkeypatch.setattr(process_waking, "_LATE_LOOK_S", 1.0)
    monkeypatch.setenv("EVENTJET_APP", f"{__name__}:APP")
    monkeypatch.setenv("EVENTJET_SERVERS", cluster.url)
    monkeypatch.setenv("EVENTJET_DATABASE", settings.database)
    monkeypatch.setenv("EVENTJET_REPLICAS", str(replicas))
    async with working(APP, settings), APP.connect(settings, save_timeout_s=BOUND_S) as jet:
        load = Load(jet)
        await jet.repository(Account).execute("frozen", Account.freeze)
        tasks = [asyncio.ensure_future(load.deposit(f"a-{number}")) for number in range(WRITERS)]
        tasks.append(asyncio.ensure_future(load.transfer()))
        moving = Moving(sick, jet, load)
        try:
            await moving.more()
            yield moving
            await moving.more()
        finally:
            load.stop.set()
            await asyncio.gather(*tasks)
        await check_all(jet, load)
    report = await verify(APP, "deposits", settings, engine="local")
    assert (report.differences, report.rows) == (0, WRITERS)


async def check_all(jet: Jet, load: Load) -> None:
    async def are_noted() -> bool:
        return (await jet.repository(Book).load("all")).notes >= load.transfers

    await eventually(are_noted)
    stages = [(await jet.repository(Transfer).load(f"t-{number + 1}")).stage for number in range(load.transfers)]
    assert set(stages) == {Stage.ENDED}
    assert (await jet.repository(Book).load("all")).notes == load.transfers
    for account, positions in load.positions.items():
        history = await jet.repository(Account).history(account)
        stored = [event.position for event in history if not getattr(event.data, "transfer", "")]
        assert stored == positions, account  # each once, and no other
    await jet.caught_up("deposits", position=(await jet.log()).last, timeout_s=BOUND_S)
    assert jet.client is not None
    names = (await jet.client.api("CONSUMER.NAMES.bank"))["consumers"]
    assert Counter(names) == Counter(DURABLES)


async def test_streams_move_by_their_tags_while_an_app_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tags = ["rack:a", "rack:a", "rack:a rack:b", "rack:b", "rack:b"]
    with NatsCluster(sizes=[5], tags=tags) as cluster:
        async with at_work(cluster, tmp_path, monkeypatch) as moving:
            for rack, servers in (("rack:a", {"n1", "n2", "n3"}), ("rack:b", {"n3", "n4", "n5"})):
                await moving.place_streams(tags=[rack])
                await moving.init()
                await moving.init("--repair")
                await moving.wait_arrived(servers)
            await moving.init("--repair")
            assert [state.config["placement"] for state in await moving.states()] == [{"tags": ["rack:b"]}] * 4


async def test_streams_move_to_another_cluster_while_an_app_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NatsCluster(sizes=[3, 3]) as cluster:
        async with at_work(cluster, tmp_path, monkeypatch) as moving:
            await moving.place_streams(cluster="eventjet2")
            await moving.init()
            await moving.init("--repair")
            await moving.wait_arrived({"n4", "n5", "n6"})
            await moving.init("--repair")
            assert [state.config["placement"] for state in await moving.states()] == [{"cluster": "eventjet2"}] * 4


async def test_streams_are_scaled_while_an_app_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-server 2.15.1 loses timers that come due meanwhile, and a worker sets them again."""
    with NatsCluster() as cluster:
        async with at_work(cluster, tmp_path, monkeypatch, replicas=1) as moving:
            for replicas in (3, 1, 3):
                moving.sick.settings = replace(moving.sick.settings, replicas=replicas)
                monkeypatch.setenv("EVENTJET_REPLICAS", str(replicas))
                await moving.init("--repair")
                await moving.wait_arrived(replicas=replicas)


async def test_a_server_is_evacuated_while_an_app_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsCluster(sizes=[4]) as cluster:
        async with at_work(cluster, tmp_path, monkeypatch) as moving:
            (log, *_) = await moving.states()
            leader = str(log.cluster["leader"])
            system = Settings(tuple(cluster.urls), user=SYSTEM, password=SYSTEM)
            with NatsConnection.open(Endpoint.of(system)) as link:
                assert link.api("SERVER.EVACUATE", {"peer": leader})["success"]
            await moving.wait_arrived({"n1", "n2", "n3", "n4"} - {leader})
            cluster.named(leader).stop()
            await moving.more()
            cluster.named(leader).start()
            await moving.init("--repair")
            await moving.wait_arrived({"n1", "n2", "n3", "n4"} - {leader})


async def test_a_waiting_move_refuses_scaling_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with NatsCluster(sizes=[5], tags=["a", "a", "a b", "b", "b"]) as cluster:
        settings = Settings(tuple(cluster.urls[:3]), f"sqlite:///{tmp_path}/models.db", replicas=3)
        sick = await Deployment(settings, tmp_path, app=APP).init()
        sick.edit("bank", placement={"tags": ["a"]})
        environ = {"APP": f"{__name__}:APP", "SERVERS": ",".join(settings.servers), "DATABASE": settings.database}
        for name, value in {**environ, "REPLICAS": "1"}.items():
            monkeypatch.setenv(f"EVENTJET_{name}", value)

        async def moves(config: dict[str, Any] | None = None) -> bool:
            """Begin a move with a configuration, if one is given, and return whether a move is under way."""
            try:
                if config is not None:
                    sick.api("STREAM.UPDATE.bank", config)
                return bool(sick.api("STREAM.INFO.bank").get("cluster", {}).get("desired"))
            except StoreError:  # the paused servers led something
                return False

        async def has_arrived() -> bool:
            return not await moves()

        await eventually(has_arrived)
        config = sick.config("bank")
        for server in cluster.servers[3:]:
            server.pause()
        await eventually(lambda: moves({**config, "placement": {"tags": ["b"]}}))

        async def is_refused() -> bool:
            status = await asyncio.to_thread(main, ["init", "--repair"])
            error = " ".join(capsys.readouterr().err.split())
            return status == 3 and "Run it again once `eventjet doctor` no longer says that the stream" in error

        await eventually(is_refused)
        await sick.deposit(Decimal(5))
        sick.api("STREAM.CANCEL_MOVE.bank")
        await eventually(has_arrived)
        assert sick.config("bank")["placement"] == {"tags": ["a"]}
        for server in cluster.servers[3:]:
            server.resume()


async def test_the_console_shows_where_a_stream_is_moved(
    eventjet_nats: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings((eventjet_nats.url,), f"sqlite:///{tmp_path}/models.db")
    sick = await Deployment(settings, tmp_path).init()
    move = Move(["n4", "n5"], "2026-11-27T22:48:19Z", "waiting for desired peers to catch up", False, False)

    async def moving_status(*of: Any) -> LogStatus:
        return replace(await log_now(*of), move=move)

    monkeypatch.setattr(status_poller, "log_now", moving_status)
    site = console(sick.app, settings=settings)
    browser = httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url="http://localhost")
    async with site.router.lifespan_context(site), browser:

        async def is_shown() -> bool:
            notice = "on its way to n4, n5, since 2026-11-27T22:48:19Z (waiting for desired peers to catch up)"
            return notice in (await browser.get("/")).text

        await eventually(is_shown)
