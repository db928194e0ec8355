"""A mirror of the log in another JetStream is created, compared, read, and promoted when the log is gone."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest

from eventjet import App, Jet, Reaction, Recorded, failpoints, lake, reactor
from eventjet.cli.main import main
from eventjet.codec.subjects import cursor_bucket, object_bucket
from eventjet.errors import LakeRefused, LogUnusable, NotCaughtUp, Refused, UsageError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.examples.bank.read_models import balances
from eventjet.jetstream.api import StreamState, message_at, stream_info, update_stream
from eventjet.jetstream.client import Client, connected
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.mirror import LogReader, compared_positions, mirrored_configs
from eventjet.log.topology import IDENTITY, identity_of, objects_config, reading_log_state, stream_config
from eventjet.nats.endpoint import Endpoint
from eventjet.operations import mirrors, promotion
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.spark.source import LogOptions
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.blobs import Document, Filed
from tests.faults.proxy import NatsProxy
from tests.integration.reacting import Bell, Town, app_of, eventually, until, working
from tests.two_regions import Regions, crossing, stored, two_regions

APP = bank.name
PATIENT_S = 120.0


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Regions]:
    with two_regions(tmp_path_factory.mktemp("regions"), APP) as regions:
        yield regions


@pytest.fixture
def settings(regions: Regions, tmp_path: Path) -> Settings:
    """Return settings for both regions, whose streams are deleted."""
    for server in (regions.west, regions.east):
        with NatsConnection.open(Endpoint((server.url,))) as link:
            for name in link.api("STREAM.NAMES").get("streams") or ():
                link.api(f"STREAM.DELETE.{name}")
    return regions.settings(tmp_path)


async def wait_mirrored(settings: Settings, position: int) -> None:
    """Wait until the mirror has a position."""
    async with asyncio.timeout(PATIENT_S):
        while mirrors.status(APP, settings).last < position:
            await asyncio.sleep(0.05)


async def deposit(jet: Jet, count: int, account: str = "a-1") -> int:
    accounts = jet.repository(Account)
    result = await accounts.execute(account, Account.open, "ada")
    for _ in range(count):
        result = await accounts.execute(account, Account.deposit, Decimal(1))
    return result.position


async def create_mirrored_log(settings: Settings, count: int = 10) -> int:
    """Create a log with some events and its mirror; return the last position."""
    async with bank.connect(settings) as jet:
        await jet.init()
        last = await deposit(jet, count)
    await asyncio.to_thread(mirrors.create, APP, settings, 1)
    await wait_mirrored(settings, last)
    create_tables(Database(settings.database).sync_engine(), bank.projections.values())
    return last


async def test_a_created_mirror_has_the_events_and_identity_of_the_log(settings: Settings) -> None:
    last = await create_mirrored_log(settings)
    status = await asyncio.to_thread(mirrors.status, APP, settings)
    assert (status.last, status.lag, status.lag_s, status.fault, status.unreachable) == (last, 0, 0.0, None, None)
    assert status.log == status.mirror
    assert await asyncio.to_thread(mirrors.create, APP, settings, 1) == []


async def test_workers_and_tail_read_from_the_mirror(settings: Settings) -> None:
    await create_mirrored_log(settings)
    async with AsyncExitStack() as stack:
        jet = await stack.enter_async_context(bank.connect(settings))
        await stack.enter_async_context(working(bank, settings))
        last = await deposit(jet, 5)
        await jet.caught_up(balances, position=last, timeout_s=PATIENT_S)
        with NatsConnection.open(Endpoint.of(settings.for_reads())) as west:
            assert f"{balances.name}-r1" in west.api(f"CONSUMER.NAMES.{APP}")["consumers"]
        with NatsConnection.open(Endpoint.of(settings)) as east:
            assert not east.api(f"CONSUMER.NAMES.{APP}").get("consumers")
        assert [event.position async for event in jet.tail()] == list(range(1, last + 1))


async def test_tasks_that_read_from_the_mirror_share_a_connection(settings: Settings) -> None:
    await create_mirrored_log(settings)
    async with (
        NatsProxy(settings.for_reads().servers[0]) as proxy,
        bank.connect(replace(settings, read_from=(proxy.url,))) as jet,
    ):
        readers = await asyncio.gather(*(jet.reader() for _ in range(3)))
        assert (len(set(map(id, readers))), proxy.connections) == (1, 1)


async def test_a_rebuild_and_a_verification_read_from_the_mirror(settings: Settings) -> None:
    last = await create_mirrored_log(settings)
    with NatsConnection.open(Endpoint.of(settings)) as east:
        report = await rebuild(bank, ["balances"], settings, engine="local")
        assert report.position == last
        verified = await verify(bank, "balances", settings, engine="local")
        assert (verified.position, verified.differences) == (last, 0)
        assert not east.api(f"CONSUMER.NAMES.{APP}").get("consumers")


def west_api(settings: Settings, subject: str, body: object = None) -> dict[str, object]:
    with NatsConnection.open(Endpoint.of(settings.for_reads())) as link:
        return link.api(subject, body)


async def cut_off(settings: Settings) -> None:
    """Stop the mirror's copying: its origin becomes a stream that does not exist."""
    with NatsConnection.open(Endpoint.of(settings.for_reads())) as link:
        state = link.ask(stream_info(APP))
        link.api(f"STREAM.DELETE.{APP}")
        copy = {**state.config, "mirror": {"name": "nothing", "external": {"api": "$JS.east.API", "deliver": ""}}}
        link.api(f"STREAM.CREATE.{APP}", copy)


