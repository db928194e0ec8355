"""A mirror of the log in another JetStream: made, compared, read from, and promoted when the log is gone."""

from __future__ import annotations

import asyncio
import io
import json
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
from tests.integration.reacting import Bell, Town, app_of, until, working
from tests.two_regions import Regions, crossing, stored, two_regions

APP = bank.name
PATIENT_S = 120.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Regions]:
    with two_regions(tmp_path_factory.mktemp("regions"), APP) as regions:
        yield regions


@pytest.fixture
def settings(running: Regions, tmp_path: Path) -> Settings:
    """Both regions, empty."""
    for server in (running.west, running.east):
        with NatsConnection.open(Endpoint((server.url,))) as link:
            for name in link.api("STREAM.NAMES").get("streams") or ():
                link.api(f"STREAM.DELETE.{name}")
    return running.settings(tmp_path)


async def reached(settings: Settings, position: int) -> None:
    """Return once the mirror has a position."""
    async with asyncio.timeout(PATIENT_S):
        while mirrors.status(APP, settings).last < position:
            await asyncio.sleep(0.05)


async def deposited(jet: Jet, count: int, account: str = "a-1") -> int:
    accounts = jet.repository(Account)
    done = await accounts.execute(account, Account.open, "ada")
    for _ in range(count):
        done = await accounts.execute(account, Account.deposit, Decimal(1))
    return done.position


async def mirrored(settings: Settings, count: int = 10) -> int:
    """A log with some events, and its mirror; returns the last position."""
    async with bank.connect(settings) as jet:
        await jet.init()
        last = await deposited(jet, count)
    await asyncio.to_thread(mirrors.create, APP, settings, 1)
    await reached(settings, last)
    create_tables(Database(settings.database).sync_engine(), bank.projections.values())
    return last


async def test_a_mirror_is_made_and_has_the_log_and_its_identity(settings: Settings) -> None:
    last = await mirrored(settings)
    status = await asyncio.to_thread(mirrors.status, APP, settings)
    assert (status.last, status.lag, status.lag_s, status.fault, status.unreachable) == (last, 0, 0.0, None, None)
    assert status.log == status.mirror
    assert await asyncio.to_thread(mirrors.create, APP, settings, 1) == []


async def test_workers_and_tail_read_from_the_mirror(settings: Settings) -> None:
    await mirrored(settings)
    async with AsyncExitStack() as stack:
        jet = await stack.enter_async_context(bank.connect(settings))
        await stack.enter_async_context(working(bank, settings))
        last = await deposited(jet, 5)
        await jet.caught_up(balances, position=last, timeout_s=PATIENT_S)
        with NatsConnection.open(Endpoint.of(settings.for_reads())) as west:
            assert f"{balances.name}-r1" in west.api(f"CONSUMER.NAMES.{APP}")["consumers"]
        with NatsConnection.open(Endpoint.of(settings)) as east:
            assert not east.api(f"CONSUMER.NAMES.{APP}").get("consumers")
        assert [event.position async for event in jet.tail()] == list(range(1, last + 1))


async def test_a_rebuild_and_a_verification_read_from_the_mirror(settings: Settings) -> None:
    last = await mirrored(settings)
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
    """Let the mirror get nothing more: its origin is a stream that does not exist."""
    with NatsConnection.open(Endpoint.of(settings.for_reads())) as link:
        state = link.ask(stream_info(APP))
        link.api(f"STREAM.DELETE.{APP}")
        copy = {**state.config, "mirror": {"name": "nothing", "external": {"api": "$JS.east.API", "deliver": ""}}}
        link.api(f"STREAM.CREATE.{APP}", copy)


