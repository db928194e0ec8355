"""The garbage collector during an import: objects are frozen meanwhile, and its settings are restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from eventjet import App, Imported
from eventjet.examples.bank.account import Account, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.runtime import gc_frozen, uncollected

EVENTS = 3_000


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    gc.unfreeze()
    before = gc.get_threshold()
    yield
    assert (gc.get_freeze_count(), gc.get_threshold(), gc.isenabled()) == (0, before, True)
    gc.freeze()


def app() -> App:
    return App("shop", aggregates=[Account], upcasters=[withdrawn_has_a_reason])


def opened(count: int = EVENTS) -> Iterator[Imported]:
    return (Imported(Account, f"a-{number}", Opened(owner="ada")) for number in range(count))


async def test_existing_objects_are_frozen_during_an_import_only() -> None:
    frozen: list[int] = []
    async with app().in_memory() as jet:
        await jet.append_many(opened(), source="x", progress=lambda _: frozen.append(gc.get_freeze_count()))
        assert all(frozen)
        assert gc.get_freeze_count() == 0
        with pytest.raises(ZeroDivisionError):
            await jet.append_many((imported for imported in opened() if 1 / 0), source="y")


async def test_the_last_of_two_imports_to_end_unfreezes() -> None:
    with gc_frozen():
        async with app().in_memory() as jet:
            await jet.append_many(opened(10), source="x")
        assert gc.get_freeze_count()
    assert gc.get_freeze_count() == 0


async def test_objects_that_the_application_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        numbers = [[number] for number in range(EVENTS)]  # made after the freeze, and not frozen by the import
        async with app().in_memory() as jet:
            await jet.append_many(opened(10), source="x")
        assert len(numbers) == EVENTS
        # Some of the frozen objects end meanwhile.
        assert 0 < gc.get_freeze_count() <= before
    finally:
        gc.unfreeze()


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