async def until_not_caught_up(jet: Jet, position: int, reason: str) -> None:
    """Wait until whoever waits for a position gets a reason, which the worker notes when it has looked."""

    async def is_noted() -> bool:
        with pytest.raises(NotCaughtUp) as caught:
            await jet.caught_up(balances, position=position, timeout_s=1.0)
        return re.search(reason, str(caught.value)) is not None

    await eventually(is_noted)


async def test_workers_wait_for_a_disconnected_mirror_and_report_it(settings: Settings) -> None:
    await create_mirrored_log(settings)
    await cut_off(settings)
    status = await asyncio.to_thread(mirrors.status, APP, settings)
    assert status.lag == 11
    assert (status.lag_s or 0) > 0
    assert "has heard nothing yet from the log, and is 11 positions behind it" in (status.fault or "")
    async with bank.connect(settings) as jet, working(bank, settings):
        # The message depends on whether the worker has read the mirror's state yet.
        problem = "mirror that workers read ends at position 0, and the log at 11|nothing yet from the log, and is 11"
        await until_not_caught_up(jet, 11, problem)


async def test_a_mirror_of_another_log_is_neither_read_nor_replaced(settings: Settings) -> None:
    await create_mirrored_log(settings)
    with NatsConnection.open(Endpoint.of(settings)) as east:
        east.api(f"STREAM.DELETE.{APP}")
    async with bank.connect(settings) as jet:
        await jet.init()
        for number in range(12):
            await deposit(jet, 1, f"b-{number}")
        with pytest.raises(LogUnusable, match=r"it is of the log .*, and the log is .*mirror create` makes a mirror"):
            _ = [event async for event in jet.tail()]
    with pytest.raises(LogUnusable, match="it is of the log"):
        await rebuild(bank, ["balances"], settings, engine="local")
    with pytest.raises(LogUnusable, match="it is of the log"):
        await asyncio.to_thread(mirrors.create, APP, settings, 1)
    status = await asyncio.to_thread(mirrors.status, APP, settings)
    assert "it is of the log" in (status.fault or "")


async def test_a_mirror_without_its_first_events_is_not_read(settings: Settings) -> None:
    last = await create_mirrored_log(settings)
    with NatsConnection.open(Endpoint.of(settings.for_reads())) as link:
        state = link.ask(stream_info(APP))
        link.api(f"STREAM.DELETE.{APP}")
        link.api(f"STREAM.CREATE.{APP}", {**state.config, "mirror": {**state.config["mirror"], "opt_start_seq": 5}})
    await wait_mirrored(settings, last)
    async with bank.connect(settings) as jet:
        with pytest.raises(LogUnusable, match="positions 1 to 4 from its beginning are gone"):
            _ = [event async for event in jet.tail()]