async def test_workers_wait_in_words_for_a_mirror_that_hears_nothing(settings: Settings) -> None:
    await mirrored(settings)
    await cut_off(settings)
    status = await asyncio.to_thread(mirrors.status, APP, settings)
    assert status.lag == 11
    assert (status.lag_s or 0) > 0
    assert "has heard nothing yet from the log, and is 11 positions behind it" in (status.fault or "")
    async with bank.connect(settings) as jet, working(bank, settings):
        # The worker says it in its own words once it has looked.
        said = "mirror that workers read ends at position 0, and the log at 11|nothing yet from the log, and is 11"
        with pytest.raises(NotCaughtUp, match=said):
            await jet.caught_up(balances, position=11, timeout_s=1.0)


async def test_a_mirror_of_another_log_is_neither_read_nor_made_again(settings: Settings) -> None:
    await mirrored(settings)
    with NatsConnection.open(Endpoint.of(settings)) as east:
        east.api(f"STREAM.DELETE.{APP}")
    async with bank.connect(settings) as jet:
        await jet.init()
        for number in range(12):
            await deposited(jet, 1, f"b-{number}")
        with pytest.raises(LogUnusable, match=r"it is of the log .*, and the log is .*mirror create` makes a mirror"):
            _ = [event async for event in jet.tail()]
    with pytest.raises(LogUnusable, match="it is of the log"):
        await rebuild(bank, ["balances"], settings, engine="local")
    with pytest.raises(LogUnusable, match="it is of the log"):
        await asyncio.to_thread(mirrors.create, APP, settings, 1)
    status = await asyncio.to_thread(mirrors.status, APP, settings)
    assert "it is of the log" in (status.fault or "")


async def test_a_mirror_without_its_first_events_is_not_read(settings: Settings) -> None:
    last = await mirrored(settings)
    with NatsConnection.open(Endpoint.of(settings.for_reads())) as link:
        state = link.ask(stream_info(APP))
        link.api(f"STREAM.DELETE.{APP}")
        link.api(f"STREAM.CREATE.{APP}", {**state.config, "mirror": {**state.config["mirror"], "opt_start_seq": 5}})
    await reached(settings, last)
    async with bank.connect(settings) as jet:
        with pytest.raises(LogUnusable, match="positions 1 to 4 from its beginning are gone"):
            _ = [event async for event in jet.tail()]


async def test_a_mirror_is_refused_where_it_could_not_be_one(settings: Settings, running: Regions) -> None:
    async with bank.connect(settings) as jet:
        await jet.init()
    with pytest.raises(UsageError, match="EVENTJET_READ_FROM is not set"):
        await asyncio.to_thread(mirrors.create, APP, replace(settings, read_from=None), 1)
    same = replace(settings, read_from=(running.east.url,))
    with pytest.raises(UsageError, match="would be in the JetStream domain 'east', which has the log"):
        await asyncio.to_thread(mirrors.create, APP, same, 1)
    west_api(settings, f"STREAM.CREATE.{APP}", {**stream_config(APP, 1)})
    with pytest.raises(LogUnusable, match="it is no mirror"):
        await asyncio.to_thread(mirrors.create, APP, settings, 1)


async def test_a_mirror_is_named_by_its_domain_too(settings: Settings) -> None:
    last = await mirrored(settings)
    by_domain = replace(settings, read_from=("west",))
    status = await asyncio.to_thread(mirrors.status, APP, by_domain)
    assert (status.last, status.fault, status.crosses) == (last, None, None)
    plan = await asyncio.to_thread(promotion.preview, bank, by_domain)
    assert any("the old servers would store what is recorded" in reason for reason in plan.unknown)
    async with bank.connect(by_domain) as jet:
        assert [event.position async for event in jet.tail()] == list(range(1, last + 1))


async def test_a_worker_that_is_ahead_of_its_mirror_waits_for_it(settings: Settings) -> None:
    await mirrored(settings)
    async with bank.connect(settings) as jet, working(bank, settings.for_log()):
        await jet.caught_up(balances, position=11, timeout_s=PATIENT_S)
    await cut_off(settings)
    async with bank.connect(settings) as jet, working(bank, settings):
        last = await deposited(jet, 1, "b-2")
        with pytest.raises(NotCaughtUp, match=r"it has reached position 0, and balances position 11\. This goes"):
            await jet.caught_up(balances, position=last, timeout_s=3.0)


