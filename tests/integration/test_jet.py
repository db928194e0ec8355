"""An application's connection to a real server, end to end, without read models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from eventjet import App, Imported, Jet, Metadata, Refused, with_metadata
from eventjet.codec.headers import RawRecord
from eventjet.codec.subjects import snapshot_bucket
from eventjet.dev.nats import NatsServer
from eventjet.errors import ApiRefused, Unreachable, UsageError
from eventjet.examples.bank.account import Account, Deposited, InsufficientFunds, Opened, Withdrawn
from eventjet.examples.bank.app import withdrawn_has_a_reason
from tests.logs import fresh_name


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])


@pytest.fixture
async def jet(app: App, eventjet_nats: NatsServer) -> AsyncIterator[Jet]:
    async with app.connect(servers=eventjet_nats.url) as jet:
        await jet.init()
        yield jet


async def test_init_is_idempotent_and_reports_drift_instead_of_overwriting(jet: Jet) -> None:
    again = await jet.init()
    assert (again.created, again.drifts) == ((), ())
    client = jet.client
    assert client is not None
    before = await client.api(f"STREAM.INFO.{jet.name}")
    changed = {**before["config"], "duplicate_window": 60_000_000_000, "max_msgs": 1_000_000}
    await client.api(f"STREAM.UPDATE.{jet.name}", changed)
    drifted = await jet.init()
    assert {drift.setting for drift in drifted.drifts} == {"duplicate_window", "max_msgs"}
    assert drifted.identity == again.identity
    after = await client.api(f"STREAM.INFO.{jet.name}")
    assert after["config"]["max_msgs"] == 1_000_000


async def test_the_log_cannot_be_purged_and_its_events_not_deleted(jet: Jet) -> None:
    client = jet.client
    assert client is not None
    await jet.repository(Account).execute("a", Account.open, "ada")
    for subject, body in ((f"STREAM.PURGE.{jet.name}", {}), (f"STREAM.MSG.DELETE.{jet.name}", {"seq": 1})):
        with pytest.raises(ApiRefused, match=r"not permitted|purge|delete"):
            await client.api(subject, body)
    assert (await jet.log()).last == 1


async def test_a_missing_stream_is_reported_with_the_command_that_makes_it(app: App, eventjet_nats: NatsServer) -> None:
    async with app.connect(servers=eventjet_nats.url) as jet:
        with pytest.raises(Unreachable, match="eventjet init"):
            await jet.log()


async def test_a_transaction_moves_money_or_does_nothing(jet: Jet) -> None:
    accounts = jet.repository(Account)
    for name in ("from", "to"):
        await accounts.execute(name, Account.open, name)
    await accounts.execute("from", Account.deposit, Decimal(10))
    sent, received = await jet.transact(
        accounts.decide("from", Account.withdraw, Decimal(4), reason="transfer"),
        accounts.decide("to", Account.deposit, Decimal(4)),
    )
    assert (sent.state.balance, received.state.balance) == (Decimal(6), Decimal(4))
    assert (sent.position, received.position) == (4, 5)
    before = await jet.log()
    with pytest.raises(InsufficientFunds):
        await jet.transact(
            accounts.decide("to", Account.deposit, Decimal(40)), accounts.decide("from", Account.withdraw, Decimal(40))
        )
    with pytest.raises(Refused, match="records nothing"):
        await jet.transact(
            accounts.decide("to", Account.deposit, Decimal(1)), accounts.decide("from", Account.open, "x")
        )
    with pytest.raises(Refused, match="one aggregate twice"):
        await jet.transact(
            accounts.decide("to", Account.deposit, Decimal(1)), accounts.decide("to", Account.deposit, Decimal(1))
        )
    assert await jet.log() == before
    assert (await accounts.load("from")).balance == Decimal(6)


async def test_racing_transactions_lose_no_money(app: App, jet: Jet, eventjet_nats: NatsServer) -> None:
    names = [f"r{number}" for number in range(4)]
    accounts = jet.repository(Account)
    for name in names:
        await accounts.execute(name, Account.open, name)
        await accounts.execute(name, Account.deposit, Decimal(100))

    async def move(connection: Jet, number: int) -> None:
        transfers = connection.repository(Account)
        source, target = names[number % 4], names[(number * 3 + 1) % 4]
        if source != target:
            await connection.transact(
                transfers.decide(source, Account.withdraw, Decimal(1)),
                transfers.decide(target, Account.deposit, Decimal(1)),
            )

    async with app.connect(servers=eventjet_nats.url) as other:
        await asyncio.gather(*(move(connection, number) for number in range(12) for connection in (jet, other)))
    balances = [(await accounts.load(name)).balance for name in names]
    assert sum(balances) == Decimal(400)


async def test_an_import_is_resumed_without_lost_or_duplicate_events(jet: Jet) -> None:
    def events(count: int) -> list[Imported]:
        opened = [Imported(Account, f"i-{number}", Opened(owner="x")) for number in range(50)]
        return opened + [
            Imported(Account, f"i-{number % 50}", Deposited(amount=Decimal(1))) for number in range(count - 50)
        ]

    counts: list[int] = []
    first = await jet.append_many(events(1_500), source="old-bank", progress=counts.append)
    assert (first.stored, first.skipped, first.position) == (1_500, 0, 1_500)
    assert counts[-1] == 1_500
    again = await jet.append_many(events(2_500), source="old-bank")
    assert (again.stored, again.skipped) == (1_000, 1_500)
    assert (await jet.append_many(events(2_500), source="old-bank")).stored == 0
    accounts = jet.repository(Account)
    total = sum([(await accounts.load(f"i-{number}")).balance for number in range(50)])
    assert total == Decimal(2_450)
    assert (await jet.log()).last == 2_500


async def test_an_import_runs_beside_live_commands(jet: Jet) -> None:
    accounts = jet.repository(Account)
    await accounts.execute("live", Account.open, "ada")
    stop = asyncio.Event()

    async def deposits() -> int:
        count = 0
        while not stop.is_set():
            await accounts.execute("live", Account.deposit, Decimal(1))
            count += 1
            await asyncio.sleep(0.003)  # customers pause; without pauses the import would lose every race
        return count

    depositing = asyncio.ensure_future(deposits())
    events = [Imported(Account, "live", Deposited(amount=Decimal(1))) for _ in range(200)]
    for start in range(0, 200, 20):
        await jet.append_many(events[: start + 20], source="beside")
    stop.set()
    count = await depositing
    assert (await accounts.load("live")).balance == Decimal(200 + count)


async def test_the_log_is_read_from_a_position_or_time(jet: Jet) -> None:
    accounts = jet.repository(Account)
    await accounts.execute("a", Account.open, "ada")
    await asyncio.sleep(0.01)
    between = datetime.now(UTC)
    await asyncio.sleep(0.01)
    await accounts.execute("a", Account.deposit, Decimal(1))
    await accounts.execute("a", Account.withdraw, Decimal(1))
    assert [event.position async for event in jet.tail()] == [1, 2, 3]
    assert [event.position async for event in jet.tail("last")] == [3]
    assert [event.position async for event in jet.tail("new")] == []
    assert [event.position async for event in jet.tail(position=2)] == [2, 3]
    assert [event.position async for event in jet.tail(since=between)] == [2, 3]
    assert [event.position async for event in jet.tail(since=datetime.now(UTC) + timedelta(hours=1))] == []
    (last,) = [event async for event in jet.tail("last")]
    assert (last.data, last.version, last.aggregate) == (Withdrawn(amount=Decimal(1)), 3, "account")


@pytest.mark.parametrize("position", [2**63 - 1, 2**64, 10**30])
async def test_a_log_has_nothing_at_a_position_beyond_all_numbers_of_the_server(jet: Jet, position: int) -> None:
    await jet.repository(Account).execute("a", Account.open, "ada")
    assert [event async for event in jet.tail(position=position)] == []
    assert len([event async for event in jet.tail(until=position)]) == 1
    assert await jet.store.at(position) is None
    assert await jet.store.records_from(position, 10) == []


async def test_metadata_is_stored_with_the_events(jet: Jet) -> None:
    accounts = jet.repository(Account)
    with with_metadata(Metadata(correlation="conv 1", extra={"channel": "web"})):
        command = accounts.command("c-1", metadata=Metadata(actor="ada ♥", causation="x"))
        await command.execute("m", Account.open, "ada")
    await accounts.execute("m", Account.deposit, Decimal(1))
    first, second = await accounts.history("m")
    assert first.command_id == "c-1"
    assert first.metadata == Metadata(correlation="conv 1", causation="x", actor="ada ♥", extra={"channel": "web"})
    assert (second.command_id, second.metadata) == (None, Metadata())


async def test_a_repeated_command_is_executed_once(app: App, jet: Jet, eventjet_nats: NatsServer) -> None:
    accounts = jet.repository(Account)
    await accounts.execute("c", Account.open, "ada")
    first = await accounts.command("c-17").execute("c", Account.deposit, Decimal(5))
    await accounts.execute("c", Account.deposit, Decimal(7))
    again = await accounts.command("c-17").execute("c", Account.deposit, Decimal(5))
    assert again == first
    assert again.state.balance == Decimal(5)
    async with app.connect(servers=eventjet_nats.url) as other:
        elsewhere = await other.repository(Account).command("c-17").execute("c", Account.deposit, Decimal(5))
    assert elsewhere == first
    assert (await accounts.load("c")).balance == Decimal(12)


async def test_a_command_that_is_sent_concurrently_is_executed_once(
    app: App, jet: Jet, eventjet_nats: NatsServer
) -> None:
    await jet.repository(Account).execute("twice", Account.open, "ada")
    async with app.connect(servers=eventjet_nats.url) as other:
        outcomes = await asyncio.gather(
            *(
                there.repository(Account).command("c").execute("twice", Account.deposit, Decimal(5))
                for there in (jet, other) * 3
            )
        )
    assert len({outcome.position for outcome in outcomes}) == 1
    assert (await jet.repository(Account).load("twice")).balance == Decimal(5)


async def test_a_repeated_command_is_recognised_after_a_snapshot(app: App, jet: Jet, eventjet_nats: NatsServer) -> None:
    accounts = jet.repository(Account)
    await accounts.execute("s", Account.open, "ada")
    first = await accounts.command("early").execute("s", Account.deposit, Decimal(3))
    for _ in range(120):
        await accounts.execute("s", Account.deposit, Decimal(1))
    async with app.connect(servers=eventjet_nats.url) as other:
        there = other.repository(Account)
        again = await there.command("early").execute("s", Account.deposit, Decimal(3))
        assert again == first
        assert (await there.load("s")).balance == Decimal(123)


async def test_a_snapshot_shortens_replay_and_an_invalid_snapshot_is_ignored(
    app: App, jet: Jet, eventjet_nats: NatsServer
) -> None:
    accounts = jet.repository(Account)
    await accounts.execute("k", Account.open, "ada")
    await jet.append_many([Imported(Account, "k", Deposited(amount=Decimal(1))) for _ in range(250)], source="x")
    for _ in range(150):
        await accounts.execute("k", Account.deposit, Decimal(1))
    keeper = jet._repositories._snapshots  # pyright: ignore[reportPrivateUsage]
    assert keeper is not None
    async with asyncio.timeout(30):
        while not keeper.written:
            await asyncio.sleep(0.01)
    value = await keeper.get("account", "k")
    assert value is not None

    async def loaded() -> tuple[Decimal, int]:
        async with app.connect(servers=eventjet_nats.url) as other:
            positions: list[int] = []
            store = other.store
            pages = store.pages

            def counted(aggregate: str, aggregate_id: str, *, after: int = 0) -> AsyncIterator[list[RawRecord]]:
                positions.append(after)
                return pages(aggregate, aggregate_id, after=after)

            store.pages = counted  # type: ignore[method-assign]
            state = await other.repository(Account).load("k")
            if other._repositories._snapshots is not None:  # pyright: ignore[reportPrivateUsage]
                await other._repositories._snapshots._queue.join()  # pyright: ignore[reportPrivateUsage]
            return state.balance, positions[0] if positions else -1

    balance, after = await loaded()
    assert balance == Decimal(400)
    assert after != 0, "the snapshot was not used"
    client = jet.client
    assert client is not None
    subject = f"$KV.{snapshot_bucket(jet.name)}.account.k"
    beyond = value.replace(b'"position":', b'"position":9')
    for bad in (b"", b"{}", b"not json", value[:-5], value.replace(b'"balance":"', b'"balance":"9'), beyond):
        await client.request(subject, bad)
        assert await loaded() == (Decimal(400), 0)


async def test_a_past_state_is_loaded_by_version_position_or_time(jet: Jet) -> None:
    accounts = jet.repository(Account)
    await accounts.execute("t", Account.open, "ada")
    await accounts.execute("t", Account.deposit, Decimal(1))
    await asyncio.sleep(0.01)
    then = datetime.now(UTC)
    await asyncio.sleep(0.01)
    done = await accounts.execute("t", Account.deposit, Decimal(1))
    assert (await accounts.load("t", version=1)).balance == Decimal(0)
    assert (await accounts.load("t", version=0)) == Account()
    assert (await accounts.load("t", position=done.position - 1)).balance == Decimal(1)
    assert (await accounts.load("t", position=done.position)).balance == Decimal(2)
    assert (await accounts.load("t", at=then)).balance == Decimal(1)
    for resolved in ({"version": 4}, {"position": done.position + 1}, {"at": then + timedelta(hours=1)}):
        with pytest.raises(UsageError):
            await accounts.load("t", **resolved)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="one of"):
        await accounts.load("t", version=1, position=1)


async def test_a_class_that_the_app_does_not_list_has_no_repository(jet: Jet) -> None:
    with pytest.raises(UsageError, match="is not listed in the app"):
        jet.repository(Opened)  # pyright: ignore[reportArgumentType]


async def test_a_lost_connection_empties_the_cache_of_aggregates(app: App) -> None:
    with NatsServer() as server:
        async with app.connect(servers=server.url) as jet:
            await jet.init()
            accounts = jet.repository(Account)
            done = await accounts.execute("a", Account.open, "ada")
            assert accounts.executor.cache.get("a") is not None
            server.stop()
            async with asyncio.timeout(30):
                while accounts.executor.cache.get("a") is not None:
                    await asyncio.sleep(0.01)
            server.start()
            assert (await accounts.execute("a", Account.deposit, Decimal(1))).position == done.position + 1
