"""Inboxes on a real server turn each message of another stream into a command, once."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from pydantic import BaseModel

from eventjet import App, DefinitionError, Incoming, Jet, Reaction, Retry, aggregate, event, inbox
from eventjet.dev.nats import NatsServer
from eventjet.errors import LogUnusable
from eventjet.jetstream.api import create_stream
from eventjet.settings import Settings
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor_control import cursor_at, move_cursors, records_of
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import status
from tests.integration.reacting import eventually, until, working
from tests.logs import fresh_name


class Paid(BaseModel):
    order: str
    cents: int


@event("order.paid")
class OrderPaid:
    cents: int


@aggregate("order")
class Order:
    cents: int = 0

    def pay(self, cents: int) -> OrderPaid:
        return OrderPaid(cents=cents)

    def evolve(self, event: OrderPaid) -> Order:
        return replace(self, cents=self.cents + event.cents)


@dataclass
class Desk:
    """The dependency of the handler: it records messages, and makes the handler fail on demand."""

    received: list[Incoming[Paid]] = field(default_factory=list[Incoming[Paid]])
    keys: list[str] = field(default_factory=list[str])
    fails: Callable[[Paid], bool] = lambda paid: False

    def by_position(self, after: int = 0) -> dict[int, Incoming[Paid]]:
        """Return the received messages by position, without the first `after` deliveries."""
        return {message.position: message for message in self.received[after:]}


def app_of(desk: Desk, stream: str, *, start: Any = "beginning") -> App:
    @inbox("payments", stream=stream, subject=f"{stream}.pay.>", start=start, retry=Retry(tries=2, first_s=0.01))
    async def payments(message: Incoming[Paid], to: Reaction[Desk]) -> None:
        to.deps.received.append(message)
        to.deps.keys.append(to.key)
        if to.deps.fails(message.data):
            raise ValueError("not today")
        await to.repository(Order).execute(message.data.order, Order.pay, message.data.cents)

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Desk]:
        yield desk

    return App(fresh_name(), aggregates=[Order], reactors=[payments], deps=opened)


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,))


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def app(desk: Desk) -> App:
    return app_of(desk, f"shop-{fresh_name()}")


@pytest.fixture
async def jet(app: App, settings: Settings) -> AsyncGenerator[Jet]:
    stream = app.inboxes["payments"].stream
    async with app.connect(settings) as jet:
        assert jet.client is not None
        await jet.client.ask(create_stream({"name": stream, "subjects": [f"{stream}.>"]}))
        await jet.init()
        yield jet


async def send(jet: Jet, app: App, name: str, body: Any, where: str = "pay") -> None:
    """Publish a message to the stream of the inbox, as another program would."""
    assert jet.client is not None
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    await jet.client.request(f"{app.inboxes['payments'].stream}.{where}.{name}", payload)


def cloud(name: str, order: str, cents: int) -> dict[str, Any]:
    data = {"order": order, "cents": cents}
    return {"specversion": "1.0", "id": name, "source": "https://pay.example", "type": "paid", "data": data}


async def paid(jet: Jet, order: str) -> int:
    return (await jet.repository(Order).load(order)).cents


async def is_paid(jet: Jet, cents: int) -> None:
    async def look() -> bool:
        return await paid(jet, "o") == cents

    await eventually(look)


async def test_a_message_becomes_a_command_once_though_it_is_delivered_again(
    app: App, jet: Jet, settings: Settings, desk: Desk
) -> None:
    await send(jet, app, "o1", {"order": "o1", "cents": 5})
    await send(jet, app, "o1", cloud("c1", "o1", 7))
    await send(jet, app, "o2", cloud("c2", "o2", 9))
    await send(jet, app, "o3", cloud("c3", "o3", 11), "other")  # on a subject that the inbox does not read
    async with working(app, settings):
        await until(lambda: len(desk.by_position()) == 3)
        await send(jet, app, "o1", cloud("c1", "o1", 7))  # the same event, published again
        await until(lambda: len(desk.by_position()) == 4)
    assert [await paid(jet, order) for order in ("o1", "o2", "o3")] == [12, 9, 0]
    first, second = desk.by_position()[1], desk.by_position()[2]
    assert (first.position, first.source, first.data) == (1, "", Paid(order="o1", cents=5))
    assert (second.id, second.source, second.subject.rpartition(".")[2]) == ("c1", "https://pay.example", "o1")
    assert "payments/https://pay.example/c1" in desk.keys
    (recorded, *_) = await jet.repository(Order).history("o2")
    assert recorded.metadata.actor == "inbox:payments"
    assert recorded.metadata.causation == "https://pay.example c2"
    # Read again from the beginning: every command is known.
    assert jet.client is not None
    cursors = Cursors(jet.client, jet.name)
    at = await cursor_at(jet.store, jet.client, declarations_of(app)["payments"], 0)
    await cursor_control.set_position(cursors, at)
    before = len(desk.received)
    async with working(app, settings):
        await until(lambda: len(desk.by_position(before)) == 4)
    assert [await paid(jet, order) for order in ("o1", "o2")] == [12, 9]


async def test_messages_that_cannot_be_decoded_are_quarantined_and_the_others_are_handled(
    app: App, jet: Jet, settings: Settings, desk: Desk
) -> None:
    assert jet.client is not None
    cursors = Cursors(jet.client, jet.name)
    async with working(app, settings):
        await send(jet, app, "o1", b"no json")
        await send(jet, app, "o2", {"order": "o2"})
        await send(jet, app, "o3", {"order": "o3", "cents": 3})
        await until(lambda: list(desk.by_position()) == [3])

        async def both() -> list[Any]:
            entries = await cursor_control.listed(cursors, "payments")
            return entries if len(entries) == 2 else []

        quarantined = await eventually(both)
        assert all("it cannot be decoded" in entry.reason for entry in quarantined)
        await cursor_control.drop(cursors, "payments", [entry.position for entry in quarantined])

        async def none() -> bool:
            return not await cursors.quarantined("payments")

        await eventually(none)
        await send(jet, app, "o1", {"order": "o1", "cents": 1})
        await until(lambda: list(desk.by_position()) == [3, 4])
    assert [await paid(jet, order) for order in ("o1", "o3")] == [1, 3]


async def test_cloud_events_without_an_id_are_quarantined_and_not_treated_as_duplicates(
    app: App, jet: Jet, settings: Settings, desk: Desk
) -> None:
    assert jet.client is not None
    cursors = Cursors(jet.client, jet.name)
    for order, name in (("o1", None), ("o2", None), ("o3", ""), ("o4", ""), ("o5", 7)):
        await send(jet, app, order, cloud(cast("str", name), order, 5))
    async with working(app, settings):

        async def all_quarantined() -> list[Any]:
            entries = await cursor_control.listed(cursors, "payments")
            return entries if len(entries) == 4 else []

        quarantined = await eventually(all_quarantined)
        await until(lambda: list(desk.by_position()) == [5])
    assert ["each CloudEvent needs text of its own" in entry.reason for entry in quarantined] == [True] * 4
    assert desk.by_position()[5].id == "7"


async def test_a_cloud_event_of_another_type_is_quarantined_though_its_fields_fit(settings: Settings) -> None:
    stream = f"shop-{fresh_name()}"

    @inbox("payments", stream=stream, subject=f"{stream}.>", start="beginning")
    async def payments(message: Incoming[OrderPaid], to: Reaction) -> None:
        await to.repository(Order).execute("o", Order.pay, message.data.cents)

    app = App(fresh_name(), aggregates=[Order], reactors=[payments])
    async with app.connect(settings) as jet:
        assert jet.client is not None
        await jet.client.ask(create_stream({"name": stream, "subjects": [f"{stream}.>"]}))
        await jet.init()
        for kind in ("order.paid", "order.refunded", ["order.paid"]):
            body = {"specversion": "1.0", "id": str(kind), "source": "s", "type": kind, "data": {"cents": 5}}
            await send(jet, app, "o", body)
            await send(jet, app, "p", {"cents": 1})  # not a CloudEvent, so only its fields identify it
        async with working(app, settings):
            await is_paid(jet, 8)
            cursors = Cursors(jet.client, jet.name)

            async def quarantined() -> list[Any]:
                return [entry.reason for entry in await cursor_control.listed(cursors, "payments")]

            (reason,) = await eventually(quarantined)
    assert "its type 'order.refunded' is none of order.paid" in reason


async def test_a_message_whose_handler_fails_is_quarantined_and_retried(
    app: App, jet: Jet, settings: Settings, desk: Desk
) -> None:
    assert jet.client is not None
    desk.fails = lambda paid: paid.cents == 2
    cursors = Cursors(jet.client, jet.name)
    async with working(app, settings):
        for cents in (1, 2, 3):
            await send(jet, app, "o", {"order": "o", "cents": cents})

        async def waits() -> list[Any]:
            return [entry for entry in await cursor_control.listed(cursors, "payments") if entry.blocked == 1]

        (entry,) = await eventually(waits)
        assert entry.reason == "ValueError: not today"
        desk.fails = lambda paid: False
        await cursor_control.retry(cursors, "payments", None)

        async def all_paid() -> bool:
            return await paid(jet, "o") == 6

        await eventually(all_paid)


async def test_a_recreated_stream_is_refused(app: App, jet: Jet, settings: Settings, desk: Desk) -> None:
    assert jet.client is not None
    stream = app.inboxes["payments"].stream
    async with working(app, settings):
        await send(jet, app, "o", {"order": "o", "cents": 1})
        await until(lambda: len(desk.by_position()) == 1)
    await jet.client.api(f"STREAM.DELETE.{stream}")
    await jet.client.ask(create_stream({"name": stream, "subjects": [f"{stream}.>"]}))
    await send(jet, app, "o", {"order": "o", "cents": 9})

    async def has_failed() -> bool:
        (shown,) = await status(app, settings)
        return shown.state == "failed"

    async with working(app, settings):
        await eventually(has_failed)
    assert await paid(jet, "o") == 1


async def test_quarantined_messages_of_a_deleted_stream_are_dropped(
    app: App, jet: Jet, settings: Settings, desk: Desk
) -> None:
    """The positions of the old entries belong to other messages in the new stream."""
    assert jet.client is not None
    stream = app.inboxes["payments"].stream
    cursors = Cursors(jet.client, jet.name)
    async with working(app, settings):
        await send(jet, app, "o1", b"no json")
        await send(jet, app, "o2", {"order": "o2"})

        async def both() -> bool:
            return len(await cursors.quarantined("payments")) == 2

        await eventually(both)
        first, second = await cursors.quarantined("payments")
        assert first.event.reason == (
            "it cannot be decoded: DecodeError: JSON is malformed: invalid character (byte 4)"
        )
        assert second.event.reason == "it cannot be decoded: ValidationError: cents: Field required"
    await jet.client.api(f"STREAM.DELETE.{stream}")
    await jet.client.ask(create_stream({"name": stream, "subjects": [f"{stream}.>"]}))
    for order in ("o1", "o2", "o3"):
        await send(jet, app, order, {"order": order, "cents": 4})
    declared = declarations_of(app)["payments"]
    at = await cursor_at(jet.store, jet.client, declared, 0)
    assert await move_cursors(cursors, jet.client, [declared], at, records_of(jet.store, jet.client, declared)) == [
        1,
        2,
    ]
    async with working(app, settings):
        await until(lambda: sorted(desk.by_position()) == [1, 2, 3])
    assert [await paid(jet, order) for order in ("o1", "o2", "o3")] == [4, 4, 4]
    assert await cursors.quarantined("payments") == []


async def test_a_worker_follows_a_recreated_stream_once_its_cursor_is_moved(
    app: App, jet: Jet, settings: Settings, desk: Desk
) -> None:
    """A message without an id is identified by its position and by the identity of its stream."""
    assert jet.client is not None
    stream, declared = app.inboxes["payments"].stream, declarations_of(app)["payments"]
    cursors = Cursors(jet.client, jet.name)
    async with working(app, settings):
        await send(jet, app, "o", {"order": "o", "cents": 1})
        await is_paid(jet, 1)
        await jet.client.api(f"STREAM.DELETE.{stream}")
        await jet.client.ask(create_stream({"name": stream, "subjects": [f"{stream}.>"]}))

        async def has_failed() -> bool:
            (shown,) = await status(app, settings)
            return shown.state == "failed"

        await eventually(has_failed)
        await send(jet, app, "o", {"order": "o", "cents": 5})
        at = await cursor_at(jet.store, jet.client, declared, 0)
        await move_cursors(cursors, jet.client, [declared], at, records_of(jet.store, jet.client, declared))
        await is_paid(jet, 6)


async def test_a_missing_stream_is_reported(settings: Settings, desk: Desk) -> None:
    app = app_of(desk, f"nowhere-{fresh_name()}")
    async with app.connect(settings) as jet:
        (unusable,) = (await jet.init()).unusable
        assert isinstance(unusable, LogUnusable)
        assert "of the inbox 'payments': it does not exist" in str(unusable)


@pytest.mark.parametrize("stream", ["$MQTT_msgs", "PAY:EU", "orders+v1", "o" * 255])
def test_an_inbox_takes_every_stream_name_that_the_server_takes(stream: str) -> None:
    @inbox("payments", stream=stream, subject="payments.>")
    async def pay(message: Incoming[Paid], to: Reaction) -> None: ...

    App("orders", aggregates=[Order], reactors=[pay])


def test_all_faults_of_inboxes_are_reported_together() -> None:
    @inbox("Bad", stream="", subject="a b", retry=Retry(tries=0))
    def bad(message: Paid) -> None:  # type: ignore[arg-type,misc]
        """This handler is not async, has no second parameter and no annotation of an inbox."""

    @inbox("strange", stream="s", subject="s.>")
    async def strange(message: Incoming[Desk], to: Reaction) -> None: ...

    own: Any = inbox("own", stream="orders", subject="orders..>")(strange.handle)
    gathered: Any = inbox("gathered", stream="all.", subject="a.>.b", sources=["orders"])(strange.handle)
    with pytest.raises(DefinitionError) as caught:
        App("orders", aggregates=[Order], reactors=[bad, strange, strange, own, gathered])
    for part in (
        "the inbox's name 'Bad' is not",
        "is not an `async def`",
        "does not take (message, reaction)",
        "inbox 'Bad': its stream '' is not a stream's name",
        "inbox 'Bad': its subject 'a b' is not one; write it as in payments.captured.*",
        "inbox 'own': the stream 'orders' is the app's own log; declare a reactor for its events, or name another",
        "inbox 'own': its subject 'orders..>' is not one",
        "inbox 'gathered': the stream 'orders' is the app's own log",
        "inbox 'gathered': its stream 'all.' is not a stream's name",
        "inbox 'gathered': its subject 'a.>.b' is not one",
        "give at least one try",
        "write what it takes, as in `message: Incoming[PaymentCaptured]`",
        "two inboxes are called 'strange'",
    ):
        assert part in str(caught.value), part
