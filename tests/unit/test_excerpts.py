"""A part of a history equals that part of the whole history, and takes few reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import header_block
from eventjet.codec.records import Decoder
from eventjet.commands.history import Bounds, HistoryReader, version_in
from eventjet.errors import HistoryBroken, UndecodableEvent
from eventjet.log.memory import MemoryStore
from tests.unit.test_skip_markers import Rung
from tests.unit.test_timeline import Counting

LONG = 2_000


class Written(Counting):
    """A log of the records that a test adds: see `KINDS`."""

    def put(self, subject: str, type_name: str, version: int | None, expected: int | None = None) -> int:
        position = len(self._records) + 1
        fields = [("Nats-Msg-Id", f"m-{position}")]
        if expected is not None:
            fields.append(("Nats-Expected-Last-Subject-Sequence", str(expected)))
        fields += [("Ej-Type", type_name), ("Ej-Schema", "1")]
        if version is not None:
            fields.append(("Ej-Version", str(version)))
        full = f"shop.{subject}"
        self._records.append((position, 10**18 + position, full.encode(), header_block(fields), b'{"times":1}'))
        self._last[full] = position
        return position


KINDS = {
    "event": "one of the history",
    "retired": "one of it that is passed over",
    "other": "one of another aggregate",
    "garbage": "a record of no version, that is skipped",
    "copy": "a record of an earlier or later version, that is skipped",
    "skipped": "one of the history, that is skipped",
}


def written(kinds: Sequence[tuple[str, int]]) -> tuple[Written, dict[int, str]]:
    store, skipped, version, others = Written("shop"), dict[int, str](), 0, 0
    for kind, number in kinds:
        if kind == "other":
            others += 1
            store.put("bell.b", "bell.rung", others)
        elif kind == "garbage":
            skipped[store.put("bell.a", "x", None)] = "no event"
        elif kind == "copy":
            copied_version = number if number != version + 1 else number + 1
            if copied_version <= len(store._records) + 1:  # pyright: ignore[reportPrivateUsage]  a later expectation is impossible
                skipped[store.put("bell.a", "bell.rung", copied_version)] = "a copy"
        else:
            version += 1
            last = store._last.get("shop.bell.a", 0)  # pyright: ignore[reportPrivateUsage]
            position = store.put("bell.a", "bell.gone" if kind == "retired" else "bell.rung", version, last)
            if kind == "skipped":
                skipped[position] = "wrong"
    return store, skipped


def excerpts(store: MemoryStore, skipped: dict[int, str]) -> HistoryReader:
    catalog = Catalog([Rung], retired=["bell.gone"]).of_log(skipped)
    return HistoryReader(store, "bell", Decoder(catalog), skipped)


bounds = st.builds(
    Bounds,
    after=st.integers(0, 12),
    version=st.none() | st.integers(0, 14),
    position=st.none() | st.integers(0, 30),
    newest_first=st.booleans(),
    limit=st.none() | st.integers(0, 6),
)


@example([("event", 1)] * 6 + [("other", 1), ("copy", 6), ("event", 1)], Bounds(after=5))
@given(st.lists(st.tuples(st.sampled_from(list(KINDS)), st.integers(1, 9)), max_size=25), bounds)
def test_a_part_of_a_history_equals_that_part_of_the_whole(kinds: list[tuple[str, int]], part_bounds: Bounds) -> None:
    store, skipped = written(kinds)

    async def read() -> None:
        reader = excerpts(store, skipped)
        history = await reader.read("a", Bounds())
        assert await reader.read("a", part_bounds) == part_bounds.cut(history)

    asyncio.run(read())


@example([6], [(3, None)], Bounds(after=4))
@example([6], [(6, None)], Bounds(after=5, newest_first=True, limit=1))
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 16), st.none() | st.just(True)), min_size=1, max_size=3),
    bounds,
)
def test_a_part_of_a_broken_history_lies_before_the_break_or_is_an_error(
    saves: list[int], strays: list[tuple[int, bool | None]], part_bounds: Bounds
) -> None:
    """Read saves of these numbers of events, with other events between them and strays of another program behind."""
    store, version, last = Written("shop"), 0, 0
    for count in saves:
        store.put("bell.b", "bell.rung", 1)
        before = last
        for index in range(count):
            version += 1
            last = store.put("bell.a", "bell.rung", version, before if index == 0 else None)
    sound, last_version, is_sound = version, version, True
    for stray, is_expecting in strays:
        store.put("bell.b", "bell.rung", 1)
        follows = stray == last_version + 1
        assume(is_sound or not follows)  # a run of strays looks like a history, wherever it begins
        last = store.put("bell.a", "bell.rung", stray, last if is_expecting else None)
        sound, last_version, is_sound = sound + follows, stray, is_sound and follows
    records = [record for record in store._records if record[2] == b"shop.bell.a"]  # pyright: ignore[reportPrivateUsage]
    assume(all(version_in(record) for record in records))

    async def read() -> None:
        reader = excerpts(store, {})
        before = [event for event in map(Decoder(Catalog([Rung])), records[:sound]) if event is not None]
        if sound == len(records):
            assert await reader.read("a", part_bounds) == part_bounds.cut(before)
            return
        with pytest.raises((HistoryBroken, UndecodableEvent)):
            await reader.read("a", Bounds())
        try:
            part = await reader.read("a", part_bounds)
        except (HistoryBroken, UndecodableEvent):
            return
        assert part == part_bounds.cut(before)
        is_before = (
            (part_bounds.version is not None and part_bounds.version <= max(sound, part_bounds.after))
            or (part_bounds.position is not None and part_bounds.position < records[sound][0])
            or (not part_bounds.newest_first and len(part) == part_bounds.limit)
            or part_bounds.limit == 0
        )
        assert is_before

    asyncio.run(read())


async def test_a_part_of_a_long_history_takes_few_reads_and_few_records() -> None:
    store, skipped = written([("event", 0), ("other", 0), ("other", 0)] * LONG)
    reader = excerpts(store, skipped)
    for part_bounds, records in [
        (Bounds(newest_first=True, limit=1), 2),
        (Bounds(newest_first=True, limit=10), 10),
        (Bounds(newest_first=True, limit=10, version=1_000), 10),
        (Bounds(newest_first=True, limit=10, position=3_000), 10),
        (Bounds(after=1_000, limit=10), 10),
        (Bounds(after=1_990), 10),
        (Bounds(limit=10), 10),
        (Bounds(version=10), 10),
    ]:
        store.asked = store.given = 0
        part = await reader.read("a", part_bounds)
        assert len(part) == (part_bounds.limit or 10)
        assert store.given <= records + 30, part_bounds
        assert store.asked <= 30, part_bounds


async def test_retired_events_at_the_end_are_skipped_in_growing_windows() -> None:
    store, skipped = written([("event", 0)] * 3 + [("retired", 0)] * LONG)
    part = await excerpts(store, skipped).read("a", Bounds(newest_first=True, limit=2))
    assert [event.version for event in part] == [3, 2]
    assert store.asked <= 150
