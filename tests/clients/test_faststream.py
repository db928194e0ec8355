"""FastStream reads the log in every way it has, and publications as CloudEvents, and leaves the streams alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from faststream import AckPolicy, FastStream
from faststream.nats import ConsumerConfig, JStream, NatsBroker, NatsMessage, PullSub
from nats.js.errors import ServerError

from eventjet.subscriptions.status import status
from tests.clients.bells import Fact, Told, Town, fact_of, told_of
from tests.integration.reacting import eventually, until, working

BOUND_S = 120.0
SOON_S = 1.0
"""How long to wait for a handler that is to stop, and how long an unacknowledged message is kept from the next one."""

ROADS: dict[str, dict[str, Any]] = {
    "pull-durable": {"durable": "index", "pull_sub": True},
    "pull-ephemeral": {"pull_sub": True},
    "push-durable": {"durable": "index"},
    "push-durable-shared": {"queue": "readers"},
    "push-ephemeral": {},
    "push-ordered": {"ordered_consumer": True, "ack_policy": AckPolicy.MANUAL},
}

pytestmark = pytest.mark.slow


@asynccontextmanager
async def running(broker: NatsBroker) -> AsyncGenerator[None]:
    """Run a FastStream app for the block that reads what its broker subscribes to."""
    app = FastStream(broker, logger=None)
    try:
        await asyncio.wait_for(app.start(), BOUND_S)
        yield
    finally:
        await asyncio.wait_for(app.stop(), BOUND_S)


def broker_of(town: Town) -> NatsBroker:
    return NatsBroker(town.server, logger=None, graceful_timeout=SOON_S)


def reading(town: Town, facts: list[Fact], *, declare: bool = False, **road: Any) -> NatsBroker:
    """Return a broker that reads the log in one way."""
    broker = broker_of(town)

    @broker.subscriber(town.subject, stream=JStream(town.log, declare=declare), **road)
    async def read(body: dict[str, Any], message: NatsMessage) -> None:
        raw = message.raw_message
        facts.append(fact_of(raw.metadata.sequence.stream, raw.subject, message.headers, body))

    return broker


def hearing(town: Town, messages: list[Told], gate: asyncio.Event | None = None) -> NatsBroker:
    """Return a broker that reads the publication, each event after the one before is done, when the gate opens."""
    broker = broker_of(town)

    @broker.subscriber(
        town.public_subject,
        stream=JStream(town.public, declare=False),
        durable="newspaper",
        pull_sub=True,
        ack_policy=AckPolicy.NACK_ON_ERROR,
        config=ConsumerConfig(max_ack_pending=1, ack_wait=SOON_S),
    )
    async def hear(message: NatsMessage) -> None:
        messages.append(told_of(message.body))
        if gate is not None:
            await gate.wait()

    return broker


@pytest.mark.filterwarnings("ignore:The JetStream Push consumer with the `durable` option:RuntimeWarning")
@pytest.mark.parametrize("road", ROADS)
async def test_the_log_is_read_in_order_and_its_stream_is_unchanged(town: Town, road: str) -> None:
    before = await town.config(town.log)
    await town.ring(10)
    received: list[Fact] = []
    async with running(reading(town, received, **ROADS[road])):
        await until(lambda: len(received) >= 10)
        await town.ring(5)
        await until(lambda: len(received) >= 15)
    await town.ring(5)
    facts = await town.facts()
    assert received == facts[:15]
    expected = facts[15:] if "durable" in road else facts
    later: list[Fact] = []
    async with running(reading(town, later, **ROADS[road])):
        await until(lambda: len(later) >= len(expected))
    assert later == expected
    assert await town.config(town.log) == before


async def test_a_publication_is_read_as_cloud_events_in_order_over_restarts(town: Town) -> None:
    received: list[Told] = []
    await town.ring(12)
    await town.tell()
    async with running(hearing(town, received)):
        await until(lambda: len(received) >= 5)
    # It may have heard all twelve before it was stopped.
    await town.ring(12)
    await town.tell()
    unacknowledged: list[Told] = []
    async with running(hearing(town, unacknowledged, asyncio.Event())):
        await until(lambda: bool(unacknowledged))  # It is stopped over this one, which it has not acknowledged.
    expected = await town.told()
    async with running(hearing(town, received)):
        await until(lambda: {message[0] for message in received} == {message[0] for message in expected})
    # Messages that took longer than SOON_S may come twice.
    assert list({message[0]: message for message in received}.values()) == expected
    assert unacknowledged[0] in expected[5:]


@pytest.mark.parametrize(("policy", "comes_again"), [({}, False), ({"ack_policy": AckPolicy.NACK_ON_ERROR}, True)])
async def test_a_failed_message_is_redelivered_if_the_policy_says_so(
    town: Town, policy: dict[str, Any], comes_again: bool
) -> None:
    await town.ring(3)
    broker, positions = broker_of(town), list[int]()

    @broker.subscriber(town.subject, stream=JStream(town.log, declare=False), durable="index", pull_sub=True, **policy)
    async def read(message: NatsMessage) -> None:
        position = message.raw_message.metadata.sequence.stream
        positions.append(position)
        if position == 2 and positions.count(2) == 1:
            raise ValueError("not now")

    async with running(broker):
        await until(lambda: 3 in positions and positions.count(2) == 1 + comes_again)
        assert broker.connection is not None
        consumer = broker.connection.jetstream()

        async def is_done() -> bool:
            info = await consumer.consumer_info(town.log, "index")
            return not info.num_pending and not info.num_ack_pending

        await eventually(is_done)
    assert positions.count(2) == 1 + comes_again


async def test_messages_that_are_fetched_together_are_handled_together(town: Town) -> None:
    await town.ring(4)
    broker, begun, gate = broker_of(town), list[int](), asyncio.Event()

    @broker.subscriber(
        town.subject, stream=JStream(town.log, declare=False), durable="index", pull_sub=PullSub(batch_size=4)
    )
    async def read(message: NatsMessage) -> None:
        begun.append(message.raw_message.metadata.sequence.stream)
        await gate.wait()

    async with running(broker):
        await until(lambda: len(begun) > 1)
        gate.set()


async def test_the_server_refuses_a_reader_that_declares_the_log(town: Town) -> None:
    before = await town.config(town.log)
    with pytest.raises(ServerError, match="can not cancel deny message deletes"):
        async with running(reading(town, [], declare=True, durable="index", pull_sub=True)):
            pass
    assert await town.config(town.log) == before


async def test_a_reader_that_declares_the_public_stream_stops_its_publication(town: Town) -> None:
    broker = broker_of(town)

    @broker.subscriber(town.public_subject, stream=JStream(town.public), durable="newspaper", pull_sub=True)
    async def hear(message: NatsMessage) -> None:
        pass

    async def has_failed() -> bool:
        (publication_status,) = await status(town.app, town.settings)
        return publication_status.state == "failed" and "does not take atomic batches" in str(publication_status.reason)

    async with working(town.app, town.settings):
        await town.ring(4)
        async with running(broker):
            assert not (await town.config(town.public)).get("allow_atomic")
        await town.ring(4)
        await eventually(has_failed)
    (unusable,) = (await town.jet.init()).unusable
    assert "does not take atomic batches" in str(unusable)