async def test_a_mirror_is_refused_in_the_domain_of_the_log_or_over_another_stream(
    settings: Settings, regions: Regions
) -> None:
    async with bank.connect(settings) as jet:
        await jet.init()
    with pytest.raises(UsageError, match="EVENTJET_READ_FROM is not set"):
        await asyncio.to_thread(mirrors.create, APP, replace(settings, read_from=None), 1)
    same_region = replace(settings, read_from=(regions.east.url,))
    with pytest.raises(UsageError, match="would be in the JetStream domain 'east', which has the log"):
        await asyncio.to_thread(mirrors.create, APP, same_region, 1)
    west_api(settings, f"STREAM.CREATE.{APP}", {**stream_config(APP, 1)})
    with pytest.raises(LogUnusable, match="it is no mirror"):
        await asyncio.to_thread(mirrors.create, APP, settings, 1)


async def test_a_mirror_may_be_named_by_its_domain(settings: Settings) -> None:
    last = await create_mirrored_log(settings)
    by_domain = replace(settings, read_from=("west",))
    status = await asyncio.to_thread(mirrors.status, APP, by_domain)
    assert (status.last, status.fault, status.crosses) == (last, None, None)
    plan = await asyncio.to_thread(promotion.preview, bank, by_domain)
    assert any("the old servers would store what is recorded" in reason for reason in plan.unknown)
    async with bank.connect(by_domain) as jet:
        assert [event.position async for event in jet.tail()] == list(range(1, last + 1))


async def test_a_worker_that_is_ahead_of_its_mirror_waits_for_it(settings: Settings) -> None:
    await create_mirrored_log(settings)
    async with bank.connect(settings) as jet, working(bank, settings.for_log()):
        await jet.caught_up(balances, position=11, timeout_s=PATIENT_S)
    await cut_off(settings)
    async with bank.connect(settings) as jet, working(bank, settings):
        last = await deposit(jet, 1, "b-2")
        await until_not_caught_up(jet, last, r"it has reached position 0, and balances position 11\. This goes")


async def test_a_lake_ahead_of_the_mirror_is_not_reported_as_a_lost_log(settings: Settings, tmp_path: Path) -> None:
    last = await create_mirrored_log(settings)
    url = str(tmp_path / "lake")
    assert (await lake.sync(bank, url, settings)).position == last
    await cut_off(settings)
    with pytest.raises(LakeRefused, match="in the mirror that EVENTJET_READ_FROM names") as refused:
        await lake.sync(bank, url, settings)
    assert "eventjet mirror status" in str(refused.value)
    assert (await lake.sync(bank, url, settings.for_log())).events == 0


async def exchange_events(settings: Settings, kept_last: int, last: int) -> None:
    """Let the log lose its events after a position, keep its identity, and grow again with others."""
    with NatsConnection.open(Endpoint.of(settings)) as east:
        state = east.ask(stream_info(APP))
        records = [east.ask(message_at(APP, position)) for position in range(1, kept_last + 1)]
        east.api(f"STREAM.DELETE.{APP}")
        east.api(f"STREAM.CREATE.{APP}", {**state.config, "metadata": state.metadata})
        for record in records:
            assert record is not None
            east.request(record[2].decode(), record[4], headers=record[3])
    async with bank.connect(settings.for_log()) as jet:
        for number in range(last - kept_last):
            await jet.repository(Account).execute(f"c-{number}", Account.open, "eve")


async def test_a_mirror_whose_events_differ_from_the_log_is_not_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = await create_mirrored_log(settings)
    async with bank.connect(settings) as jet, working(bank, settings):
        await jet.caught_up(balances, position=last, timeout_s=PATIENT_S)
    await exchange_events(settings, 6, last)
    differs = f"at position {last} it has the event .*, and the log has .*mirror create"
    async with bank.connect(settings) as jet:
        with pytest.raises(LogUnusable, match=differs):
            _ = [event async for event in jet.tail()]
        with pytest.raises(LogUnusable, match=differs):
            await rebuild(bank, ["balances"], settings, engine="local")
        assert settings.read_from is not None
        monkeypatch.setenv("EVENTJET_SERVERS", settings.servers[0])
        monkeypatch.setenv("EVENTJET_READ_FROM", settings.read_from[0])
        with pytest.raises(LogUnusable, match=differs):
            LogOptions.parse({"stream": APP}).open()
        async with working(bank, settings):
            await until_not_caught_up(jet, last + 1, f"at position {last} it has the event")


