"""No second history begins silently in a log with aggregates that an application does not declare."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import orjson
import pytest

from eventjet import App, Imported, Jet, Reaction, Recorded, Refused, aggregate, event, reactor
from eventjet.dev.nats import NatsServer
from eventjet.domain.unique import CLAIMS
from eventjet.jetstream.api import stream_info, update_stream
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.topology import AGGREGATES
from eventjet.log.unknown_events import LIST_S, noted_unknown, unknown_aggregates
from eventjet.nats.endpoint import Endpoint
from eventjet.subscriptions.supervisor import run_workers
from tests.faults.proxy import PASS, Fate, NatsProxy, Publish
from tests.logs import append, block, create, fresh_name


@event("account.opened")
class Opened:
    owner: str


@event("order.placed")
class Placed:
    item: str


@event("refund.paid")
class Paid:
    amount: int


@aggregate("account")
class Account:
    owner: str = ""

    def open(self, owner: str) -> Opened:
        return Opened(owner=owner)

    def evolve(self, event: Opened) -> Account:
        return replace(self, owner=event.owner)


@aggregate("acct")
class Renamed(Account):
    def evolve(self, event: Opened) -> Renamed:
        return replace(self, owner=event.owner)


@aggregate("order")
class Order:
    item: str = ""

    def place(self, item: str) -> Placed:
        return Placed(item=item)

    def evolve(self, event: Placed) -> Order:
        return replace(self, item=event.item)


@aggregate("refund")
class Refund:
    amount: int = 0

    def pay(self, amount: int) -> Paid:
        return Paid(amount=amount)

    def evolve(self, event: Paid) -> Refund:
        return replace(self, amount=event.amount)


@reactor("greetings")
async def greet(event: Recorded[Placed], reaction: Reaction[None]) -> None:
    """Do nothing."""


@pytest.fixture
async def name(eventjet_nats: NatsServer) -> str:
    """Create a log with an account in it, and return its name."""
    app = App(fresh_name(), aggregates=[Account])
    async with app.connect(servers=eventjet_nats.url) as jet:
        assert (await jet.init()).unknown == ()
        await jet.repository(Account).execute("a-1", Account.open, "ada")
    return app.name


@pytest.mark.parametrize("is_initialised", [True, False], ids=["after init", "without init"])
async def test_a_renamed_aggregate_begins_no_second_history(
    name: str, is_initialised: bool, eventjet_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(name, aggregates=[Renamed])
    with caplog.at_level(logging.WARNING):
        async with app.connect(servers=eventjet_nats.url) as jet:
            if is_initialised:
                (unknown,) = (await jet.init()).unknown
                assert (unknown.aggregate, unknown.histories) == ("account", 1)
                assert (unknown.event_type, unknown.position) == ("account.opened", 1)
                assert "@aggregate('account')" in str(unknown)
            with pytest.raises(Refused, match="does not declare: account"):
                await jet.repository(Renamed).execute("a-1", Renamed.open, "ada")
            with pytest.raises(Refused, match="does not declare: account"):
                await jet.append_many([Imported(Renamed, "a-1", Opened(owner="ada"))], source="old")
            assert (await jet.log()).last == 1
    assert "aggregates that this application does not declare: account. If one is called otherwise now" in caplog.text
    assert "eventjet init" not in caplog.text  # which shows this line, too


async def test_an_app_records_nothing_in_the_empty_log_of_another_app_of_its_name(
    eventjet_nats: NatsServer,
) -> None:
    name = fresh_name()
    async with App(name, aggregates=[Account]).connect(servers=eventjet_nats.url) as jet:
        await jet.init()
    async with App(name, aggregates=[Order]).connect(servers=eventjet_nats.url) as jet:
        (unknown,) = (await jet.init()).unknown
        assert (unknown.aggregate, unknown.histories, unknown.position) == ("account", 0, 0)
        assert "was made for 'account' and is empty" in str(unknown)
        with pytest.raises(Refused, match="does not declare: account"):
            await jet.repository(Order).execute("o-1", Order.place, "tea")
    # The other aggregate is retired: the app continues in the log that it created itself.
    async with App(name, aggregates=[Order], retired_aggregates=["account"]).connect(servers=eventjet_nats.url) as jet:
        assert (await jet.init()).unknown == ()
        assert (await jet.repository(Order).execute("o-1", Order.place, "tea")).position == 1


async def test_events_of_a_retired_aggregate_are_skipped(name: str, eventjet_nats: NatsServer) -> None:
    app = App(name, aggregates=[Renamed], retired_aggregates=["account"])
    async with app.connect(servers=eventjet_nats.url) as jet:
        assert (await jet.init()).unknown == ()
        assert (await jet.repository(Renamed).execute("b-1", Renamed.open, "bob")).position == 2
        assert [recorded.aggregate_id async for recorded in jet.tail()] == ["b-1"]


async def test_an_older_release_goes_on_while_a_newer_one_records_another_aggregate(
    eventjet_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    older = App(fresh_name(), aggregates=[Account, Refund])
    newer = App(older.name, aggregates=[Account, Refund, Order])
    async with older.connect(servers=eventjet_nats.url) as jet, newer.connect(servers=eventjet_nats.url) as new_jet:
        await jet.init()
        assert (await new_jet.init()).unknown == ()
        await new_jet.repository(Order).execute("o-1", Order.place, "tea")
        await jet.repository(Account).execute("a-1", Account.open, "ada")
        with caplog.at_level(logging.WARNING):
            async with older.connect(servers=eventjet_nats.url) as restarted:
                # A declared aggregate may begin, although it has no events yet.
                assert (await restarted.repository(Refund).execute("r-1", Refund.pay, 3)).version == 1
    assert "order" in caplog.text


async def test_a_new_aggregate_needs_no_init_in_a_log_that_the_application_knows(
    name: str, eventjet_nats: NatsServer
) -> None:
    async with App(name, aggregates=[Account, Order]).connect(servers=eventjet_nats.url) as jet:
        assert (await jet.repository(Order).execute("o-1", Order.place, "tea")).version == 1
    async with App(name, aggregates=[Account]).connect(servers=eventjet_nats.url) as jet:
        assert [unknown.aggregate for unknown in (await jet.init()).unknown] == ["order"]


async def test_a_worker_logs_unknown_aggregates_and_works(
    name: str, eventjet_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(name, aggregates=[Order], reactors=[greet], retired_aggregates=["account"])
    stop = asyncio.Event()
    async with app.connect(servers=eventjet_nats.url) as jet:
        await jet.init()
    unaware = App(name, aggregates=[Order], reactors=[greet])
    settings = jet.settings
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(60):
            await run_workers(unaware, settings, stop=stop, on_ready=stop.set)
    assert "has events of 1 'account'" in caplog.text


def updates(name: str, fate: Fate) -> Callable[[Publish], Fate]:
    """Return a choice that gives the first update of a stream a fate."""
    fates = [fate]
    return lambda publish: fates.pop() if fates and publish.subject == f"$JS.API.STREAM.UPDATE.{name}" else PASS


def through(proxy: NatsProxy, app: App) -> AbstractAsyncContextManager[Jet]:
    return app.connect(servers=proxy.url, request_timeout_s=60.0)


async def test_two_concurrent_inits_keep_each_others_names(eventjet_nats: NatsServer) -> None:
    """Both inits read the same state, and the update of the second one arrives last."""
    name, (read, first, second) = fresh_name(), (asyncio.Event() for _ in range(3))
    async with App(name, aggregates=[Account]).connect(servers=eventjet_nats.url) as jet:
        await jet.init()

    async def first_arrived() -> None:
        await read.wait()

    async def first_done() -> None:
        first.set()
        await second.wait()

    async def second_arrived() -> None:
        read.set()
        await first.wait()

    async def second_done() -> None:
        second.set()

    fates = Fate(first=first_arrived, then=first_done), Fate(first=second_arrived, then=second_done)
    apps = App(name, aggregates=[Account, Order]), App(name, aggregates=[Account, Refund])

    async def init(app: App, fate: Fate) -> None:
        async with NatsProxy(eventjet_nats.url, updates(name, fate)) as proxy, through(proxy, app) as jet:
            assert (await jet.init()).unusable == ()

    async with asyncio.timeout(120):
        await asyncio.gather(*map(init, apps, fates))
    assert {"account", "order", "refund"} <= noted_in(eventjet_nats, name)


async def test_concurrent_first_inits_note_the_names_of_all(eventjet_nats: NatsServer) -> None:
    name = fresh_name()

    async def init(*more: type[Any]) -> None:
        async with App(name, aggregates=[Account, *more]).connect(servers=eventjet_nats.url) as jet:
            assert (await jet.init()).unusable == ()

    async with asyncio.timeout(120):
        await asyncio.gather(init(), init(Order), init(Refund), init(Order, Refund))
    assert {"account", "order", "refund"} <= noted_in(eventjet_nats, name)


async def test_names_removed_by_a_concurrent_edit_are_noted_again(name: str, eventjet_nats: NatsServer) -> None:
    with NatsConnection.open(Endpoint((eventjet_nats.url,))) as connection:
        config = connection.ask(stream_info(name)).config

    async def edit() -> None:
        def send() -> None:
            with NatsConnection.open(Endpoint((eventjet_nats.url,))) as connection:
                connection.ask(update_stream({**config, "description": "of the bank"}))

        await asyncio.to_thread(send)

    app = App(name, aggregates=[Account, Order])
    async with NatsProxy(eventjet_nats.url, updates(name, Fate(then=edit))) as proxy, through(proxy, app) as jet:
        assert (await jet.init()).unusable == ()
    assert {"account", "order"} <= noted_in(eventjet_nats, name)
    with NatsConnection.open(Endpoint((eventjet_nats.url,))) as connection:
        assert connection.ask(stream_info(name)).config["description"] == "of the bank"


async def test_init_without_the_right_to_update_names_the_missing_aggregates_and_the_role() -> None:
    name = fresh_name()
    users = """authorization { users: [
      { user: may, password: may }
      { user: not, password: not, permissions: { publish: { deny: "$JS.API.STREAM.UPDATE.>" } } }
    ] }"""
    app = App(name, aggregates=[Account, Order], reactors=[greet])
    with NatsServer(sync_interval="1m", config=users) as server:
        async with App(name, aggregates=[Account]).connect(servers=server.url, user="may", password="may") as jet:
            await jet.init()
        async with app.connect(servers=server.url, user="not", password="not") as jet:
            topology = await jet.init()
            assert [cursor_name for cursor_name, _ in topology.cursors] == ["greetings"]  # all else is made
        (problem,) = map(str, topology.unusable)
        assert "that order may begin histories" in problem
        assert f"may not use $JS.API.STREAM.UPDATE.{name}" in problem
        assert "the role `admin`" in problem


async def test_init_reports_why_the_server_refused_the_names(name: str, eventjet_nats: NatsServer) -> None:
    refusal = {"type": "", "error": {"code": 400, "err_code": 10052, "description": "no room for that"}}

    def choose(publish: Publish) -> Fate:
        async def answer() -> None:
            with NatsConnection.open(Endpoint((eventjet_nats.url,))) as connection:
                connection.publish(publish.reply, orjson.dumps(refusal))
                connection.api("INFO")

        return Fate("lose", first=answer) if publish.subject == f"$JS.API.STREAM.UPDATE.{name}" else PASS

    app = App(name, aggregates=[Account, Order])
    async with NatsProxy(eventjet_nats.url, choose) as proxy, through(proxy, app) as jet:
        (problem,) = map(str, (await jet.init()).unusable)
    assert "that eventjet_unique" not in problem  # it is noted already
    assert "that order may begin histories" in problem
    assert "the server refused it: no room for that (10052)" in problem


def noted_in(server: NatsServer, name: str) -> set[str]:
    with NatsConnection.open(Endpoint((server.url,))) as connection:
        return set(connection.ask(stream_info(name)).metadata[AGGREGATES].split())


def test_unknown_aggregates_of_a_long_log_are_read_from_its_noted_names(name: str, eventjet_nats: NatsServer) -> None:
    with NatsConnection.open(Endpoint((eventjet_nats.url,))) as connection:
        state = connection.ask(stream_info(name))
        assert connection.run(noted_unknown(state, {"account"})) == []
        (unknown,) = connection.run(noted_unknown(state, {"order"}))
    assert (unknown.aggregate, unknown.histories, unknown.position) == ("account", 1, 1)


@pytest.mark.parametrize(
    ("known", "unknown"),
    [
        ({"account", "b_c", "zebra", "a"}, {}),
        ({"account", "b_c", "zebra"}, {"a": 1}),
        ({"account"}, {"a": 1, "b_c": 2, "zebra": 1}),
        ({"a", "zebra"}, {"account": 3, "b_c": 2}),
        (set[str](), {"a": 1, "account": 3, "b_c": 2, "zebra": 1}),
    ],
    ids=lambda value: ",".join(sorted(value)) or "none",
)
def test_every_unknown_aggregate_is_counted(
    known: set[str], unknown: dict[str, int], eventjet_nats: NatsServer
) -> None:
    endpoint, log = Endpoint((eventjet_nats.url,)), fresh_name()
    create(endpoint, log)
    subjects = ["a.1", "account.1", "account.2", "account.3", "b_c.1", "b_c.2", "zebra.1", f"{CLAIMS}.x", "_void.1"]
    append(endpoint, log, [(subject, block(), b"{}") for subject in subjects])
    with NatsConnection.open(endpoint) as connection:
        aggregates = connection.run(unknown_aggregates(log, known), LIST_S)
    assert {aggregate.aggregate: aggregate.histories for aggregate in aggregates} == unknown


async def test_another_application_of_the_same_name_records_nothing(name: str, eventjet_nats: NatsServer) -> None:
    app = App(name, aggregates=[Order, Refund])
    async with app.connect(servers=eventjet_nats.url) as jet:
        assert [unknown.aggregate for unknown in (await jet.init()).unknown] == ["account"]
        orders = jet.repository(Order)
        with pytest.raises(Refused, match="`eventjet init`"):
            await jet.transact(orders.decide("o-1", Order.place, "tea"), orders.decide("o-2", Order.place, "tea"))
