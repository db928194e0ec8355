"""The promises of a history between bounds, over any store: the requested events, from either end, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest

from eventjet.codec.catalog import EncodedEvent
from eventjet.domain.identity import new_event_id
from eventjet.domain.recorded import Recorded
from eventjet.errors import HistoryBroken, Refused, UndecodableEvent, UsageError
from eventjet.examples.bank.account import Account, AccountEvent
from eventjet.log.store import EventStore, NewEvent
from eventjet.testing.store_contract import write
from tests.contracts.repository_contract import Accounts, repository

EVENTS = 12


class Looked:
    """A store that records its requests, and how many records it read for them."""

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self.asked: list[str] = []
        self.records = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def history(self, *rest: Any, **bounds: Any) -> Any:
        records = await self._store.history(*rest, **bounds)
        self.asked.append("history")
        self.records += len(records)
        return records

    async def newest(self, *rest: Any) -> Any:
        self.asked.append("newest")
        return await self._store.newest(*rest)


async def filled(accounts: Accounts) -> list[Recorded[AccountEvent]]:
    """Write a history of which every event but the first has others before it in the log."""
    for number in range(EVENTS):
        await accounts.execute("a", Account.deposit, Decimal(number + 1))
        for _ in range(number % 3):
            await accounts.execute("other", Account.deposit, Decimal(1))
    return await accounts.history("a")


def versions(events: Sequence[Recorded[Any]]) -> list[int]:
    return [event.version for event in events]


class HistoryContract:
    async def test_the_bounds_of_a_history_are_versions_and_positions(self, accounts: Accounts) -> None:
        every = await filled(accounts)
        assert versions(every) == list(range(1, EVENTS + 1))
        assert await accounts.history("a", after=3, version=5) == every[3:5]
        assert await accounts.history("a", after=EVENTS - 1) == every[-1:]
        assert await accounts.history("a", version=2) == every[:2]
        assert await accounts.history("a", position=every[6].position) == every[:7]
        assert await accounts.history("a", position=every[6].position - 1, after=4) == every[4:6]
        assert await accounts.history("a", version=EVENTS + 5) == every
        assert await accounts.history("a", position=every[-1].position + 100) == every
        none: list[dict[str, Any]] = [{"after": EVENTS}, {"after": EVENTS + 9}, {"version": 0}]
        none += [{"position": 0}, {"limit": 0}]
        for nothing in none:
            assert await accounts.history("a", **nothing) == []
            assert await accounts.history("a", **nothing, newest_first=True) == []
        assert await accounts.history("a", after=5, version=5) == await accounts.history("a", after=6, version=5) == []

    async def test_a_history_is_limited_at_the_end_it_begins_with(self, accounts: Accounts) -> None:
        every = await filled(accounts)
        assert await accounts.history("a", limit=4) == every[:4]
        assert await accounts.history("a", limit=1, after=4) == every[4:5]
        assert await accounts.history("a", limit=EVENTS + 1) == every
        assert await accounts.history("a", newest_first=True) == every[::-1]
        assert await accounts.history("a", newest_first=True, limit=1) == every[:-2:-1]
        assert await accounts.history("a", newest_first=True, limit=3) == every[:-4:-1]
        assert await accounts.history("a", newest_first=True, limit=3, after=EVENTS - 2) == every[:-3:-1]
        assert await accounts.history("a", newest_first=True, limit=2, version=7) == [every[6], every[5]]
        assert await accounts.history("a", newest_first=True, limit=2, position=every[4].position) == [
            every[4],
            every[3],
        ]
        assert await accounts.history("a", newest_first=True, limit=99, version=3) == every[2::-1]

    async def test_an_aggregate_without_events_has_an_empty_part_of_a_history(self, accounts: Accounts) -> None:
        for part in ({"after": 1}, {"newest_first": True, "limit": 1}, {"newest_first": True, "limit": 2}):
            assert await accounts.history("nobody", **part) == []  # pyright: ignore[reportArgumentType]

    async def test_the_last_event_takes_two_reads_and_others_few(
        self, app: str, store: EventStore, accounts: Accounts
    ) -> None:
        every = await filled(accounts)
        counting: Any = Looked(store)
        reader = repository(app, counting)
        assert await reader.history("a", newest_first=True, limit=1) == every[-1:]
        assert (counting.asked, counting.records) == (["newest", "history"], 2)
        counting.records = 0
        assert await reader.history("a", limit=2) == every[:2]
        assert counting.records == 2
        counting.records = 0
        assert await reader.history("a", after=EVENTS - 3, newest_first=True, limit=2) == every[:-3:-1]
        # Both ends, the looks for a version, the two, and the one before them.
        assert counting.records <= 1 + 2 * 7 + 2 + 1

    @pytest.mark.parametrize("told", [1, 2, EVENTS - 1, EVENTS, EVENTS + 2, EVENTS + 40])
    async def test_a_last_record_of_another_version_is_an_error_as_for_loading(
        self, store: EventStore, accounts: Accounts, told: int
    ) -> None:
        """The events before it are not returned as if they were all."""
        every = await filled(accounts)
        last = every[-1].position
        stray = NewEvent(new_event_id(), EncodedEvent("account.deposited", 1, b'{"amount":"9"}'))
        await store.append([write("a", last, told - 1, stray, aggregate="account")])
        with pytest.raises((HistoryBroken, UndecodableEvent)) as broken:
            await accounts.load("a")
        for bounds in (
            *({"after": after} for after in range(EVENTS + 2)),
            *({"after": after, "limit": 5, "newest_first": True} for after in range(EVENTS + 2)),
            *({"newest_first": True, "limit": limit} for limit in (1, 2, 5, 50)),
            {"after": EVENTS + 50},
            {},
        ):
            with pytest.raises(type(broken.value)):
                await accounts.history("a", **bounds)
        assert await accounts.history("a", version=EVENTS) == every
        assert await accounts.history("a", position=last) == every
        assert await accounts.history("a", limit=3) == every[:3]

    @pytest.mark.parametrize("bounds", [{"after": -1}, {"limit": -1}, {"version": "3"}, {"position": 1.0}])
    async def test_an_invalid_bound_of_a_history_is_refused(self, accounts: Accounts, bounds: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match=next(iter(bounds))):
            await accounts.history("a", **bounds)
        with pytest.raises(Refused):
            await accounts.history("", limit=1)