def test_compared_positions_double_their_distance_from_the_end() -> None:
    state = StreamState(APP, first=1, last=20, messages=20, deleted=0, bytes=0, subjects=1, metadata={}, config={})
    assert compared_positions(state) == [20, 19, 17, 13, 5]
    assert compared_positions(replace(state, first=14, messages=7)) == [20, 19, 17]


async def test_a_worker_notices_a_promoted_mirror_while_the_log_is_silent(settings: Settings) -> None:
    last = await create_mirrored_log(settings)
    stand = SimpleNamespace(name="balances", log="", position=last, event_id="")
    async with connected(settings.for_reads()) as west:
        log = identity_of(await west.run(reading_log_state(APP)))
        nobody = SimpleNamespace(run=_never)
        reader = LogReader(APP, cast("Client", nobody), west)
        state = await west.ask(stream_info(APP))
        config = {name: value for name, value in state.config.items() if name != "mirror"}
        await west.ask(update_stream({**config, "metadata": {**state.metadata, IDENTITY: "another"}}))
        with pytest.raises(LogUnusable, match="it may be a mirror that was promoted"):
            await reader.look(stand, log, "balances-r1")


async def _never(_: object) -> NoReturn:
    raise AssertionError("the log is asked")


# Promotion.


def kill_log_region(regions: Regions, settings: Settings) -> Settings:
    """Kill the first region; return the settings of an application that continues in the second."""
    regions.east.kill()
    return replace(settings.for_reads(), database=settings.database)


async def record_event(settings: Settings) -> int:
    """Record one more event; return its position."""
    async with bank.connect(settings) as jet:
        return (await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))).position


async def test_a_mirror_is_not_accepted_as_the_log(settings: Settings, regions: Regions) -> None:
    last = await create_mirrored_log(settings)
    unreachable = "nats://127.0.0.1:9"
    for servers in ((regions.west.url,), (unreachable, regions.west.url)):
        confused = replace(settings, servers=servers)
        for call in (
            lambda: promotion.preview(bank, confused),  # noqa: B023
            lambda: promotion.promote(bank, confused, log_is_gone=True),  # noqa: B023
            lambda: mirrors.status(APP, confused),  # noqa: B023
            lambda: mirrors.create(APP, confused, 1, "$JS.east.API"),  # noqa: B023
        ):
            with pytest.raises(UsageError, match="lead to the stream 'bank' that EVENTJET_READ_FROM names"):
                await asyncio.to_thread(call)
    assert not west_api(settings, f"STREAM.INFO.{APP}")["config"]["sealed"]  # type: ignore[index]
    promoted = await asyncio.to_thread(promotion.promote, bank, settings)
    with pytest.raises(UsageError, match="not to the log that it is a mirror of"):
        await asyncio.to_thread(promotion.promote, bank, replace(settings, servers=(regions.west.url,)))
    assert promoted.end == last
    assert await record_event(settings.for_reads()) == last + 1


async def test_a_mirror_that_still_hears_its_log_is_not_promoted(settings: Settings) -> None:
    last = await create_mirrored_log(settings)
    unreachable = replace(settings, servers=("nats://127.0.0.1:9",))
    plan = await asyncio.to_thread(promotion.preview, bank, unreachable)
    assert any("The mirror heard from it" in reason for reason in plan.unknown)
    with pytest.raises(UsageError, match=r"heard from it .* s ago: it is alive"):
        await asyncio.to_thread(promotion.promote, bank, unreachable)
    assert "mirror" in west_api(settings, f"STREAM.INFO.{APP}")
    assert (await asyncio.to_thread(promotion.promote, bank, unreachable, log_is_gone=True)).end == last


