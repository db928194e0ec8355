"""`StoreContract`: the promises of an `EventStore`, as tests that every store must pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import pytest

from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.headers import EXPECTED, MSG_ID, SCHEMA, TYPE, VERSION, RawRecord, header, header_lines
from eventjet.commands.history import History
from eventjet.domain.identity import new_event_id
from eventjet.errors import ConcurrencyConflict, Refused, StoreUnavailable
from eventjet.log.store import Append, EventStore, NewEvent

T = TypeVar("T")
_PATIENT_S = 60.0


def new(body: bytes = b'{"n":1}', **context: str) -> NewEvent:
    """Return a new event with this body and these headers."""
    return NewEvent(new_event_id(), EncodedEvent("thing.happened", 1, body), header_lines(context.items()))


def write(aggregate_id: str, expected: int, version: int, *events: NewEvent, aggregate: str = "thing") -> Append:
    """Return a save of these events, or of a new one, after the event at position `expected` with this version."""
    return Append(aggregate, aggregate_id, expected, version, events or (new(),))


async def history_of(
    store: EventStore, aggregate_id: str, *, after: int = 0, limit: int | None = None
) -> Sequence[RawRecord]:
    """Return what `EventStore.history` does, once the replica that is asked has the last event that the leader has."""
    history = History(store, "thing", aggregate_id, await store.last("thing", aggregate_id))
    async with asyncio.timeout(_PATIENT_S):
        while True:
            with suppress(StoreUnavailable):
                return await history.page(after, limit)


async def comes_to(read: Callable[[], Awaitable[T]], expected: T) -> None:
    """Assert that a read which may lag returns what is expected, in the end."""
    result = await read()
    until = time.monotonic() + _PATIENT_S
    while result != expected and time.monotonic() < until:
        await asyncio.sleep(0.01)
        result = await read()
    assert result == expected


class StoreContract:
    """Tests of `append`, `history`, `last`, `newest_of`, `records` and `state` of an `eventjet.log.store.EventStore`.

    A store's test class inherits the tests and provides a fixture `store` with a new store for each. The tests are
    coroutines, for pytest-asyncio.

    ```python
    import pytest

    from eventjet.log.memory import MemoryStore


    class TestMemoryStore(StoreContract):
        @pytest.fixture
        def store(self) -> MemoryStore:
            return MemoryStore("shop")
    ```
    """

    async def test_an_empty_history_is_empty(self, store: EventStore) -> None:
        assert await history_of(store, "nobody") == []
        assert await store.last("thing", "nobody") == 0

    async def test_an_event_is_read_back_with_all_its_headers(self, store: EventStore) -> None:
        event = new(b'{"amount":"1.50"}', **{"Ej-Command": "c-1", "traceparent": "00-a-b-01"})
        position = await store.append([write("a", 0, 0, event)])
        ((stored_position, time_ns, subject, block, body),) = await history_of(store, "a")
        assert (stored_position, body) == (position, b'{"amount":"1.50"}')
        assert subject.endswith(b".thing.a")
        assert time_ns > 1_600_000_000_000_000_000
        names = (MSG_ID, EXPECTED, TYPE, SCHEMA, VERSION, "Ej-Command", "traceparent")
        assert [header(block, name) for name in names] == [
            event.event_id, "0", "thing.happened", "1", "1", "c-1", "00-a-b-01",
        ]  # fmt: skip

    async def test_several_events_are_stored_together_and_in_order(self, store: EventStore) -> None:
        last = await store.append([write("many", 0, 0, new(b"1"), new(b"2"), new(b"3"))])
        records = await history_of(store, "many")
        assert [record[0] for record in records] == [last - 2, last - 1, last]
        assert [record[4] for record in records] == [b"1", b"2", b"3"]
        assert [header(record[3], VERSION) for record in records] == ["1", "2", "3"]
        assert [header(record[3], EXPECTED) for record in records] == ["0", None, None]

    async def test_a_second_save_follows_the_first(self, store: EventStore) -> None:
        first = await store.append([write("b", 0, 0)])
        second = await store.append([write("b", first, 1)])
        assert second > first
        assert await store.last("thing", "b") == second
        assert [record[0] for record in await history_of(store, "b", after=first)] == [second]

    async def test_the_last_records_of_many_aggregates_are_read_at_once(self, store: EventStore) -> None:
        last = await store.append([write(f"x-{number}", 0, 0, new(), new()) for number in range(400)])
        keys = [("thing", f"x-{number}") for number in (399, *range(10))]

        async def newest() -> dict[tuple[str, str], int]:
            records = await store.newest_of([*keys, ("thing", "nobody")])
            return {key: record[0] for key, record in records.items()}

        positions = {("thing", f"x-{number}"): last - 2 * (399 - number) for number in (399, *range(10))}
        await comes_to(newest, positions)
        assert await store.newest_of([("thing", "nobody")]) == {}

    async def test_a_stale_expectation_is_a_conflict_and_stores_nothing(self, store: EventStore) -> None:
        first = await store.append([write("c", 0, 0)])
        for expected in (0, first + 100):
            with pytest.raises(ConcurrencyConflict):
                await store.append([write("c", expected, 0)])
        assert await store.last("thing", "c") == first

    async def test_exactly_one_of_racing_saves_succeeds(self, store: EventStore) -> None:
        results = await asyncio.gather(*(store.append([write("race", 0, 0)]) for _ in range(8)), return_exceptions=True)
        assert sum(isinstance(result, int) for result in results) == 1
        assert sum(isinstance(result, ConcurrencyConflict) for result in results) == 7
        assert len(await history_of(store, "race")) == 1

    async def test_a_save_of_several_aggregates_is_all_or_nothing(self, store: EventStore) -> None:
        first = await store.append([write("d", 0, 0)])
        with pytest.raises(ConcurrencyConflict):
            await store.append([write("e", 0, 0), write("d", 0, 0)])
        assert await history_of(store, "e") == []
        last = await store.append([write("e", 0, 0, new(), new()), write("d", first, 1)])
        assert [record[0] for record in await history_of(store, "e")] == [last - 2, last - 1]
        assert await store.last("thing", "d") == last

    async def test_each_concurrent_save_is_stored_whole_or_gets_its_own_conflict(self, store: EventStore) -> None:
        await store.append([write("taken", 0, 0)])
        names = [("taken" if number in (3, 11) else f"m{number}", f"n{number}") for number in range(24)]
        saves = [[write(first_id, 0, 0, new(), new()), write(second_id, 0, 0)] for first_id, second_id in names]
        results = await asyncio.gather(*map(store.append, saves), return_exceptions=True)
        for (first_id, second_id), result in zip(names, results, strict=True):
            positions = [
                record[0] for aggregate_id in (first_id, second_id) for record in await history_of(store, aggregate_id)
            ]
            if first_id == "taken":
                assert isinstance(result, ConcurrencyConflict)
                assert "taken" in result.subject
                assert len(positions) == 1
            else:
                assert isinstance(result, int)
                assert positions == [result - 2, result - 1, result]

    @pytest.mark.parametrize("aggregate_id", ["*", ">", "a.b", "a b", "\x01", "ä", "$JS", "..", "a\r\nb", "=41"])
    async def test_a_hostile_id_reaches_its_own_history_only(self, store: EventStore, aggregate_id: str) -> None:
        await store.append([write("plain", await store.last("thing", "plain"), 0)])
        position = await store.append([write(aggregate_id, 0, 0)])
        assert [record[0] for record in await history_of(store, aggregate_id)] == [position]

    @pytest.mark.parametrize("aggregate_id", ["", "x" * 201, "ä" * 40, "\ud800", "a\0b"])
    async def test_an_impossible_id_is_refused_before_it_is_sent(self, store: EventStore, aggregate_id: str) -> None:
        before = (await store.state()).last
        with pytest.raises(Refused):
            await store.append([write(aggregate_id, 0, 0)])
        assert (await store.state()).last == before

    async def test_an_oversize_event_is_refused_and_the_next_is_stored(self, store: EventStore) -> None:
        with pytest.raises(Refused, match="900,000"):
            await store.append([write("big", 0, 0, new(b"x" * 900_000))])
        largest = b"x" * 899_500
        await store.append([write("big", 0, 0, new(largest))])
        assert (await history_of(store, "big"))[0][4] == largest

    async def test_an_empty_save_and_a_doubled_aggregate_are_refused(self, store: EventStore) -> None:
        for writes in ([], [Append("thing", "f", 0, 0, ())], [write("f", 0, 0), write("f", 0, 0)]):
            with pytest.raises(Refused):
                await store.append(writes)
        with pytest.raises(Refused, match="1000 is the limit"):
            await store.append([write("f", 0, 0, *(new() for _ in range(1_001)))])
        assert await history_of(store, "f") == []

    async def test_the_whole_log_is_read_in_order_and_without_gaps(self, store: EventStore) -> None:
        for number in range(5):
            await store.append([write(f"log-{number}", 0, 0)])
        state = await store.state()
        assert [record[0] async for record in store.records()] == list(range(state.first, state.last + 1))
        assert [record[0] async for record in store.records(start=state.last)] == [state.last]

    async def test_a_reading_of_the_log_ends_where_it_is_to(self, store: EventStore) -> None:
        last = await store.append([write("ended", 0, 0, *(new() for _ in range(5)))])
        first = last - 4
        for start, until, expected in (
            (first, first + 2, [first, first + 1, first + 2]),
            (last, last, [last]),
            (first + 3, last + 9, [last - 1, last]),
            (first, first - 1, []),
            (last + 1, last + 1, []),
        ):
            assert [record[0] async for record in store.records(start=start, until=until)] == expected
        following = [record[0] async for record in store.records(start=first, until=last, follow=True)]
        assert following == list(range(first, last + 1))

    async def test_a_follower_ends_where_it_is_to_once_the_log_has_come_so_far(self, store: EventStore) -> None:
        last = (await store.state()).last

        async def read() -> list[int]:
            return [record[0] async for record in store.records(start=last + 1, until=last + 2, follow=True)]

        following = asyncio.ensure_future(read())
        for number in range(3):
            await store.append([write(f"so-far-{number}", 0, 0)])
        async with asyncio.timeout(_PATIENT_S):
            assert await following == [last + 1, last + 2]

    async def test_a_follower_is_given_what_comes_later(self, store: EventStore) -> None:
        start = (await store.state()).last + 1
        follower = aiter(store.records(start=start, follow=True))
        waiting = asyncio.ensure_future(anext(follower))
        position = await store.append([write("later", 0, 0)])
        async with asyncio.timeout(_PATIENT_S):
            assert (await waiting)[0] == position

    async def test_a_long_history_comes_whole(self, store: EventStore) -> None:
        position = 0
        for batch in range(3):
            events = [new(b"%d" % number) for number in range(400)]
            position = await store.append([write("long", position, batch * 400, *events)])
        records = await history_of(store, "long")
        assert [int(header(record[3], VERSION) or 0) for record in records] == list(range(1, 1201))

    async def test_a_page_holds_no_more_than_was_asked_for(self, store: EventStore) -> None:
        first = await store.append([write("paged", 0, 0, *(new(b"%d" % number) for number in range(5)))]) - 4
        await store.append([write("between", 0, 0)])
        last = await store.append([write("paged", first + 4, 5)])
        for after, limit, expected in (
            (0, 1, [first]),
            (first, 2, [first + 1, first + 2]),
            (first + 3, 10, [first + 4, last]),
            (first + 4, 1, [last]),
            (last, 1, []),
            (0, 0, []),
        ):
            records = await history_of(store, "paged", after=after, limit=limit)
            assert [record[0] for record in records] == expected

        async def positions_from(start: int) -> list[int]:
            return [record[0] for record in await store.records_from(start, 3)]

        await comes_to(lambda: positions_from(first + 3), [first + 3, first + 4, first + 5])
        await comes_to(lambda: positions_from(last), [last])
        assert await store.records_from(last + 1, 3) == []

    async def test_a_cancelled_save_is_not_abandoned(self, store: EventStore) -> None:
        start = (await store.state()).last + 1
        saving = asyncio.ensure_future(store.append([write("cancelled", 0, 0)]))
        await asyncio.sleep(0)
        saving.cancel()
        async with asyncio.timeout(_PATIENT_S):
            await anext(aiter(store.records(start=start, follow=True)))
        assert len(await history_of(store, "cancelled")) == 1