async def test_a_lake_that_is_ahead_of_the_mirror_is_not_told_of_a_lost_log(settings: Settings, tmp_path: Path) -> None:
    last = await mirrored(settings)
    url = str(tmp_path / "lake")
    assert (await lake.sync(bank, url, settings)).position == last
    await cut_off(settings)
    with pytest.raises(LakeRefused, match="in the mirror that EVENTJET_READ_FROM names") as refused:
        await lake.sync(bank, url, settings)
    assert "eventjet mirror status" in str(refused.value)
    assert (await lake.sync(bank, url, settings.for_log())).events == 0


async def exchanged(settings: Settings, kept: int, to: int) -> None:
    """Let the log lose its events after a position, keep its identity, and grow again with others."""
    with NatsConnection.open(Endpoint.of(settings)) as east:
        state = east.ask(stream_info(APP))
        records = [east.ask(message_at(APP, position)) for position in range(1, kept + 1)]
        east.api(f"STREAM.DELETE.{APP}")
        east.api(f"STREAM.CREATE.{APP}", {**state.config, "metadata": state.metadata})
        for record in records:
            assert record is not None
            east.request(record[2].decode(), record[4], headers=record[3])
    async with bank.connect(settings.for_log()) as jet:
        for number in range(to - kept):
            await jet.repository(Account).execute(f"c-{number}", Account.open, "eve")


async def test_a_mirror_with_events_that_the_log_exchanged_is_not_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = await mirrored(settings)
    async with bank.connect(settings) as jet, working(bank, settings):
        await jet.caught_up(balances, position=last, timeout_s=PATIENT_S)
    await exchanged(settings, 6, last)
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
            with pytest.raises(NotCaughtUp, match=f"at position {last} it has the event"):
                await jet.caught_up(balances, position=last + 1, timeout_s=5.0)


def test_events_that_were_exchanged_are_noticed_until_as_many_came_after_them() -> None:
    state = StreamState(APP, first=1, last=20, messages=20, deleted=0, bytes=0, subjects=1, metadata={}, config={})
    assert compared_positions(state) == [20, 19, 17, 13, 5]
    assert compared_positions(replace(state, first=14, messages=7)) == [20, 19, 17]


async def test_a_worker_sees_that_the_mirror_was_promoted_though_the_log_is_silent(settings: Settings) -> None:
    last = await mirrored(settings)
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


def killed(running: Regions, settings: Settings) -> Settings:
    """The first region is gone; returns the settings of an application that goes on in the second."""
    running.east.kill()
    return replace(settings.for_reads(), database=settings.database)


async def recorded(settings: Settings) -> int:
    """Record one event more; returns its position."""
    async with bank.connect(settings) as jet:
        return (await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))).position


async def test_a_mirror_is_never_taken_for_the_log(settings: Settings, running: Regions) -> None:
    last = await mirrored(settings)
    gone = "nats://127.0.0.1:9"
    for servers in ((running.west.url,), (gone, running.west.url)):
        confused = replace(settings, servers=servers)
        for act in (
            lambda: promotion.preview(bank, confused),  # noqa: B023
            lambda: promotion.promote(bank, confused, log_is_gone=True),  # noqa: B023
            lambda: mirrors.status(APP, confused),  # noqa: B023
            lambda: mirrors.create(APP, confused, 1, "$JS.east.API"),  # noqa: B023
        ):
            with pytest.raises(UsageError, match="lead to the stream 'bank' that EVENTJET_READ_FROM names"):
                await asyncio.to_thread(act)
    assert not west_api(settings, f"STREAM.INFO.{APP}")["config"]["sealed"]  # type: ignore[index]
    promoted = await asyncio.to_thread(promotion.promote, bank, settings)
    with pytest.raises(UsageError, match="not to the log that it is a mirror of"):
        await asyncio.to_thread(promotion.promote, bank, replace(settings, servers=(running.west.url,)))
    assert promoted.end == last
    assert await recorded(settings.for_reads()) == last + 1