async def test_a_log_is_not_sealed_for_a_disconnected_mirror(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = await create_mirrored_log(settings)
    await cut_off(settings)
    monkeypatch.setattr(promotion, "CATCH_UP_S", 1.0)
    with pytest.raises(LogUnusable, match=r"heard nothing yet.*reached position 0 of 11.*Nothing was changed"):
        await asyncio.to_thread(promotion.promote, bank, settings)
    assert await record_event(settings.for_log()) == last + 1


async def test_cursors_and_large_bodies_without_a_mirror_are_named_and_get_one(settings: Settings) -> None:
    last = await create_mirrored_log(settings)
    objects = f"OBJ_{object_bucket(APP)}"
    with NatsConnection.open(Endpoint.of(settings)) as east:
        east.api(f"STREAM.CREATE.{objects}", objects_config(APP, 1))
        east.request(f"$O.{object_bucket(APP)}.C.one", b"x" * 100)
    status = await asyncio.to_thread(mirrors.status, APP, settings)
    assert f"the log has '{objects}', of which there is no mirror" in (status.fault or "")
    with pytest.raises(LogUnusable, match=f"the log has '{objects}'.*mirror create"):
        await asyncio.to_thread(promotion.promote, bank, settings)
    assert await record_event(settings.for_log()) == last + 1
    assert await asyncio.to_thread(mirrors.create, APP, settings, 1) == [objects]
    assert (await asyncio.to_thread(mirrors.status, APP, settings)).fault is None
    assert (await asyncio.to_thread(promotion.promote, bank, settings)).end == last + 1
    stored = west_api(settings, f"STREAM.INFO.{objects}")
    assert (stored["state"]["last_seq"], "mirror" in stored) == (1, False)  # type: ignore[index]


@pytest.mark.slow
async def test_checkpoints_and_tokens_stay_valid_in_a_promoted_mirror(tmp_path: Path) -> None:
    with two_regions(tmp_path, APP) as regions:
        settings = regions.settings(tmp_path)
        await create_mirrored_log(settings)
        async with bank.connect(settings) as jet, working(bank, settings):
            result = await jet.repository(Account).execute("a-1", Account.deposit, Decimal(5))
            await jet.caught_up(balances, token=result.token, timeout_s=PATIENT_S)
        await wait_mirrored(settings, result.position)
        new_settings = kill_log_region(regions, settings)
        plan = await asyncio.to_thread(promotion.preview, bank, settings)
        assert (plan.end, plan.new, plan.beyond, plan.log_last) == (result.position, "", (), None)
        assert "the old log is not reached" in plan.unknown[0]
        assert "refused the connection" in plan.unknown[1]
        assert "eventjet dev" not in plan.unknown[1]
        promoted = await asyncio.to_thread(promotion.promote, bank, settings)
        assert (promoted.end, promoted.old, promoted.moved) == (result.position, plan.old, 2)
        second = await asyncio.to_thread(promotion.promote, bank, settings)
        assert (second.new, second.end, second.moved) == (promoted.new, promoted.end, 0)
        async with bank.connect(new_settings) as jet, working(bank, new_settings):
            topology = await jet.init()
            assert (topology.identity, topology.drifts) == (promoted.new, ())
            await jet.caught_up(balances, token=result.token, timeout_s=PATIENT_S)
            account = await jet.repository(Account).load("a-1")
            assert account.balance == 15
            next_result = await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))
            assert next_result.position == result.position + 1
            await jet.caught_up(balances, token=next_result.token, timeout_s=PATIENT_S)
            assert (await verify(bank, "balances", new_settings, engine="local")).differences == 0
        regions.east.start()
        fenced = await asyncio.to_thread(promotion.promote, bank, settings)
        assert (fenced.sealed, fenced.log_last, fenced.beyond) == (True, result.position, ())
        async with bank.connect(settings.for_log()) as jet:
            with pytest.raises(Refused, match="sealed"):
                await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))


