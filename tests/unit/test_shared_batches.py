"""Saves that share a batch: each has the outcome that it would have alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson

from eventjet.codec.headers import BATCH_ID, header, open_batch, save_of
from eventjet.errors import ConcurrencyConflict, Refused
from eventjet.log.publish import EVENTS_MAX
from eventjet.log.store import Append
from eventjet.nats.protocol import Frame
from tests.simulation.store import SimulatedClient, SimulatedStore
from tests.simulation.wire import Wire
from tests.unit.disturbed import PATIENT_S, disturbed, once, publishes, writes


def others(*counts: int, first: int = 0, expected: int = 0) -> list[Append]:
    """Return the writes of `writes`, on other aggregates."""
    return [
        replace(write, aggregate_id=f"o-{first + number}")
        for number, write in enumerate(writes(*counts, expected=expected))
    ]


def batches(store: SimulatedStore) -> dict[str, list[str]]:
    """Return the subjects that each batch in the log wrote to."""
    subjects_of: dict[str, list[str]] = {}
    for message in store.wire.stream.log:
        subjects_of.setdefault(header(message.block, BATCH_ID) or "", []).append(message.subject)
    return subjects_of


async def test_concurrent_saves_share_a_batch() -> None:
    store, _ = disturbed()
    saves = [others(2, 1, first=10 * number) for number in range(8)]
    ends = await asyncio.gather(*map(store.append, saves))
    assert ends == [3 * number for number in range(1, 9)]
    assert [len(subjects) for subjects in batches(store).values()] == [24]
    save_ids = [save_of(message.block) for message in store.wire.stream.log]
    assert len(set(save_ids)) == 8
    assert [open_batch(message.block) is None for message in store.wire.stream.log] == [False, False, True] * 8


class SlowClient(SimulatedClient):
    """A client whose requests wait until `may` is set."""

    def __init__(self, wire: Wire, timeout_s: float) -> None:
        super().__init__(wire, timeout_s)
        self.reached = asyncio.Event()
        self.may = asyncio.Event()

    async def request(self, subject: str, *rest: Any, **options: Any) -> Frame:
        self.reached.set()
        await self.may.wait()
        return await super().request(subject, *rest, **options)


async def test_saves_made_while_a_batch_is_sent_share_the_next_batch() -> None:
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


async def test_a_conflict_of_a_save_fails_no_other_save_of_its_batch() -> None:
    store, _ = disturbed()
    await store.append(writes(1))
    saves = [others(2, first=number) for number in range(6)]
    saves[3] = writes(2)
    ends = await asyncio.gather(*map(store.append, saves), return_exceptions=True)
    assert [isinstance(end, ConcurrencyConflict) for end in ends] == [number == 3 for number in range(6)]
    assert len(store.wire.stream.log) == 1 + 5 * 2


async def test_a_refusal_of_a_save_refuses_no_other_save_of_its_batch() -> None:
    store, client = disturbed()
    store.save_timeout_s = PATIENT_S
    refused = orjson.dumps({"error": {"code": 400, "err_code": 10170, "description": "not this one"}})

    def refuse(subject: str, payload: bytes) -> bytes | None:
        return refused if "o-3" in client.sent else None

    client.before = [refuse]
    ends = await asyncio.gather(*(store.append(others(2, first=number)) for number in range(6)), return_exceptions=True)
    assert [isinstance(end, Refused) for end in ends] == [number == 3 for number in range(6)]
    assert len(store.wire.stream.log) == 5 * 2


async def test_a_shared_batch_whose_answer_is_lost_is_stored_once() -> None:
    store, client = disturbed()
    store.save_timeout_s = PATIENT_S
    lost = [publishes(b"(nonsense)")]
    client.after = [once(lost[0])]
    saves = [others(3, first=number) for number in range(5)]
    ends = await asyncio.gather(*map(store.append, saves))
    assert sorted(ends) == [3, 6, 9, 12, 15]
    assert len(store.wire.stream.log) == 15


async def test_a_cancelled_save_and_the_others_of_its_batch_are_stored_once() -> None:
    store, _ = disturbed()
    store.save_timeout_s = PATIENT_S
    tasks = [asyncio.create_task(store.append(others(2, first=number))) for number in range(5)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, asyncio.CancelledError) for end in ends] == [number == 2 for number in range(5)]
    await store.settle()
    assert len(store.wire.stream.log) == 10


async def test_a_save_of_many_events_gets_a_batch_of_its_own() -> None:
    store, _ = disturbed()
    saves = [others(2), others(EVENTS_MAX + 1, first=1), others(2, first=2), others(2, first=3)]
    await asyncio.gather(*map(store.append, saves))
    assert sorted(len(subjects) for subjects in batches(store).values()) == [6, EVENTS_MAX + 1]
