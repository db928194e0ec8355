"""The JetStream store around the outcome of a save: what it makes of a connection that answers nothing, or nonsense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.envelope import BATCH_ID, header, open_batch, save_of
from eventjet.domain.identity import new_event_id
from eventjet.errors import (
    ConcurrencyConflict,
    Forbidden,
    NoResponders,
    OutcomeUnknown,
    Refused,
    SaveTorn,
    StoreUnavailable,
)
from eventjet.nats.api import Request
from eventjet.nats.protocol import Frame
from eventjet.store.lane import EVENTS_MAX
from eventjet.store.store import Append, NewEvent
from tests.simulation.store import SimulatedClient, SimulatedStore, frame
from tests.simulation.wire import Wire

REQUEST_S = 0.25
SAVE_S = 0.4
SLACK_S = 15.0
"""For a machine that is busy with other tests."""
LATEST_S = SAVE_S + REQUEST_S + SLACK_S

PATIENT_S = 30.0

Interference = Callable[[str, bytes], bytes | None]
"""(subject, payload) → what is answered, None for the true answer; may raise `StoreUnavailable`, `Forbidden`."""


def writes(*counts: int, expected: int = 0) -> list[Append]:
    """A save of some aggregates with so many events each."""
    return [
        Append("thing", f"t-{number}", expected, 0, tuple(event() for _ in range(count)))
        for number, count in enumerate(counts)
    ]


def event() -> NewEvent:
    return NewEvent(new_event_id(), EncodedEvent("thing.happened", 1, b"{}"))


class DisturbedClient(SimulatedClient):
    """The simulated server, reached through whatever a test puts between."""

    before: Sequence[Interference] = ()
    """Instead of the server: the request does not reach it."""
    sent = ""
    """The subjects of the request under way."""
    after: Sequence[Interference] = ()
    """Once the server has done what was asked."""

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        headers: bytes = b"",
        timeout_s: float | None = None,
        before: Collection[tuple[str, bytes, bytes]] = (),
    ) -> Frame:
        self.sent = " ".join([*(each[0] for each in before), subject])
        for interfere in self.before:
            instead = interfere(subject, payload)
            if instead is not None:
                return await self._answer(instead, timeout_s)
        answer = await super().request(subject, payload, headers, timeout_s, before)
        for interfere in self.after:
            instead = interfere(subject, payload)
            if instead is not None:
                return await self._answer(instead, timeout_s)
        return answer

    async def _answer(self, instead: bytes, timeout_s: float | None) -> Frame:
        if instead == SILENCE:
            await asyncio.sleep(timeout_s or self.timeout_s)
            raise StoreUnavailable("A request", "no answer")
        return frame(instead)


SILENCE = b"(silence)"


def disturbed(replicas: int = 1) -> tuple[SimulatedStore, DisturbedClient]:
    store = SimulatedStore("shop", replicas=replicas, save_timeout_s=SAVE_S)
    client = DisturbedClient(store.wire, REQUEST_S)
    store.reach(client)
    return store, client


def publishes(answer: bytes) -> Interference:
    """Only what goes to the log is disturbed."""
    return lambda subject, _: answer if subject.startswith("shop.") else None


def everything(answer: bytes) -> Interference:
    return lambda subject, _: answer


def once(interfere: Interference) -> Interference:
    """The first time only."""
    left = [interfere]

    def first(subject: str, payload: bytes) -> bytes | None:
        answer = left[0](subject, payload) if left else None
        if answer is not None:
            left.clear()
        return answer

    return first


@pytest.mark.parametrize("counts", [(1,), (3,), (1, 2, 1)], ids=["one event", "a batch", "several aggregates"])
async def test_a_save_that_nobody_answers_ends_at_its_deadline_and_one_request(counts: tuple[int, ...]) -> None:
    store, client = disturbed()
    client.before = [everything(SILENCE)]
    started = time.monotonic()
    with pytest.raises(OutcomeUnknown, match="no answer") as caught:
        await store.append(writes(*counts))
    assert SAVE_S <= time.monotonic() - started < LATEST_S
    assert len(caught.value.event_ids) == sum(counts)


@pytest.mark.parametrize("is_read_only", [True, False])
async def test_an_unknown_save_says_when_the_server_reads_and_does_not_store(is_read_only: bool) -> None:
    store, client = disturbed()
    store._save_timeout_s = 4 * REQUEST_S
    client.before = [publishes(SILENCE) if is_read_only else everything(SILENCE)]
    with pytest.raises(OutcomeUnknown) as caught:
        await store.append(writes(1))
    assert caught.value.is_read_only == is_read_only
    assert ("restarted after a full" in str(caught.value)) == is_read_only


async def test_a_save_whose_server_loses_jetstream_is_unknown() -> None:
    store, client = disturbed()
    off = {"error": {"code": 503, "err_code": 10039, "description": "JetStream not enabled for account"}}
    client.before = [publishes(SILENCE), everything(orjson.dumps(off))]
    with pytest.raises(OutcomeUnknown):
        await store.append(writes(1))


def others(*counts: int, first: int = 0, expected: int = 0) -> list[Append]:
    """As `writes`, on aggregates of its own."""
    return [
        replace(write, aggregate_id=f"o-{first + number}")
        for number, write in enumerate(writes(*counts, expected=expected))
    ]


def batches(store: SimulatedStore) -> dict[str, list[str]]:
    """Of each batch in the log: the aggregates that it wrote to."""
    found: dict[str, list[str]] = {}
    for message in store.wire.stream.log:
        found.setdefault(header(message.block, BATCH_ID) or "", []).append(message.subject)
    return found


async def test_saves_that_are_made_at_once_share_a_batch() -> None:
    store, _ = disturbed()
    saves = [others(2, 1, first=10 * number) for number in range(8)]
    ends = await asyncio.gather(*map(store.append, saves))
    assert ends == [3 * number for number in range(1, 9)]
    assert [len(subjects) for subjects in batches(store).values()] == [24]
    told = [save_of(message.block) for message in store.wire.stream.log]
    assert len(set(told)) == 8
    assert [open_batch(message.block) is None for message in store.wire.stream.log] == [False, False, True] * 8


class SlowClient(SimulatedClient):
    """Nothing reaches the server before it may."""

    def __init__(self, wire: Wire, timeout_s: float) -> None:
        super().__init__(wire, timeout_s)
        self.reached = asyncio.Event()
        self.may = asyncio.Event()

    async def request(self, subject: str, *rest: Any, **options: Any) -> Frame:
        self.reached.set()
        await self.may.wait()
        return await super().request(subject, *rest, **options)


async def test_saves_that_find_a_batch_on_its_way_share_the_next_one() -> None:
    store = SimulatedStore("shop", save_timeout_s=PATIENT_S)
    client = SlowClient(store.wire, PATIENT_S)
    store.reach(client)
    first = asyncio.create_task(store.append(others(2)))
    await client.reached.wait()
    later = [asyncio.create_task(store.append(others(2, first=number))) for number in range(1, 9)]
    await asyncio.sleep(0)
    assert not first.done()
    client.may.set()
    assert [await first, *await asyncio.gather(*later)] == [2 * number for number in range(1, 10)]
    assert [len(subjects) for subjects in batches(store).values()] == [2, 16]


async def test_a_conflict_of_one_save_fails_none_that_shares_its_batch() -> None:
    store, _ = disturbed()
    await store.append(writes(1))
    saves = [others(2, first=number) for number in range(6)]
    saves[3] = writes(2)
    ends = await asyncio.gather(*map(store.append, saves), return_exceptions=True)
    assert [isinstance(end, ConcurrencyConflict) for end in ends] == [number == 3 for number in range(6)]
    assert len(store.wire.stream.log) == 1 + 5 * 2


async def test_a_refusal_of_one_save_refuses_none_that_shares_its_batch() -> None:
    store, client = disturbed()
    store._save_timeout_s = PATIENT_S
    refused = orjson.dumps({"error": {"code": 400, "err_code": 10170, "description": "not this one"}})

    def refuse(subject: str, payload: bytes) -> bytes | None:
        return refused if "o-3" in client.sent else None

    client.before = [refuse]
    ends = await asyncio.gather(*(store.append(others(2, first=number)) for number in range(6)), return_exceptions=True)
    assert [isinstance(end, Refused) for end in ends] == [number == 3 for number in range(6)]
    assert len(store.wire.stream.log) == 5 * 2


async def test_a_shared_batch_whose_answer_is_lost_is_stored_once() -> None:
    store, client = disturbed()
    store._save_timeout_s = PATIENT_S
    lost = [publishes(b"(nonsense)")]
    client.after = [once(lost[0])]
    saves = [others(3, first=number) for number in range(5)]
    ends = await asyncio.gather(*map(store.append, saves))
    assert sorted(ends) == [3, 6, 9, 12, 15]
    assert len(store.wire.stream.log) == 15


async def test_a_save_whose_caller_went_is_stored_once_and_its_companions_too() -> None:
    store, _ = disturbed()
    store._save_timeout_s = PATIENT_S
    tasks = [asyncio.create_task(store.append(others(2, first=number))) for number in range(5)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, asyncio.CancelledError) for end in ends] == [number == 2 for number in range(5)]
    await store.settle()
    assert len(store.wire.stream.log) == 10


async def test_a_save_of_many_events_neither_waits_nor_is_waited_for() -> None:
    store, _ = disturbed()
    saves = [others(2), others(EVENTS_MAX + 1, first=1), others(2, first=2), others(2, first=3)]
    await asyncio.gather(*map(store.append, saves))
    assert sorted(len(subjects) for subjects in batches(store).values()) == [6, EVENTS_MAX + 1]


READS: dict[str, Callable[[SimulatedStore], Any]] = {
    "last": lambda store: store.last("thing", "t-0"),
    "newest": lambda store: store.newest("thing", "t-0"),
    "history": lambda store: store.history("thing", "t-0"),
    "state": lambda store: store.state(),
    "position_at": lambda store: store.position_at(datetime.now(UTC)),
}


class Electing(SimulatedClient):
    """A stream without a leader: nobody listens, for so many requests."""

    left = 3

    async def request(self, subject: str, *rest: Any, **options: Any) -> Frame:
        self._elect(subject)
        return await super().request(subject, *rest, **options)

    async def stream(self, request: Request[Any]) -> AsyncGenerator[list[Frame]]:
        self._elect(request.subject)
        async for frames in super().stream(request):
            yield frames

    def _elect(self, subject: str) -> None:
        self.left -= 1
        if self.left >= 0:
            raise NoResponders(subject)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
async def test_a_read_waits_out_an_election_for_as_long_as_a_save(read: Callable[[SimulatedStore], Any]) -> None:
    store, client = disturbed()
    store._save_timeout_s = PATIENT_S
    await store.append(writes(1))
    electing = Electing(client.wire, REQUEST_S)
    store.reach(electing)
    assert await read(store)
    store._save_timeout_s = SAVE_S
    electing.left = 1_000_000
    started = time.monotonic()
    with pytest.raises(NoResponders):
        await read(store)
    assert SAVE_S <= time.monotonic() - started < LATEST_S


async def test_what_became_of_an_unknown_save_is_resolved_without_storing_it_twice() -> None:
    store, client = disturbed()
    client.after = [everything(SILENCE)]
    with pytest.raises(OutcomeUnknown) as caught:
        await store.append(writes(1, 2))
    client.after = []
    store._save_timeout_s = PATIENT_S
    assert await store.resolve(caught.value.writes) == 3
    assert len(client.wire.stream.log) == 3


async def test_an_unknown_save_that_was_never_stored_is_stored_when_it_is_resolved() -> None:
    store, client = disturbed()
    client.before = [everything(SILENCE)]
    with pytest.raises(OutcomeUnknown) as caught:
        await store.append(writes(1))
    client.before = []
    store._save_timeout_s = PATIENT_S
    assert await store.resolve(caught.value.writes) == 1


async def test_a_cancelled_save_goes_on_even_when_its_first_answer_was_lost() -> None:
    store, client = disturbed()
    store._save_timeout_s = PATIENT_S
    client.before = [once(publishes(SILENCE))]
    saving = asyncio.ensure_future(store.append(writes(2)))
    await asyncio.sleep(0.01)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    await store.settle()
    assert len(client.wire.stream.log) == 2


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("counts", [(1,), (3,), (1, 2)])
async def test_a_lost_acknowledgement_is_found_in_the_slot(replicas: int, counts: tuple[int, ...]) -> None:
    store, client = disturbed(replicas)
    client.after = [once(publishes(SILENCE))]
    assert await store.append(writes(*counts)) == sum(counts)
    assert len(client.wire.stream.log) == sum(counts)


@pytest.mark.parametrize("counts", [(3,), (1, 2)])
async def test_a_batch_of_which_the_server_kept_a_part_is_not_called_stored(counts: tuple[int, ...]) -> None:
    """As nats-server 2.15.1 does when `max_bytes` is lowered onto a batch."""

    def tear(subject: str, payload: bytes) -> bytes | None:
        if not subject.startswith("shop."):
            return None
        client.wire.stream.log.pop()
        return SILENCE

    store, client = disturbed()
    client.after = [once(tear)]
    with pytest.raises(SaveTorn, match="only a part of a save"):
        await store.append(writes(*counts))
    assert len(client.wire.stream.log) == 2


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"+OK", b"[]", b"7", b"null", b"{}", b'{"seq":null}', b'{"error":7}', b'{"error":{}}', b'{"error":"no"}',
     b'{"error":{"code":"x"}}', b'{"error":{"code":400}}'],
)  # fmt: skip
async def test_an_answer_that_cannot_be_read_decides_nothing(nonsense: bytes) -> None:
    store, client = disturbed()
    client.after = [once(publishes(nonsense))]
    assert await store.append(writes(1)) == 1
    assert len(client.wire.stream.log) == 1


async def test_a_refusal_of_a_deposed_leader_does_not_hide_what_its_successor_stored() -> None:
    for code in (10071, 10164):
        store, client = disturbed(replicas=3)
        client.after = [
            once(publishes(orjson.dumps({"error": {"code": 400, "err_code": code, "description": "wrong"}})))
        ]
        assert await store.append(writes(1)) == 1
        assert len(client.wire.stream.log) == 1


async def test_a_definite_refusal_names_its_reason_at_once() -> None:
    store, client = disturbed()
    full = {"error": {"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}}
    client.before = [publishes(orjson.dumps(full))]
    with pytest.raises(Refused, match="maximum bytes exceeded"):
        await store.append(writes(1))


async def test_a_denied_save_is_forbidden() -> None:
    def denied(subject: str, payload: bytes) -> bytes | None:
        raise Forbidden(subject, "permissions violation")

    store, client = disturbed()
    client.before = [denied]
    with pytest.raises(Forbidden):
        await store.append(writes(1))


async def test_the_conflict_names_the_aggregate_that_moved_on() -> None:
    store, _ = disturbed()
    await store.append([Append("thing", "t-1", 0, 0, (event(),))])
    with pytest.raises(ConcurrencyConflict, match=r"shop\.thing\.t-1"):
        await store.append(writes(1, 1))


@pytest.mark.parametrize("status", ["408", "400", "503"])
async def test_a_status_that_is_not_an_end_is_not_an_empty_history(status: str) -> None:
    class Refusing(SimulatedClient):
        async def stream(self, request: Request[Any]) -> AsyncGenerator[list[Frame]]:
            yield [frame(b"", f"NATS/1.0 {status}\r\n\r\n".encode())]

    store, client = disturbed()
    store.reach(Refusing(client.wire, REQUEST_S))
    with pytest.raises(StoreUnavailable, match=status):
        await store.history("thing", "t-0", after=1)
    with pytest.raises(StoreUnavailable, match=status):
        _ = [record async for record in store.records()]