@pytest.mark.slow
async def test_positions_beyond_a_promoted_mirror_are_named_and_refused(tmp_path: Path) -> None:
    with two_regions(tmp_path, APP) as regions:
        settings = regions.settings(tmp_path)
        last = await create_mirrored_log(settings)
        regions.west.kill()
        async with bank.connect(settings) as jet, working(bank, settings.for_log()):
            lost_result = await jet.repository(Account).execute("a-1", Account.deposit, Decimal(5))
            await jet.caught_up(balances, token=lost_result.token, timeout_s=PATIENT_S)
        new_settings = kill_log_region(regions, settings)
        regions.west.start()
        promoted = await asyncio.to_thread(promotion.promote, bank, settings, log_is_gone=True)
        assert promoted.end == last
        losses = {(loss.what, loss.position) for loss in promoted.beyond}
        assert losses >= {("the read model 'balances', revision 1", lost_result.position)}
        assert promoted.known_last == lost_result.position
        async with bank.connect(new_settings) as jet:
            result = await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))
            assert result.position == lost_result.position
            async with working(bank, new_settings):
                with pytest.raises(NotCaughtUp, match=promoted.old):
                    await jet.caught_up(balances, position=result.position, timeout_s=PATIENT_S)
        await rebuild(bank, ["balances"], new_settings, engine="local")
        assert (await verify(bank, "balances", new_settings, engine="local")).differences == 0
        async with bank.connect(new_settings) as jet:
            with pytest.raises(NotCaughtUp, match=f"and the position is of the log {promoted.old}"):
                await jet.caught_up(balances, token=lost_result.token, timeout_s=PATIENT_S)
        regions.east.start()
        fenced = await asyncio.to_thread(promotion.promote, bank, settings)
        assert ("the old log", lost_result.position) in [(loss.what, loss.position) for loss in fenced.beyond]


@pytest.mark.slow
async def test_a_log_that_answers_is_sealed_and_moves_without_a_loss(tmp_path: Path) -> None:
    with two_regions(tmp_path, APP) as regions:
        settings = regions.settings(tmp_path)
        await create_mirrored_log(settings)
        async with bank.connect(settings) as jet:
            last = await deposit(jet, 20, "b-1")
            promoted = await asyncio.to_thread(promotion.promote, bank, settings)
            assert (promoted.end, promoted.sealed, promoted.beyond) == (last, True, ())
            with pytest.raises(Refused, match="sealed"):
                await jet.repository(Account).execute("b-1", Account.deposit, Decimal(1))
        async with bank.connect(settings.for_reads()) as jet:
            result = await jet.repository(Account).execute("b-1", Account.deposit, Decimal(1))
            assert result.position == last + 1


@pytest.mark.slow
async def test_workers_of_a_sealed_log_yield_to_workers_of_the_promoted_log(tmp_path: Path) -> None:
    with two_regions(tmp_path, APP) as regions:
        settings = regions.settings(tmp_path)
        last = await create_mirrored_log(settings)
        # These workers read the log itself, which still answers.
        async with bank.connect(settings) as jet, working(bank, replace(settings, read_from=None)):
            await jet.caught_up("balances", position=last, timeout_s=PATIENT_S)
            await asyncio.to_thread(promotion.promote, bank, settings)
            new_settings = replace(settings.for_reads(), database=settings.database)
            async with bank.connect(new_settings) as new_jet, working(bank, new_settings):
                result = await new_jet.repository(Account).execute("new", Account.open, "new")
                await new_jet.caught_up("balances", token=result.token, timeout_s=PATIENT_S)


