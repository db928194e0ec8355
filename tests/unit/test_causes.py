"""What led to an event and what followed is found by the ids that events name; each look says how far it went."""

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
        """The position of the first event."""
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
        found = await effects_of(self.store, record, after)
        return drawn(found.nodes), found


def drawn(nodes: Any) -> Any:
    return [(node.record[0], drawn(node.effects)) if node.effects else node.record[0] for node in nodes]


async def test_what_followed_is_a_tree() -> None:
    log = Log()
    first = await log.add("a", Ej_Command="c-1")
    second = await log.add("b", Ej_Causation=await log.id_at(first))
    await log.add("noise", 20)
    third = await log.add("c", Ej_Causation=await log.id_at(second))
    fourth = await log.add("d", Ej_Causation="c-1")
    tree, found = await log.effects(first)
    assert tree == [(second, [third]), fourth]
    assert (found.is_end, found.cut, found.last_searched) == (True, False, fourth)
    assert (await log.effects(third))[0] == []


async def test_the_look_forward_says_how_far_it_went_and_goes_on_from_there() -> None:
    log = Log()
    first = await log.add("a")
    await log.add("noise", FORWARD)
    late = await log.add("b", Ej_Causation=await log.id_at(first))
    tree, found = await log.effects(first)
    assert (tree, found.is_end, found.last_searched) == ([], False, first + FORWARD)
    tree, found = await log.effects(first, found.last_searched)
    assert (tree, found.is_end) == ([late], True)


async def test_more_effects_than_are_listed_are_told() -> None:
    log = Log()
    first = await log.add("a")
    await log.add("b", events.EFFECTS_MAX + 1, Ej_Causation=await log.id_at(first))
    tree, found = await log.effects(first)
    assert (len(tree), found.cut) == (events.EFFECTS_MAX, True)


async def test_a_cause_far_away_is_found_by_the_time_in_its_id() -> None:
    log = Log()
    log.now -= timedelta(hours=1)
    await log.add("noise", 3_000)
    log.now = datetime.now(UTC)
    cause = await log.add("a")
    log.now += timedelta(hours=1)
    await log.add("more", 3_000)
    effect = await log.store.at(await log.add("b", Ej_Causation=await log.id_at(cause)))
    assert effect is not None
    found = await cause_of(log.store, effect, await log.id_at(cause))
    assert found.record is not None
    assert found.record[0] == cause


async def test_a_command_that_is_near_is_found_and_what_is_not_there_is_told() -> None:
    log = Log()
    first = await log.add("a", 2, Ej_Command="c%201")
    effect = await log.store.at(await log.add("b"))
    assert effect is not None
    found = await cause_of(log.store, effect, "c 1")
    assert found.record is not None
    assert found.record[0] == first + 1
    missing = await cause_of(log.store, effect, "inbox/1")
    assert missing.record is None
    assert "tells no time" in missing.searched
    unknown = await cause_of(log.store, effect, new_event_id())
    assert unknown.record is None
    assert "and about" in unknown.searched


async def test_events_of_one_save_and_of_one_command_are_neighbours() -> None:
    log = Log()
    await log.add("x", Ej_Command="c-1")
    await log.add("y")
    first = await log.add("a", 3)
    await log.add("b", 3)

    async def of(position: int) -> list[int]:
        record = await log.store.at(position)
        assert record is not None
        return [one[0] for one in await neighbours(log.store, record)]

    assert await of(first + 1) == [first, first + 2]
    assert await of(first - 1) == []
    assert await of(first - 2) == []
    large = await log.add("large", 1_000)
    assert await of(large + 500) == [*range(large + 500 - NEAR, large + 500), *range(large + 501, large + 501 + NEAR)]


def test_ids_tell_their_time() -> None:
    made = made_at(new_event_id())
    assert made is not None
    assert abs(made - datetime.now(UTC)) < timedelta(minutes=1)
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


def test_the_rows_it_touched_are_named_by_their_keys() -> None:
    found = {one.model: list(one.keys) for one in rows_touched(bank, deposited())}
    assert found == {"balances": ['["a-1"]'], "postings": ["[9]"]}


def test_a_key_function_that_raises_is_told() -> None:
    app = App("bank", aggregates=[Account], projections=[odd], upcasters=[withdrawn_has_a_reason])
    (found,) = rows_touched(app, deposited())
    assert found.reason == "Its key could not be computed: LookupError: no owner"