async def test_a_log_that_its_mirror_hears_is_not_promoted_away(settings: Settings) -> None:
    last = await mirrored(settings)
    unreached = replace(settings, servers=("nats://127.0.0.1:9",))
    plan = await asyncio.to_thread(promotion.preview, bank, unreached)
    assert any("The mirror heard from it" in reason for reason in plan.unknown)
    with pytest.raises(UsageError, match=r"heard from it .* s ago: it is alive"):
        await asyncio.to_thread(promotion.promote, bank, unreached)
    assert "mirror" in west_api(settings, f"STREAM.INFO.{APP}")
    assert (await asyncio.to_thread(promotion.promote, bank, unreached, log_is_gone=True)).end == last


async def test_nothing_is_sealed_for_a_mirror_that_is_cut_off(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = await mirrored(settings)
    await cut_off(settings)
    monkeypatch.setattr(promotion, "CATCH_UP_S", 1.0)
    with pytest.raises(LogUnusable, match=r"heard nothing yet.*reached position 0 of 11.*Nothing was changed"):
        await asyncio.to_thread(promotion.promote, bank, settings)
    assert await recorded(settings.for_log()) == last + 1


async def test_cursors_and_large_bodies_without_a_mirror_are_named_and_get_one(settings: Settings) -> None:
    last = await mirrored(settings)
    objects = f"OBJ_{object_bucket(APP)}"
    with NatsConnection.open(Endpoint.of(settings)) as east:
        east.api(f"STREAM.CREATE.{objects}", objects_config(APP, 1))
        east.request(f"$O.{object_bucket(APP)}.C.one", b"x" * 100)
    status = await asyncio.to_thread(mirrors.status, APP, settings)
    assert f"the log has '{objects}', of which there is no mirror" in (status.fault or "")
    with pytest.raises(LogUnusable, match=f"the log has '{objects}'.*mirror create"):
        await asyncio.to_thread(promotion.promote, bank, settings)
    assert await recorded(settings.for_log()) == last + 1
    assert await asyncio.to_thread(mirrors.create, APP, settings, 1) == [objects]
    assert (await asyncio.to_thread(mirrors.status, APP, settings)).fault is None
    assert (await asyncio.to_thread(promotion.promote, bank, settings)).end == last + 1
    stored = west_api(settings, f"STREAM.INFO.{objects}")
    assert (stored["state"]["last_seq"], "mirror" in stored) == (1, False)  # type: ignore[index]


@pytest.mark.slow
async def test_a_promoted_mirror_is_the_log_and_checkpoints_and_tokens_go_on(tmp_path: Path) -> None:
    with two_regions(tmp_path, APP) as running:
        settings = running.settings(tmp_path)
        await mirrored(settings)
        async with bank.connect(settings) as jet, working(bank, settings):
            done = await jet.repository(Account).execute("a-1", Account.deposit, Decimal(5))
            await jet.caught_up(balances, token=done.token, timeout_s=PATIENT_S)
        await reached(settings, done.position)
        after = killed(running, settings)
        plan = await asyncio.to_thread(promotion.preview, bank, settings)
        assert (plan.end, plan.new, plan.beyond, plan.log_last) == (done.position, "", (), None)
        assert "the old log is not reached" in plan.unknown[0]
        assert "refused the connection" in plan.unknown[1]
        assert "eventjet dev" not in plan.unknown[1]
        promoted = await asyncio.to_thread(promotion.promote, bank, settings)
        assert (promoted.end, promoted.old, promoted.moved) == (done.position, plan.old, 2)
        again = await asyncio.to_thread(promotion.promote, bank, settings)
        assert (again.new, again.end, again.moved) == (promoted.new, promoted.end, 0)
        async with bank.connect(after) as jet, working(bank, after):
            topology = await jet.init()
            assert (topology.identity, topology.drifts) == (promoted.new, ())
            await jet.caught_up(balances, token=done.token, timeout_s=PATIENT_S)
            account = await jet.repository(Account).load("a-1")
            assert account.balance == 15
            more = await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))
            assert more.position == done.position + 1
            await jet.caught_up(balances, token=more.token, timeout_s=PATIENT_S)
            assert (await verify(bank, "balances", after, engine="local")).differences == 0
        running.east.start()
        fenced = await asyncio.to_thread(promotion.promote, bank, settings)
        assert (fenced.sealed, fenced.log_last, fenced.beyond) == (True, done.position, ())
        async with bank.connect(settings.for_log()) as jet:
            with pytest.raises(Refused, match="sealed"):
                await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))


