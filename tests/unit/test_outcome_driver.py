"""The JetStream store and the outcome of a save on a connection that answers nothing, or nonsense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from eventjet.errors import (
    ConcurrencyConflict,
    Forbidden,
    NoResponders,
    OutcomeUnknown,
    Refused,
    SaveTorn,
    StoreUnavailable,
)
from eventjet.jetstream.api import Request
from eventjet.log.store import Append
from eventjet.nats.protocol import Frame
from tests.simulation.store import SimulatedClient, SimulatedStore, frame
from tests.unit.disturbed import (
    LATEST_S,
    PATIENT_S,
    REQUEST_S,
    SAVE_S,
    SILENCE,
    disturbed,
    event,
    everything,
    once,
    publishes,
    writes,
)


@pytest.mark.parametrize("counts", [(1,), (3,), (1, 2, 1)], ids=["one event", "a batch", "several aggregates"])
async def test_a_save_without_an_answer_ends_one_request_after_its_deadline(counts: tuple[int, ...]) -> None:
    store, client = disturbed()
    client.before = [everything(SILENCE)]
    started = time.monotonic()
    with pytest.raises(OutcomeUnknown, match="no answer") as caught:
        await store.append(writes(*counts))
    assert SAVE_S <= time.monotonic() - started < LATEST_S
    assert len(caught.value.event_ids) == sum(counts)


@pytest.mark.parametrize("is_read_only", [True, False])
async def test_an_unknown_save_reports_a_server_that_reads_but_does_not_store(is_read_only: bool) -> None:
    store, client = disturbed()
    store.save_timeout_s = 4 * REQUEST_S
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


READS: dict[str, Callable[[SimulatedStore], Any]] = {
    "last": lambda store: store.last("thing", "t-0"),
    "newest": lambda store: store.newest("thing", "t-0"),
    "history": lambda store: store.history("thing", "t-0"),
    "state": lambda store: store.state(),
    "position_at": lambda store: store.position_at(datetime.now(UTC)),
}


class Electing(SimulatedClient):
    """A stream without a leader: the first requests have no responder."""

    left = 3

    async def request(self, subject: str, *rest: Any, **options: Any) -> Frame:
        self._elect(subject)
        return await super().request(subject, *rest, **options)

    async def stream(self, request: Request[Any], timeout_s: float | None = None) -> AsyncGenerator[list[Frame]]:
        self._elect(request.subject)
        async for frames in super().stream(request, timeout_s):
            yield frames

    def _elect(self, subject: str) -> None:
        self.left -= 1
        if self.left >= 0:
            raise NoResponders(subject)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
async def test_a_read_waits_out_an_election_for_as_long_as_a_save(read: Callable[[SimulatedStore], Any]) -> None:
    store, client = disturbed()
    store.save_timeout_s = PATIENT_S
    await store.append(writes(1))
    electing = Electing(client.wire, REQUEST_S)
    store.reach(electing)
    assert await read(store)
    store.save_timeout_s = SAVE_S
    electing.left = 1_000_000
    started = time.monotonic()
    with pytest.raises(NoResponders):
        await read(store)
    assert SAVE_S <= time.monotonic() - started < LATEST_S


async def test_resolving_an_unknown_save_does_not_store_it_twice() -> None:
    store, client = disturbed()
    client.after = [everything(SILENCE)]
    with pytest.raises(OutcomeUnknown) as caught:
        await store.append(writes(1, 2))
    client.after = []
    store.save_timeout_s = PATIENT_S
    assert await store.resolve(caught.value.writes) == 3
    assert len(client.wire.stream.log) == 3


async def test_resolving_an_unknown_save_that_was_not_stored_stores_it() -> None:
    store, client = disturbed()
    client.before = [everything(SILENCE)]
    with pytest.raises(OutcomeUnknown) as caught:
        await store.append(writes(1))
    client.before = []
    store.save_timeout_s = PATIENT_S
    assert await store.resolve(caught.value.writes) == 1


async def test_a_cancelled_save_continues_even_if_its_first_answer_was_lost() -> None:
    store, client = disturbed()
    store.save_timeout_s = PATIENT_S
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
async def test_a_batch_that_the_server_kept_in_part_is_torn(counts: tuple[int, ...]) -> None:
    """As nats-server 2.15.1 does when `max_bytes` is lowered below a batch."""

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
async def test_an_unreadable_answer_decides_nothing(nonsense: bytes) -> None:
    store, client = disturbed()
    client.after = [once(publishes(nonsense))]
    assert await store.append(writes(1)) == 1
    assert len(client.wire.stream.log) == 1


async def test_a_refusal_by_a_deposed_leader_does_not_hide_a_stored_event() -> None:
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
    def deny(subject: str, payload: bytes) -> bytes | None:
        raise Forbidden(subject, "permissions violation")

    store, client = disturbed()
    client.before = [deny]
    with pytest.raises(Forbidden):
        await store.append(writes(1))


async def test_a_conflict_names_the_aggregate_that_changed() -> None:
    store, _ = disturbed()
    await store.append([Append("thing", "t-1", 0, 0, (event(),))])
    with pytest.raises(ConcurrencyConflict, match=r"shop\.thing\.t-1"):
        await store.append(writes(1, 1))


@pytest.mark.parametrize("status", ["408", "400", "503"])
async def test_an_error_status_of_a_read_is_not_an_empty_history(status: str) -> None:
    class Refusing(SimulatedClient):
        async def stream(self, request: Request[Any], timeout_s: float | None = None) -> AsyncGenerator[list[Frame]]:
            yield [frame(b"", f"NATS/1.0 {status}\r\n\r\n".encode())]

    store, client = disturbed()
    await store.append([Append("thing", "t-0", 0, 0, (event(),))])
    store.reach(Refusing(client.wire, REQUEST_S))
    with pytest.raises(StoreUnavailable, match=status):
        await store.history("thing", "t-0", after=1)
    with pytest.raises(StoreUnavailable, match=status):
        _ = [record async for record in store.records()]
