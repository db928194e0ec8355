"""Resolutions of quarantined events while a busy owner keeps moving its cursor."""

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
    """Cursors whose owner moves them at each read of the quarantine, and at first changes an entry, too."""

    def __init__(self, changes: int = 0) -> None:
        client: Any = None
        super().__init__(client, "app")
        self.at = 1
        self.changes = changes
        self.entry = QuarantinedEntry(Quarantined(7, "thing", "one", "", "", QUARANTINED), sequence=7)
        self.decided: list[str] = []

    async def read(self, name: str) -> StoredCursor:
        return StoredCursor(Cursor(name, "reactor", "log"), self.at)

    async def quarantined(self, name: str, *, resolved: bool = False) -> list[QuarantinedEntry]:
        self.at += 1
        entry = self.entry
        if self.changes:
            self.changes -= 1
            self.entry = QuarantinedEntry(entry.event, tries=entry.tries + 1, sequence=entry.sequence + 1)
        return [entry]

    async def decide(self, stored: StoredCursor, cursor: Cursor, entries: Sequence[QuarantinedEntry]) -> None:
        if stored.sequence != self.at or [entry.sequence for entry in entries] != [self.entry.sequence]:
            raise CursorFenced(cursor.name)
        self.decided += [entry.event.resolution for entry in entries]


async def test_a_resolution_is_written_although_the_cursor_moves_meanwhile() -> None:
    cursors = Busy()
    assert await cursor_control.retry(cursors, "echo", None) == [7]
    assert await cursor_control.drop(cursors, "echo", [7]) == [7]
    assert cursors.decided == [RETRY, DROPPED]


async def test_a_resolution_of_a_changed_entry_reads_it_again() -> None:
    cursors = Busy(changes=3)
    assert await cursor_control.retry(cursors, "echo", [7]) == [7]
    assert (cursors.decided, cursors.changes) == ([RETRY], 0)


async def test_entries_of_a_lost_log_are_dropped_although_the_cursor_moves() -> None:
    async def nothing(position: int) -> None:
        return None

    cursors = Busy()
    assert await cursor_control.give_up_lost(cursors, "echo", "another", nothing) == [7]
    assert cursors.decided == [DROPPED]


@pytest.mark.parametrize("sequence", [0, 12])
def test_the_sequence_of_an_entry_is_no_part_of_its_value(sequence: int) -> None:
    entry = QuarantinedEntry(Quarantined(7, "thing", "one", "", "", QUARANTINED), sequence=3)
    assert QuarantinedEntry.decoded(entry.encoded(), sequence).sequence == sequence
