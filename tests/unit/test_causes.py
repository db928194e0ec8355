"""Causes and effects of an event are found by the ids in other events; each search says how far it went."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from eventjet import App, Recorded, projection
from eventjet.codec.headers import MSG_ID, header
from eventjet.domain.identity import new_event_id
from eventjet.examples.bank.account import Account, Deposited
from eventjet.examples.bank.app import bank, withdrawn_has_a_reason
from eventjet.examples.bank.read_models import Balance, balances
from eventjet.log.memory import MemoryStore
from eventjet.operations import events
from eventjet.operations.events import FORWARD, NEAR, cause_of, effects_of, made_at, neighbours, rows_touched
from eventjet.testing.store_contract import new, write


class Log:
    """A log in memory in which each event names another as its cause."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)
        self.store = MemoryStore("shop", lambda: int(self.now.timestamp() * 1e9))
        self.last: dict[str, tuple[int, int]] = {}

    async def add(self, aggregate_id: str, count: int = 1, **context: str) -> int:
        """Append `count` events and return the position of the first."""
        position, version = self.last.get(aggregate_id, (0, 0))
        names = {name.replace("_", "-"): value for name, value in context.items()}
        for start in range(0, count, 1_000):
            events = [new(**names) for _ in range(min(1_000, count - start))]
            position = await self.store.append([write(aggregate_id, position, version, *events)])
            version += len(events)
        self.last[aggregate_id] = (position, version)
        return position - count + 1

    async def id_at(self, position: int) -> str:
        record = await self.store.at(position)
        assert record is not None
        return header(record[3], MSG_ID) or ""

    async def effects(self, position: int, after: int = 0) -> tuple[Any, events.Effects]:
        record = await self.store.at(position)
        assert record is not None
        page = await effects_of(self.store, record, after)
        return drawn(page.nodes), page


def drawn(nodes: Any) -> Any:
    return [(node.record[0], drawn(node.effects)) if node.effects else node.record[0] for node in nodes]


async def test_the_effects_of_an_event_are_a_tree() -> None:
    log = Log()
    first = await log.add("a", Ej_Command="c-1")
    second = await log.add("b", Ej_Causation=await log.id_at(first))
    await log.add("noise", 20)
    third = await log.add("c", Ej_Causation=await log.id_at(second))
    fourth = await log.add("d", Ej_Causation="c-1")
    tree, page = await log.effects(first)
    assert tree == [(second, [third]), fourth]
    assert (page.is_end, page.cut, page.last_searched) == (True, False, fourth)
    assert (await log.effects(third))[0] == []


async def test_a_search_for_effects_says_how_far_it_went_and_can_be_continued() -> None:
    log = Log()
    first = await log.add("a")
    await log.add("noise", FORWARD)
    late = await log.add("b", Ej_Causation=await log.id_at(first))
    tree, page = await log.effects(first)
    assert (tree, page.is_end, page.last_searched) == ([], False, first + FORWARD)
    tree, page = await log.effects(first, page.last_searched)
    assert (tree, page.is_end) == ([late], True)


async def test_effects_beyond_the_limit_are_reported_as_cut() -> None:
    log = Log()
    first = await log.add("a")
    await log.add("b", events.EFFECTS_MAX + 1, Ej_Causation=await log.id_at(first))
    tree, page = await log.effects(first)
    assert (len(tree), page.cut) == (events.EFFECTS_MAX, True)


async def test_a_distant_cause_is_found_by_the_time_in_its_id() -> None:
    log = Log()
    log.now -= timedelta(hours=1)
    await log.add("noise", 3_000)
    log.now = datetime.now(UTC)
    cause = await log.add("a")
    log.now += timedelta(hours=1)
    await log.add("more", 3_000)
    effect = await log.store.at(await log.add("b", Ej_Causation=await log.id_at(cause)))
    assert effect is not None
    cause_result = await cause_of(log.store, effect, await log.id_at(cause))
    assert cause_result.record is not None
    assert cause_result.record[0] == cause


async def test_a_near_command_is_found_and_a_missing_cause_says_what_was_searched() -> None:
    log = Log()
    first = await log.add("a", 2, Ej_Command="c%201")
    effect = await log.store.at(await log.add("b"))
    assert effect is not None
    result = await cause_of(log.store, effect, "c 1")
    assert result.record is not None
    assert result.record[0] == first + 1
    missing = await cause_of(log.store, effect, "inbox/1")
    assert missing.record is None
    assert "tells no time" in missing.searched
    unknown = await cause_of(log.store, effect, new_event_id())
    assert unknown.record is None
    assert "and about" in unknown.searched


async def test_events_of_the_same_save_are_neighbours() -> None:
    log = Log()
    await log.add("x", Ej_Command="c-1")
    await log.add("y")
    first = await log.add("a", 3)
    await log.add("b", 3)

    async def neighbours_of(position: int) -> list[int]:
        record = await log.store.at(position)
        assert record is not None
        return [neighbour[0] for neighbour in await neighbours(log.store, record)]

    assert await neighbours_of(first + 1) == [first, first + 2]
    assert await neighbours_of(first - 1) == []
    assert await neighbours_of(first - 2) == []
    large = await log.add("large", 1_000)
    assert await neighbours_of(large + 500) == [
        *range(large + 500 - NEAR, large + 500),
        *range(large + 501, large + 501 + NEAR),
    ]


def test_the_time_of_an_event_id_can_be_read() -> None:
    created_at = made_at(new_event_id())
    assert created_at is not None
    assert abs(created_at - datetime.now(UTC)) < timedelta(minutes=1)
    for strange in (
        "",
        "x",
        "0" * 32,
        "c-1",
        "{01a20bc6-2644-7567-92d6-7780d5045266}",
        "f" * 8 + "-ffff-7fff-8fff-" + "f" * 12,
    ):
        assert strange.startswith("ffff") or made_at(strange) is None
        made_at(strange)


def deposited() -> Recorded[Any]:
    data = Deposited(amount=Decimal(1))
    return Recorded(data, "a-1", 3, 9, datetime.now(UTC), "id", "account")


def owner_of(event: Recorded[Deposited]) -> str:
    raise LookupError("no owner")


@projection("odd", table=balances.table, key=owner_of)
def odd(row: Balance | None, event: Recorded[Deposited]) -> Balance | None:
    return row


def test_the_rows_that_an_event_touched_are_named_by_their_keys() -> None:
    keys = {touched.model: list(touched.keys) for touched in rows_touched(bank, deposited())}
    assert keys == {"balances": ['["a-1"]'], "postings": ["[9]"]}


def test_an_error_of_a_key_function_is_reported_as_the_reason() -> None:
    app = App("bank", aggregates=[Account], projections=[odd], upcasters=[withdrawn_has_a_reason])
    (touched,) = rows_touched(app, deposited())
    assert touched.reason == "Its key could not be computed: LookupError: no owner"