@pytest.mark.slow
async def test_what_the_mirror_lacks_is_named_and_refused(tmp_path: Path) -> None:
    with two_regions(tmp_path, APP) as running:
        settings = running.settings(tmp_path)
        last = await mirrored(settings)
        running.west.kill()
        async with bank.connect(settings) as jet, working(bank, settings.for_log()):
            lost = await jet.repository(Account).execute("a-1", Account.deposit, Decimal(5))
            await jet.caught_up(balances, token=lost.token, timeout_s=PATIENT_S)
        after = killed(running, settings)
        running.west.start()
        promoted = await asyncio.to_thread(promotion.promote, bank, settings, log_is_gone=True)
        assert promoted.end == last
        named = {(each.what, each.position) for each in promoted.beyond}
        assert named >= {("the read model 'balances', revision 1", lost.position)}
        assert promoted.known_last == lost.position
        async with bank.connect(after) as jet:
            more = await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))
            assert more.position == lost.position
            async with working(bank, after):
                with pytest.raises(NotCaughtUp, match=promoted.old):
                    await jet.caught_up(balances, position=more.position, timeout_s=PATIENT_S)
        await rebuild(bank, ["balances"], after, engine="local")
        assert (await verify(bank, "balances", after, engine="local")).differences == 0
        async with bank.connect(after) as jet:
            with pytest.raises(NotCaughtUp, match=f"and the position is of the log {promoted.old}"):
                await jet.caught_up(balances, token=lost.token, timeout_s=PATIENT_S)
        running.east.start()
        fenced = await asyncio.to_thread(promotion.promote, bank, settings)
        assert ("the old log", lost.position) in [(each.what, each.position) for each in fenced.beyond]


@pytest.mark.slow
async def test_a_log_that_answers_is_sealed_and_moves_without_a_loss(tmp_path: Path) -> None:
    with two_regions(tmp_path, APP) as running:
        settings = running.settings(tmp_path)
        await mirrored(settings)
        async with bank.connect(settings) as jet:
            last = await deposited(jet, 20, "b-1")
            promoted = await asyncio.to_thread(promotion.promote, bank, settings)
            assert (promoted.end, promoted.sealed, promoted.beyond) == (last, True, ())
            with pytest.raises(Refused, match="sealed"):
                await jet.repository(Account).execute("b-1", Account.deposit, Decimal(1))
        async with bank.connect(settings.for_reads()) as jet:
            done = await jet.repository(Account).execute("b-1", Account.deposit, Decimal(1))
            assert done.position == last + 1


