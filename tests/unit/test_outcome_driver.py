"""The JetStream store around the outcome of a save: what it makes of a connection that answers nothing, or nonsense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import cast

import orjson
import pytest
from nats.aio.msg import Msg

from eventjet.codec.catalog import EncodedEvent
from eventjet.domain.ids import new_event_id
from eventjet.errors import ConcurrencyConflict, Forbidden, OutcomeUnknown, Refused, StoreUnavailable
from eventjet.nats.requests import Denied, Lost
from eventjet.store.store import Append, NewEvent
from tests.simulation.store import SimulatedClient, SimulatedRequests, SimulatedStore

REQUEST_S = 0.25
SAVE_S = 0.4
SLACK_S = 15.0
"""For a machine that is busy with other tests."""
LATEST_S = SAVE_S + REQUEST_S + SLACK_S

PATIENT_S = 30.0

Interference = Callable[[str, bytes], bytes | None]
"""(subject, payload) → what is answered instead; None for the true answer. It may raise `Lost` or `Denied`."""


def writes(*counts: int, expected: int = 0) -> list[Append]:
    """A save of some aggregates with so many events each."""
    return [
        Append("thing", f"t-{number}", expected, 0, tuple(event() for _ in range(count)))
        for number, count in enumerate(counts)
    ]


def event() -> NewEvent:
    return NewEvent(new_event_id(), EncodedEvent("thing.happened", 1, b"{}"))


class DisturbedRequests(SimulatedRequests):
    """The simulated server, reached through whatever a test puts between."""

    before: Sequence[Interference] = ()
    """Instead of the server: the request does not reach it."""
    after: Sequence[Interference] = ()
    """Once the server has done what was asked."""

    async def ask(
        self,
        subject: str,
        payload: bytes = b"",
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        *,
        also: Collection[str] = (),
    ) -> Msg:
        for interfere in self.before:
            instead = interfere(subject, payload)
            if instead is not None:
                return await self._answer(instead, timeout_s)
        answer = await super().ask(subject, payload, headers, timeout_s, also=also)
        for interfere in self.after:
            instead = interfere(subject, payload)
            if instead is not None:
                return await self._answer(instead, timeout_s)
        return answer

    async def _answer(self, instead: bytes, timeout_s: float | None) -> Msg:
        if instead == SILENCE:
            await asyncio.sleep(timeout_s or self.timeout_s)
            raise Lost("no answer")
        return Msg(self.client, data=instead)


SILENCE = b"(silence)"


def disturbed(replicas: int = 1) -> tuple[SimulatedStore, DisturbedRequests]:
    store = SimulatedStore("shop", replicas=replicas, save_timeout_s=SAVE_S)
    requests = DisturbedRequests(store.simulated.client, REQUEST_S)
    requests.wire = store.simulated.wire
    store._requests = store.simulated = requests
    return store, requests


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
    store, requests = disturbed()
    requests.before = [everything(SILENCE)]
    started = time.monotonic()
    with pytest.raises(OutcomeUnknown, match="no answer") as caught:
        await store.append(writes(*counts))
    assert SAVE_S <= time.monotonic() - started < LATEST_S
    assert len(caught.value.event_ids) == sum(counts)


@pytest.mark.parametrize("counts", [(1,), (3,)], ids=["one event", "a batch"])
async def test_a_connection_that_takes_nothing_does_not_hold_a_save_longer(counts: tuple[int, ...]) -> None:
    store, requests = disturbed()
    released = False

    class Stuck(DisturbedRequests):
        async def ask(self, *_: object, **__: object) -> Msg:
            while not released:
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:  # as nats-py does while it flushes
                    continue
            raise Lost("released")

    store._requests = Stuck(requests.client, REQUEST_S)
    full = cast("SimulatedClient", store._client)
    full.pending_data_size = 2 << 20
    started = time.monotonic()
    with pytest.raises(OutcomeUnknown):
        await store.append(writes(*counts))
    assert time.monotonic() - started < LATEST_S
    released = True
    await store.settle()


async def test_what_became_of_an_unknown_save_is_resolved_without_storing_it_twice() -> None:
    store, requests = disturbed()
    requests.after = [everything(SILENCE)]
    with pytest.raises(OutcomeUnknown) as caught:
        await store.append(writes(1, 2))
    requests.after = []
    store._save_timeout_s = PATIENT_S
    assert await store.resolve(caught.value.writes) == 3
    assert len(requests.wire.stream.log) == 3


async def test_an_unknown_save_that_was_never_stored_is_stored_when_it_is_resolved() -> None:
    store, requests = disturbed()
    requests.before = [everything(SILENCE)]
    with pytest.raises(OutcomeUnknown) as caught:
        await store.append(writes(1))
    requests.before = []
    store._save_timeout_s = PATIENT_S
    assert await store.resolve(caught.value.writes) == 1


async def test_a_cancelled_save_goes_on_even_when_its_first_answer_was_lost() -> None:
    store, requests = disturbed()
    store._save_timeout_s = PATIENT_S
    requests.before = [once(publishes(SILENCE))]
    saving = asyncio.ensure_future(store.append(writes(2)))
    await asyncio.sleep(0.01)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    await store.settle()
    assert len(requests.wire.stream.log) == 2


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("counts", [(1,), (3,), (1, 2)])
async def test_a_lost_acknowledgement_is_found_in_the_slot(replicas: int, counts: tuple[int, ...]) -> None:
    store, requests = disturbed(replicas)
    requests.after = [once(publishes(SILENCE))]
    assert await store.append(writes(*counts)) == sum(counts)
    assert len(requests.wire.stream.log) == sum(counts)


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"+OK", b"[]", b"7", b"null", b"{}", b'{"seq":null}', b'{"error":7}', b'{"error":{}}', b'{"error":"no"}',
     b'{"error":{"code":"x"}}', b'{"error":{"code":400}}'],
)  # fmt: skip
async def test_an_answer_that_cannot_be_read_decides_nothing(nonsense: bytes) -> None:
    store, requests = disturbed()
    requests.after = [once(publishes(nonsense))]
    assert await store.append(writes(1)) == 1
    assert len(requests.wire.stream.log) == 1


async def test_a_refusal_of_a_deposed_leader_does_not_hide_what_its_successor_stored() -> None:
    for code in (10071, 10164):
        store, requests = disturbed(replicas=3)
        requests.after = [
            once(publishes(orjson.dumps({"error": {"code": 400, "err_code": code, "description": "wrong"}})))
        ]
        assert await store.append(writes(1)) == 1
        assert len(requests.wire.stream.log) == 1


async def test_a_definite_refusal_names_its_reason_at_once() -> None:
    store, requests = disturbed()
    full = {"error": {"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}}
    requests.before = [publishes(orjson.dumps(full))]
    with pytest.raises(Refused, match="maximum bytes exceeded"):
        await store.append(writes(1))


async def test_a_denied_save_is_forbidden() -> None:
    def denied(subject: str, payload: bytes) -> bytes | None:
        raise Denied("permissions violation")

    store, requests = disturbed()
    requests.before = [denied]
    with pytest.raises(Forbidden):
        await store.append(writes(1))


async def test_the_conflict_names_the_aggregate_that_moved_on() -> None:
    store, _ = disturbed()
    await store.append([Append("thing", "t-1", 0, 0, (event(),))])
    with pytest.raises(ConcurrencyConflict, match=r"shop\.thing\.t-1"):
        await store.append(writes(1, 1))


@pytest.mark.parametrize("status", ["408", "400", "503"])
async def test_a_status_that_is_not_an_end_is_not_an_empty_history(status: str) -> None:
    store, requests = disturbed()

    class Refusing(DisturbedRequests):
        async def gather(self, subject: str, payload: bytes) -> tuple[list[Msg], Msg]:
            return [], Msg(self.client, headers={"Status": status})

    refusing = Refusing(requests.client, REQUEST_S)
    refusing.wire = requests.wire
    store._requests = refusing
    with pytest.raises(StoreUnavailable, match=status):
        await store.history("thing", "t-0", after=1)
    with pytest.raises(StoreUnavailable, match=status):
        _ = [record async for record in store.records()]


async def test_a_connection_that_takes_nothing_holds_no_read_longer_than_a_request() -> None:
    store, requests = disturbed()
    cast("SimulatedClient", store._client).pending_data_size = 2 << 20
    for read in (store.history("thing", "t-0", after=1), store.last("thing", "t-0"), store.newest("thing", "t-0")):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await read
        assert time.monotonic() - started < REQUEST_S + SLACK_S
    assert not requests.wire.stream.log