@pytest.mark.slow
def test_mirror_commands_report_status_and_confirm_a_promotion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with two_regions(tmp_path, APP) as regions:
        settings = regions.settings(tmp_path)
        environ = {"APP": "eventjet.examples.bank.app:bank", "SERVERS": regions.east.url, "DATABASE": settings.database}
        for name, value in environ.items():
            monkeypatch.setenv(f"EVENTJET_{name}", value)
        assert main(["init"]) == 0
        assert main(["mirror", "status"]) == 2
        assert "EVENTJET_READ_FROM is not set" in capsys.readouterr().err
        monkeypatch.setenv("EVENTJET_READ_FROM", regions.west.url)
        assert main(["mirror", "status"]) == 1
        assert "`eventjet mirror create` makes it" in capsys.readouterr().out
        assert main(["mirror", "create", "--origin-api", "$JS.east.API"]) == 0
        assert "created  mirror bank" in capsys.readouterr().out
        assert main(["mirror", "status", "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert (status["stream"], status["lag"], status["crosses"], status["fault"]) == ("bank", 0, False, None)
        assert main(["doctor"]) == 0
        assert "events are read at" in capsys.readouterr().out
        assert main(["mirror", "promote", "--dry-run"]) == 0
        assert "will be sealed, for good" in capsys.readouterr().out
        monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
        monkeypatch.setenv("EVENTJET_READ_FROM", regions.west.url.replace("//", "//ada:s3cret@"))
        assert main(["mirror", "promote"]) == 1
        prompt = capsys.readouterr().err
        assert "Nothing was changed." in prompt
        assert "s3cret" not in prompt
        monkeypatch.setenv("EVENTJET_SERVERS", regions.west.url.replace("//", "//ada:s3cret@"))
        assert main(["mirror", "create", "--origin-api", "$JS.east.API"]) == 2
        error = capsys.readouterr().err
        assert regions.west.url in error
        assert "s3cret" not in error
        monkeypatch.setenv("EVENTJET_SERVERS", regions.east.url)
        assert main(["mirror", "promote", "--yes", "--log-is-gone"]) == 0
        output = capsys.readouterr().out
        assert "promoted bank is the log" in output
        assert "Name these servers in EVENTJET_SERVERS" in output
        assert main(["doctor"]) == 1
        assert "it may be a mirror that was" in capsys.readouterr().out


async def test_nothing_is_promoted_while_stored_subjects_cross_the_link(tmp_path: Path) -> None:
    with two_regions(tmp_path, APP, deny=()) as regions:
        settings = regions.settings(tmp_path)
        last = await create_mirrored_log(settings)
        # Between two domains the server itself lets no key of a bucket cross.
        crosses = {subject for subject in stored(APP) if not subject.startswith("$KV.")}
        assert await asyncio.to_thread(crossing, regions.east.url, regions.west.url, APP) == crosses
        assert (await asyncio.to_thread(mirrors.status, APP, settings)).crosses
        for call in (promotion.preview, promotion.promote):
            with pytest.raises(LogUnusable, match=r"both would store it.*Deny bank\.>.*Nothing was changed"):
                await asyncio.to_thread(call, bank, settings)
        assert await record_event(settings.for_log()) == last + 1


def test_denied_subjects_do_not_cross_the_link(regions: Regions) -> None:
    assert crossing(regions.east.url, regions.west.url, APP) == set()


@pytest.mark.slow
async def test_a_reactors_cursor_goes_on_in_the_promoted_log(tmp_path: Path) -> None:
    town = Town()
    app = app_of(town, name="town")
    with two_regions(tmp_path, app.name) as regions:
        settings = regions.settings(tmp_path)
        async with app.connect(settings) as jet:
            await jet.init()
            created = await asyncio.to_thread(mirrors.create, app.name, settings, 1)
            assert created == ["KV_town_cursors", "town"]
            async with working(app, settings):
                for number in range(5):
                    await jet.repository(Bell).execute("one", Bell.ring, number)
                await until(lambda: town.order("one") == list(range(5)))
            last = (await jet.log()).last
        with (
            NatsConnection.open(Endpoint.of(settings)) as east,
            NatsConnection.open(Endpoint((regions.west.url,))) as west,
        ):
            streams = ("KV_town_cursors", "town")
            await until(lambda: [west.ask(stream_info(name)).last for name in streams] == [
                east.ask(stream_info(name)).last for name in streams
            ])  # fmt: skip
        new_settings = kill_log_region(regions, settings)
        promoted = await asyncio.to_thread(promotion.promote, app, settings, log_is_gone=True)
        assert (promoted.end, promoted.moved, promoted.beyond) == (last, 1, ())
        async with app.connect(new_settings) as jet:
            assert (await jet.init()).cursors == ()
            async with working(app, new_settings):
                await jet.repository(Bell).execute("one", Bell.ring, 5)
                await until(lambda: town.order("one") == list(range(6)))


class Filing:
    """An app with a reactor and with events that refer to large bodies."""

    def __init__(self, name: str = "papers") -> None:
        self.filed: list[int] = []
        positions = self.filed

        @reactor("filing", start="beginning")
        async def filing(event: Recorded[Filed], to: Reaction[object]) -> None:
            positions.append(event.position)

        self.app = App(name, aggregates=[Document], reactors=[filing])

    async def file(self, jet: Jet, number: int) -> bytes:
        """File a document with its own body, and return the body."""
        body = f"document {number} ".encode() * 40_000
        blob = await jet.blobs.put(body, media_type="text/plain", name="scan")
        await jet.repository(Document).execute(f"d-{number}", Document.file, blob)
        return body


class Interrupted(Exception):
    """A promotion that ends at a failpoint."""


@pytest.mark.slow
@pytest.mark.parametrize("is_alive", [True, False])
async def test_an_interrupted_promotion_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    filing = Filing()
    app = filing.app
    places = ["ready", "sealed", "stream", "stream", "stream", "promoted", "checkpoints"]
    with two_regions(tmp_path, app.name) as regions:
        settings = regions.settings(tmp_path)
        async with app.connect(settings) as jet:
            await jet.init()
            assert len(await asyncio.to_thread(mirrors.create, app.name, settings, 1)) == 3
            bodies = [await filing.file(jet, number) for number in range(3)]
            async with working(app, settings):
                await until(lambda: len(filing.filed) == 3)
        with (
            NatsConnection.open(Endpoint.of(settings)) as east,
            NatsConnection.open(Endpoint((regions.west.url,))) as west,
        ):
            names = [str(config["name"]) for config in mirrored_configs(app.name, 1)]
            await until(lambda: [west.ask(stream_info(name)).last for name in names] == [
                east.ask(stream_info(name)).last for name in names
            ])  # fmt: skip
        new_settings = replace(settings.for_reads(), database=settings.database)
        if not is_alive:
            regions.east.kill()
            del places[:2]
        for number, failpoint in enumerate(places):
            rest = places[number:].count(failpoint) and places[: number + 1].count(failpoint)

            def reach(name: str, failpoint_name: str = f"promote.{failpoint}", remaining: list[int] = [rest]) -> None:  # noqa: B006
                remaining[0] -= name == failpoint_name
                if name == failpoint_name and not remaining[0]:
                    raise Interrupted

            with monkeypatch.context() as patch:
                patch.setattr(failpoints, "reach", reach)
                with pytest.raises(Interrupted):
                    await asyncio.to_thread(promotion.promote, app, settings, log_is_gone=True)
        if is_alive:
            promoted = await asyncio.to_thread(promotion.promote, app, settings)
            assert (promoted.end, promoted.sealed, promoted.beyond) == (3, True, ())
        async with app.connect(new_settings) as jet:  # the worker adopts a cursor that the promotion has not moved
            await jet.init()
            async with working(app, new_settings):
                bodies.append(await filing.file(jet, 3))
                await until(lambda: len(filing.filed) == 4)
            assert sorted(filing.filed) == [1, 2, 3, 4]
            read = [await jet.blobs.read(event.data.scan, max_bytes=1 << 20) async for event in jet.tail()]
            assert read == bodies


async def test_a_damaged_cursor_is_named_and_the_promotion_goes_on(settings: Settings) -> None:
    filing = Filing()
    app = App(APP, aggregates=[Document], reactors=list(filing.app.reactors.values()))
    async with app.connect(settings) as jet:
        await jet.init()
        with NatsConnection.open(Endpoint.of(settings)) as east:
            east.request(f"$KV.{cursor_bucket(APP)}.c.harmed", b'{"x": 1}')
        await filing.file(jet, 1)
        await asyncio.to_thread(mirrors.create, APP, settings, 1)
    promoted = await asyncio.to_thread(promotion.promote, app, settings)
    assert promoted.moved == 1
    assert any("'harmed'" in reason for reason in promoted.unknown)
