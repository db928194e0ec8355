"""A version of a history is found with few reads, and pages of it are complete and in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from eventjet.codec.headers import RawRecord, header_block
from eventjet.commands.history import Bounds, Head, History, version_in
from eventjet.console.screens.aggregates import PAGE_MAX
from eventjet.log.memory import MemoryStore
from eventjet.testing.store_contract import new, write


class Counting(MemoryStore):
    """A log in memory that counts its reads of histories and the records that they returned."""

    asked = given = 0

    async def history(
        self, aggregate: str, aggregate_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[RawRecord]:
        records = await super().history(aggregate, aggregate_id, after=after, limit=limit)
        self.asked, self.given = self.asked + 1, self.given + len(records)
        return records

    def stranger(self, aggregate_id: str) -> None:
        """Add a record without a version, as other programs write them."""
        position = len(self._records) + 1
        block = header_block([("Nats-Msg-Id", f"s-{position}")])
        self._records.append((position, 1, f"shop.thing.{aggregate_id}".encode(), block, b"x"))
        self._last[f"shop.thing.{aggregate_id}"] = position


async def log_of(gaps: Sequence[int]) -> Counting:
    """Return a log with a history whose events follow these numbers of other records."""
    store = Counting("shop")
    last = other = other_version = 0
    for version, gap in enumerate(gaps):
        if gap:
            other = await store.append([write("other", other, other_version, *(new() for _ in range(gap)))])
            other_version += gap
        last = await store.append([write("a", last, version)])
    return store


async def page(store: Counting, upto: int, head: Head) -> Sequence[RawRecord]:
    return await History(store, "thing", "a").records(Bounds(version=upto, newest_first=True, limit=PAGE_MAX), head)


@pytest.mark.parametrize("gaps", [[0] * 300, [0] * 150 + [400] + [0] * 150, [(n * 7919) % 13 for n in range(300)]])
async def test_each_version_is_found_with_few_reads(gaps: list[int]) -> None:
    store = await log_of(gaps)
    head = await History(store, "thing", "a").head()
    assert head is not None
    assert (head.version, version_in(head.first)) == (len(gaps), 1)
    for version in range(1, len(gaps) + 1):
        store.asked = 0
        record = await History(store, "thing", "a").record(version, head.last)
        assert record is not None
        assert version_in(record) == version
        assert store.asked <= 2 * 12  # twice the bits of the last position
    assert await History(store, "thing", "a").record(len(gaps) + 1, head.last) is None


async def test_a_version_of_a_dense_history_is_found_at_once() -> None:
    store = await log_of([0] * 1_000)
    head = await History(store, "thing", "a").head()
    assert head is not None
    store.asked = 0
    assert await History(store, "thing", "a").record(777, head.last) is not None
    assert store.asked <= 2


async def test_pages_have_every_version_once_and_read_few_other_records() -> None:
    store = await log_of([(n * 31) % 5 for n in range(173)])
    head = await History(store, "thing", "a").head()
    assert head is not None
    upto, versions = head.version, list[int | None]()
    while upto > 0:
        store.asked = store.given = 0
        records = await page(store, upto, head)
        assert len(records) <= PAGE_MAX
        assert store.given <= store.asked + 2 * PAGE_MAX
        versions += map(version_in, records)
        upto -= PAGE_MAX
    assert versions == list(range(173, 0, -1))


async def test_records_of_other_programs_are_skipped_in_a_search_and_shown_in_pages() -> None:
    store = await log_of([1] * 60)
    store.stranger("a")
    last = await store.append([write("a", 121, 60)])
    for _ in range(70):
        store.stranger("a")
    head = await History(store, "thing", "a").head()
    assert head is not None
    assert (head.version, head.last[0], head.end) == (61, last, last + 70)
    for version in range(1, 62):
        record = await History(store, "thing", "a").record(version, head.last)
        assert record is not None
        assert version_in(record) == version
    versions = list(map(version_in, await page(store, 61, head)))
    assert [version for version in versions if version] == list(range(61, 11, -1))
    assert versions[0] is None  # behind the newest version
    assert len(versions) <= 2 * PAGE_MAX
    assert list(map(version_in, await page(store, 11, head))) == list(range(11, 0, -1))


async def test_a_history_without_versions_has_a_single_page() -> None:
    store = Counting("shop")
    assert await History(store, "thing", "a").head() is None
    for _ in range(3):
        store.stranger("a")
    head = await History(store, "thing", "a").head()
    assert head is not None
    assert (head.version, head.end) == (0, 3)
    assert [record[0] for record in await page(store, 0, head)] == [3, 2, 1]
