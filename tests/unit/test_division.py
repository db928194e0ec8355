"""When a worker divides its work: fold processes that come to nothing are tried less and less often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from eventjet.errors import FoldProcessLost
from eventjet.subscriptions.among import Among
from eventjet.subscriptions.divided import DividedReader
from eventjet.subscriptions.division import FAR, Division

BATCH_MAX = 10
LOST = FoldProcessLost("is gone")


@pytest.fixture
def division(monkeypatch: pytest.MonkeyPatch) -> Division:
    """Of a worker whose fold processes are there whenever they are asked for, and never begin."""

    async def opened(*_: object) -> object:
        return object()

    monkeypatch.setattr(DividedReader, "open", opened)
    endpoint = SimpleNamespace(with_name=lambda _: None)
    context = SimpleNamespace(
        options=SimpleNamespace(batch_max=BATCH_MAX),
        endpoint=endpoint,
        database=None,
        stream="stream",
        catalog=SimpleNamespace(voids={}),
    )
    processes = SimpleNamespace(close=lambda: None)
    among = SimpleNamespace(
        take=lambda _: True,
        leave=lambda _: None,
        processes=lambda: processes,
        app=None,
        count=2,
        is_turn_over=bool,
        committed=lambda: None,
    )
    resolved = SimpleNamespace(name="balances", revision=1, durable="balances")
    return Division(cast("Any", resolved), cast("Any", context), cast("Any", among))


async def begun(division: Division, position: int) -> None:
    """The division is opened at a position."""
    held = SimpleNamespace(position=position, location="")
    await division.open(cast("Any", held), cast("Any", SimpleNamespace(aggregates=())), cast("Any", None))


async def until_divided(division: Division, position: int) -> int:
    """How many events further the worker divides again."""
    for further in range(100_000):
        if await division.turns(False, 1_000_000, position + further):
            return further
    raise AssertionError("never")


async def lost_twice(division: Division, position: int) -> None:
    for _ in range(2):
        await until_divided(division, position)
        await begun(division, position)
        assert not division.goes_on(position, LOST)
        await division.close()


async def test_processes_that_never_begin_are_tried_after_ever_longer_stretches(division: Division) -> None:
    position, stretches = 0, list[int]()
    for _ in range(4):
        await lost_twice(division, position)
        stretches.append(await until_divided(division, position))
        position += stretches[-1]
    assert stretches == [FAR * BATCH_MAX << doubled for doubled in range(4)]


async def test_once_something_came_of_them_the_stretch_is_short_again(division: Division) -> None:
    await lost_twice(division, 0)
    position = await until_divided(division, 0)
    await begun(division, position)
    assert not await division.turns(True, 1_000_000, position + 1)
    await lost_twice(division, position + 1)
    assert await until_divided(division, position + 1) == FAR * BATCH_MAX


def test_a_turn_begins_with_what_was_first_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that begin slowly would not come to anything otherwise, and those that hang would never be lost."""
    monkeypatch.setattr("eventjet.subscriptions.among.TURN_S", -1.0)
    among = Among(2, cast("Any", None), cast("Any", SimpleNamespace(is_ready=lambda: True)))
    assert among.take("first")
    assert not among.take("second")
    assert not among.is_turn_over()
    among.committed()
    assert among.is_turn_over()
    among.leave("first")
    assert among.take("second")
    among.committed()
    assert not among.is_turn_over()  # nobody waits
