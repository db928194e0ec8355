"""Verdicts while a busy owner moves its cursor all the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from eventjet.domain.quarantined import DROPPED, QUARANTINED, RETRY, Quarantined
from eventjet.errors import CursorFenced
from eventjet.subscriptions import cursor_control
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import Cursors, QuarantinedEntry, StoredCursor


class Busy(Cursors):
    """Cursors whose owner moves them once while what is parked is read, and changes an entry now and then."""

    def __init__(self, changes: int = 0) -> None:
        client: Any = None
        super().__init__(client, "app")
        self.at = 1
        self.changes = changes
        self.entry = QuarantinedEntry(Quarantined(7, "thing", "one", "", "", QUARANTINED), sequence=7)
        self.decided: list[str] = []

    async def read(self, name: str) -> StoredCursor:
        return StoredCursor(Cursor(name, "reactor", "log"), self.at)

    async def parked(self, name: str, *, resolved: bool = False) -> list[QuarantinedEntry]:
        self.at += 1
        read = self.entry
        if self.changes:
            self.changes -= 1
            self.entry = QuarantinedEntry(read.parked, tries=read.tries + 1, sequence=read.sequence + 1)
        return [read]

    async def decide(self, held: StoredCursor, cursor: Cursor, entries: Sequence[QuarantinedEntry]) -> None:
        if held.sequence != self.at or [one.sequence for one in entries] != [self.entry.sequence]:
            raise CursorFenced(cursor.name)
        self.decided += [one.parked.resolution for one in entries]


async def test_a_verdict_is_written_although_the_cursor_moves_while_what_is_parked_is_read() -> None:
    cursors = Busy()
    assert await cursor_control.retry(cursors, "echo", None) == [7]
    assert await cursor_control.drop(cursors, "echo", [7]) == [7]
    assert cursors.decided == [RETRY, DROPPED]


async def test_a_verdict_on_what_has_changed_meanwhile_looks_again() -> None:
    cursors = Busy(changes=3)
    assert await cursor_control.retry(cursors, "echo", [7]) == [7]
    assert (cursors.decided, cursors.changes) == ([RETRY], 0)


async def test_what_is_lost_with_its_log_is_dropped_although_the_cursor_moves() -> None:
    async def nothing(position: int) -> None:
        return None

    cursors = Busy()
    assert await cursor_control.give_up_lost(cursors, "echo", "another", nothing) == [7]
    assert cursors.decided == [DROPPED]


@pytest.mark.parametrize("sequence", [0, 12])
def test_where_an_entry_was_read_is_no_part_of_its_value(sequence: int) -> None:
    entry = QuarantinedEntry(Quarantined(7, "thing", "one", "", "", QUARANTINED), sequence=3)
    assert QuarantinedEntry.decoded(entry.encoded(), sequence).sequence == sequence