@pytest.mark.slow
async def test_workers_of_a_log_that_moved_leave_the_read_models_to_those_of_the_new_log(tmp_path: Path) -> None:
    with two_regions(tmp_path, APP) as running:
        settings = running.settings(tmp_path)
        last = await mirrored(settings)
        # These read the log itself, which goes on answering.
        async with bank.connect(settings) as jet, working(bank, replace(settings, read_from=None)):
            await jet.caught_up("balances", position=last, timeout_s=PATIENT_S)
            await asyncio.to_thread(promotion.promote, bank, settings)
            after = replace(settings.for_reads(), database=settings.database)
            async with bank.connect(after) as moved, working(bank, after):
                done = await moved.repository(Account).execute("new", Account.open, "new")
                await moved.caught_up("balances", token=done.token, timeout_s=PATIENT_S)


@pytest.mark.slow
def test_the_commands_say_what_they_see_and_ask_before_they_promote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with two_regions(tmp_path, APP) as running:
        settings = running.settings(tmp_path)
        environ = {"APP": "eventjet.examples.bank.app:bank", "SERVERS": running.east.url, "DATABASE": settings.database}
        for name, value in environ.items():
            monkeypatch.setenv(f"EVENTJET_{name}", value)
        assert main(["init"]) == 0
        assert main(["mirror", "status"]) == 2
        assert "EVENTJET_READ_FROM is not set" in capsys.readouterr().err
        monkeypatch.setenv("EVENTJET_READ_FROM", running.west.url)
        assert main(["mirror", "status"]) == 1
        assert "`eventjet mirror create` makes it" in capsys.readouterr().out
        assert main(["mirror", "create", "--origin-api", "$JS.east.API"]) == 0
        assert "created  mirror bank" in capsys.readouterr().out
        assert main(["mirror", "status", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["stream"], told["lag"], told["crosses"], told["fault"]) == ("bank", 0, False, None)
        assert main(["doctor"]) == 0
        assert "events are read at" in capsys.readouterr().out
        assert main(["mirror", "promote", "--dry-run"]) == 0
        assert "will be sealed, for good" in capsys.readouterr().out
        monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
        monkeypatch.setenv("EVENTJET_READ_FROM", running.west.url.replace("//", "//ada:s3cret@"))
        assert main(["mirror", "promote"]) == 1
        asked = capsys.readouterr().err
        assert "Nothing was changed." in asked
        assert "s3cret" not in asked
        monkeypatch.setenv("EVENTJET_SERVERS", running.west.url.replace("//", "//ada:s3cret@"))
        assert main(["mirror", "create", "--origin-api", "$JS.east.API"]) == 2
        mistaken = capsys.readouterr().err
        assert running.west.url in mistaken
        assert "s3cret" not in mistaken
        monkeypatch.setenv("EVENTJET_SERVERS", running.east.url)
        assert main(["mirror", "promote", "--yes", "--log-is-gone"]) == 0
        said = capsys.readouterr().out
        assert "promoted bank is the log" in said
        assert "Name these servers in EVENTJET_SERVERS" in said
        assert main(["doctor"]) == 1
        assert "it may be a mirror that was" in capsys.readouterr().out


async def test_where_what_is_stored_crosses_the_link_nothing_is_promoted(tmp_path: Path) -> None:
    with two_regions(tmp_path, APP, deny=()) as running:
        settings = running.settings(tmp_path)
        last = await mirrored(settings)
        # Between two domains the server itself lets no key of a bucket cross.
        crosses = {subject for subject in stored(APP) if not subject.startswith("$KV.")}
        assert await asyncio.to_thread(crossing, running.east.url, running.west.url, APP) == crosses
        assert (await asyncio.to_thread(mirrors.status, APP, settings)).crosses
        for act in (promotion.preview, promotion.promote):
            with pytest.raises(LogUnusable, match=r"both would store it.*Deny bank\.>.*Nothing was changed"):
                await asyncio.to_thread(act, bank, settings)
        assert await recorded(settings.for_log()) == last + 1


def test_what_an_app_stores_does_not_cross_the_link_that_denies_it(running: Regions) -> None:
    assert crossing(running.east.url, running.west.url, APP) == set()


@pytest.mark.slow
async def test_a_reactors_cursor_goes_on_in_the_promoted_log(tmp_path: Path) -> None:
    town = Town()
    app = app_of(town, name="town")
    with two_regions(tmp_path, app.name) as running:
        settings = running.settings(tmp_path)
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
            NatsConnection.open(Endpoint((running.west.url,))) as west,
        ):
            streams = ("KV_town_cursors", "town")
            await until(lambda: [west.ask(stream_info(name)).last for name in streams] == [
                east.ask(stream_info(name)).last for name in streams
            ])  # fmt: skip
        after = killed(running, settings)
        promoted = await asyncio.to_thread(promotion.promote, app, settings, log_is_gone=True)
        assert (promoted.end, promoted.moved, promoted.beyond) == (last, 1, ())
        async with app.connect(after) as jet:
            assert (await jet.init()).cursors == ()
            async with working(app, after):
                await jet.repository(Bell).execute("one", Bell.ring, 5)
                await until(lambda: town.order("one") == list(range(6)))


