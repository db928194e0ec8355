"""A part of a history is what it would be of the whole one, whatever lies between its events, and costs few looks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from eventjet.codec.catalog import Catalog
from eventjet.codec.decoder import Decoder
from eventjet.codec.envelope import header_block
from eventjet.repository.excerpts import Excerpt, Excerpts
from eventjet.store.memory import MemoryStore
from tests.unit.test_timeline import Counting
from tests.unit.test_voids import Rung

LONG = 2_000


class Written(Counting):
    """A log of what a test says: see `KINDS`."""

    def put(self, subject: str, type_name: str, version: int | None) -> int:
        position = len(self._records) + 1
        told = [("Nats-Msg-Id", f"m-{position}"), ("Ej-Type", type_name), ("Ej-Schema", "1")]
        if version is not None:
            told.append(("Ej-Version", str(version)))
        full = f"shop.{subject}"
        self._records.append((position, 10**18 + position, full.encode(), header_block(told), b'{"times":1}'))
        self._last[full] = position
        return position


KINDS = {
    "event": "one of the history",
    "retired": "one of it that is passed over",
    "other": "one of another aggregate",
    "garbage": "a record of no version, declared void",
    "copy": "a record of an earlier or later version, declared void",
    "voided": "one of the history, declared void",
}


def written(kinds: Sequence[tuple[str, int]]) -> tuple[Written, dict[int, str]]:
    store, voids, version, others = Written("shop"), dict[int, str](), 0, 0
    for kind, number in kinds:
        if kind == "other":
            others += 1
            store.put("bell.b", "bell.rung", others)
        elif kind == "garbage":
            voids[store.put("bell.a", "x", None)] = "no event"
        elif kind == "copy":
            told = number if number != version + 1 else number + 1
            if told <= len(store._records) + 1:  # pyright: ignore[reportPrivateUsage]  else it tells none
                voids[store.put("bell.a", "bell.rung", told)] = "a copy"
        else:
            version += 1
            position = store.put("bell.a", "bell.gone" if kind == "retired" else "bell.rung", version)
            if kind == "voided":
                voids[position] = "wrong"
    return store, voids


def excerpts(store: MemoryStore, voids: dict[int, str]) -> Excerpts:
    catalog = Catalog([Rung], retired=["bell.gone"]).of_log(voids)
    return Excerpts(store, "bell", Decoder(catalog), voids)


bounds = st.builds(
    Excerpt,
    after=st.integers(0, 12),
    version=st.none() | st.integers(0, 14),
    position=st.none() | st.integers(0, 30),
    newest_first=st.booleans(),
    limit=st.none() | st.integers(0, 6),
)


@example([("event", 1)] * 6 + [("other", 1), ("copy", 6), ("event", 1)], Excerpt(after=5))
@given(st.lists(st.tuples(st.sampled_from(list(KINDS)), st.integers(1, 9)), max_size=25), bounds)
def test_a_part_is_what_it_is_of_the_whole(kinds: list[tuple[str, int]], wanted: Excerpt) -> None:
    store, voids = written(kinds)

    async def read() -> None:
        there = excerpts(store, voids)
        whole = await there.read("a", Excerpt())
        assert await there.read("a", wanted) == wanted.cut(whole)

    asyncio.run(read())


async def test_a_part_of_a_long_history_costs_few_looks_and_few_records() -> None:
    store, voids = written([("event", 0), ("other", 0), ("other", 0)] * LONG)
    there = excerpts(store, voids)
    for wanted, records in [
        (Excerpt(newest_first=True, limit=1), 0),
        (Excerpt(newest_first=True, limit=10), 10),
        (Excerpt(newest_first=True, limit=10, version=1_000), 10),
        (Excerpt(newest_first=True, limit=10, position=3_000), 10),
        (Excerpt(after=1_000, limit=10), 10),
        (Excerpt(after=1_990), 10),
        (Excerpt(limit=10), 10),
        (Excerpt(version=10), 10),
    ]:
        store.asked = store.given = 0
        found = await there.read("a", wanted)
        assert len(found) == (wanted.limit or 10)
        assert store.given <= records + 30, wanted
        assert store.asked <= 30, wanted


async def test_retired_events_at_the_end_are_passed_over_in_growing_windows() -> None:
    store, voids = written([("event", 0)] * 3 + [("retired", 0)] * LONG)
    found = await excerpts(store, voids).read("a", Excerpt(newest_first=True, limit=2))
    assert [one.version for one in found] == [3, 2]
    assert store.asked <= 150


def test_what_is_cut_is_in_the_order_asked_for() -> None:
    def of(**bounds: Any) -> list[int]:
        async def read() -> list[int]:
            store, voids = written([("event", 0)] * 5)
            return [one.version for one in await excerpts(store, voids).read("a", Excerpt(**bounds))]

        return asyncio.run(read())

    assert of(newest_first=True, limit=2) == [5, 4]
    assert of(newest_first=True) == [5, 4, 3, 2, 1]
    assert of(limit=2) == [1, 2]
