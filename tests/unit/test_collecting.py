"""What eventjet asks of the collector of cycles: an import leaves it nothing to look at, and all as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from eventjet import App, Imported
from eventjet.commands.importing import NEVER, Place, Places
from eventjet.examples.bank.account import Account, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.runtime import settled, uncollected

EVENTS = 3_000


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    gc.unfreeze()  # a test before it may have run a worker here
    before = gc.get_threshold()
    yield
    assert (gc.get_freeze_count(), gc.get_threshold(), gc.isenabled()) == (0, before, True)


def app() -> App:
    return App("shop", aggregates=[Account], upcasters=[withdrawn_has_a_reason])


def opened(count: int = EVENTS) -> Iterator[Imported]:
    return (Imported(Account, f"a-{number}", Opened(owner="ada")) for number in range(count))


async def test_what_is_there_is_passed_over_during_an_import_and_looked_at_again_after_it() -> None:
    frozen: list[int] = []
    async with app().in_memory() as jet:
        await jet.append_many(opened(), source="x", progress=lambda _: frozen.append(gc.get_freeze_count()))
        assert all(frozen)
        assert gc.get_freeze_count() == 0
        with pytest.raises(ZeroDivisionError):
            await jet.append_many((one for one in opened() if 1 / 0), source="y")


async def test_of_two_imports_the_last_to_end_puts_it_back() -> None:
    with settled():
        async with app().in_memory() as jet:
            await jet.append_many(opened(10), source="x")
        assert gc.get_freeze_count()
    assert gc.get_freeze_count() == 0


async def test_what_the_application_froze_itself_stays_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        kept = [[number] for number in range(EVENTS)]  # made after it, and not frozen by the import
        async with app().in_memory() as jet:
            await jet.append_many(opened(10), source="x")
        assert len(kept) == EVENTS
        # Some of them end meanwhile.
        assert 0 < gc.get_freeze_count() <= before
    finally:
        gc.unfreeze()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_an_import_knows_of_its_aggregates_is_nothing_to_collect() -> None:
    places = Places()
    for number in range(EVENTS):
        key = ("account", f"a-{number}")
        assert places.next_ordinal(key) == 1
        places.put(key, Place(number + 1, 1, 1, datetime(2026, 5, 1, tzinfo=UTC)))
    (rows,) = places._rows.values()  # pyright: ignore[reportPrivateUsage]
    assert len(rows) == EVENTS
    assert not gc.is_tracked(rows)


def test_a_place_is_what_was_put_there() -> None:
    places, key, other = Places(), ("account", "a"), ("account", "b")
    assert not places.is_known(key)
    assert places.of(key) == Place(0, 0, 0, NEVER)
    assert (places.next_ordinal(key), places.next_ordinal(other), places.next_ordinal(key)) == (1, 1, 2)
    times = (NEVER, datetime.max.replace(tzinfo=UTC), datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC))
    for place in [Place(2**63 - 1, 7, 3, at) for at in times]:
        places.put(key, place)
        assert places.is_known(key)
        assert places.of(key) == place
        assert places.of(key).at + timedelta(0) == place.at
    assert not places.is_known(other)
    assert not places.is_known(("till", "a"))