class Filing:
    """An app with a reactor and with events that refer to large bodies; it is where a promotion is interrupted."""

    def __init__(self, name: str = "papers") -> None:
        self.filed: list[int] = []
        seen = self.filed

        @reactor("filing", start="beginning")
        async def filing(event: Recorded[Filed], to: Reaction[object]) -> None:
            seen.append(event.position)

        self.app = App(name, aggregates=[Document], reactors=[filing])

    async def file(self, jet: Jet, number: int) -> bytes:
        """File a document with a body of its own, and return that."""
        body = f"document {number} ".encode() * 40_000
        blob = await jet.blobs.put(body, media_type="text/plain", name="scan")
        await jet.repository(Document).execute(f"d-{number}", Document.file, blob)
        return body


class Interrupted(Exception):
    """A promotion that ends at a failpoint."""


@pytest.mark.slow
@pytest.mark.parametrize("is_alive", [True, False])
async def test_a_promotion_that_was_interrupted_anywhere_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    filing = Filing()
    app = filing.app
    places = ["ready", "sealed", "stream", "stream", "stream", "promoted", "checkpoints"]
    with two_regions(tmp_path, app.name) as running:
        settings = running.settings(tmp_path)
        async with app.connect(settings) as jet:
            await jet.init()
            assert len(await asyncio.to_thread(mirrors.create, app.name, settings, 1)) == 3
            bodies = [await filing.file(jet, number) for number in range(3)]
            async with working(app, settings):
                await until(lambda: len(filing.filed) == 3)
        with (
            NatsConnection.open(Endpoint.of(settings)) as east,
            NatsConnection.open(Endpoint((running.west.url,))) as west,
        ):
            names = [str(each["name"]) for each in mirrored_configs(app.name, 1)]
            await until(lambda: [west.ask(stream_info(name)).last for name in names] == [
                east.ask(stream_info(name)).last for name in names
            ])  # fmt: skip
        after = replace(settings.for_reads(), database=settings.database)
        if not is_alive:
            running.east.kill()
            del places[:2]
        for number, place in enumerate(places):
            rest = places[number:].count(place) and places[: number + 1].count(place)

            def reach(name: str, wanted: str = f"promote.{place}", left: list[int] = [rest]) -> None:  # noqa: B006
                left[0] -= name == wanted
                if name == wanted and not left[0]:
                    raise Interrupted

            with monkeypatch.context() as patch:
                patch.setattr(failpoints, "reach", reach)
                with pytest.raises(Interrupted):
                    await asyncio.to_thread(promotion.promote, app, settings, log_is_gone=True)
        if is_alive:
            promoted = await asyncio.to_thread(promotion.promote, app, settings)
            assert (promoted.end, promoted.sealed, promoted.beyond) == (3, True, ())
        async with app.connect(after) as jet:  # the worker adopts a cursor that the promotion has not moved
            await jet.init()
            async with working(app, after):
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
