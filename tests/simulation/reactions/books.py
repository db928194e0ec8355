"""Checks of cursors and their quarantine at each write that the server stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eventjet.domain.quarantined import DROPPED, QUARANTINED, RETRIED, AggregateKey
from eventjet.domain.reactor import partition_of
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import QuarantinedEntry
from tests.simulation.reactions.streams import Stored

OPERATOR = "operator"
SLACK_S = 1e-6


class Broken(AssertionError):
    """A broken promise; the message says which, and of what."""


@dataclass(slots=True)
class Ledgers:
    """The cursor of a subscription, its last writer, and its quarantine."""

    cursor: Cursor
    writer: str = OPERATOR
    sent: dict[str, float] = field(default_factory=dict[str, float])
    """The time when each process sent its last stored write."""
    written_at: float = 0.0
    """The time when the last stored write was sent."""
    entries: dict[int, QuarantinedEntry] = field(default_factory=dict[int, QuarantinedEntry])


class Books:
    """Handled events and cursors, and the checks that they agree."""

    def __init__(self, prefix: str, lease_s: float) -> None:
        self.relevant: dict[int, AggregateKey] = {}
        """Positions that must be handled, with their keys."""
        self.first: dict[int, float] = {}
        """The order of the first successful handling of each position."""
        self.skipped: set[int] = set()
        """Positions that an operator skipped by setting a cursor beyond them, or by dropping them."""
        self.by_name: dict[str, Ledgers] = {}
        self.counts: dict[str, int] = {}
        self._prefix = prefix
        self._lease_s = lease_s
        self._order = 0.0

    def written(self, stored: Sequence[Stored], sender: str, sent_at: float) -> None:
        """Check a batch that the server has stored; raise `Broken` for a fault."""
        changes: list[tuple[str, Cursor]] = []
        for record in stored:
            kind, name, *rest = record.subject.removeprefix(self._prefix).split(".")
            if kind == "c":
                changes.append((name, Cursor.decoded(record.body)))
            elif kind == "q":
                self._entry(
                    self.by_name[name], int(rest[0]), QuarantinedEntry.decoded(record.body) if record.body else None
                )
        for name, cursor in changes:
            known = self.by_name.get(name)
            if known is None:
                self.by_name[name] = Ledgers(cursor)
                continue
            self._moved(known, cursor, sender)
            known.cursor, known.writer = cursor, sender
            known.sent[sender] = known.written_at = sent_at

    def begins(self, name: str, process: str, position: int, now: float) -> None:
        """Check that a handler may be called; raise `Broken` if not."""
        known = self.by_name[name]
        entry = known.entries.get(position)
        is_open = entry is not None and entry.is_open
        waits = is_open and self._head(known, position).event.resolution == QUARANTINED
        if not waits and (is_open or not known.cursor.is_done(position)):
            return
        fault = "is tried while it is quarantined" if waits else "is tried again below the cursor"
        if known.writer == process:
            raise Broken(f"{name}: position {position} {fault} by {process}, whose cursor it is")
        since = now - known.sent.get(process, -1e9)
        if since > self._lease_s + SLACK_S:
            raise Broken(f"{name}: position {position} {fault} by {process}, {since:.3f} s after its last write")
        self._count("tried by one that was just fenced")

    def succeeded(self, position: int) -> None:
        self._order += 1
        if position in self.first:
            self._count("handled again")
        else:
            self.first[position] = self._order

    def check_end(self) -> None:
        """Raise `Broken` for an event that was lost or handled out of order."""
        last: dict[AggregateKey, tuple[float, int]] = {}
        blocked: dict[AggregateKey, int] = {}
        entries = {position: entry for known in self.by_name.values() for position, entry in known.entries.items()}
        for position, key in sorted(self.relevant.items()):
            entry = entries.get(position)
            if position in self.skipped:
                continue
            if position not in self.first:
                if entry is None:
                    raise Broken(f"position {position} of {key} was never handled")
                if not entry.is_open:
                    raise Broken(f"position {position} of {key} is {entry.event.resolution} and was never handled")
                blocked.setdefault(key, position)
                continue
            if key in blocked and not (entry is not None and entry.is_open):
                raise Broken(f"position {position} of {key} was handled, and {blocked[key]} waits")
            order, before = last.get(key, (0.0, 0))
            if self.first[position] < order:
                raise Broken(f"position {position} of {key} was handled before {before}")
            last[key] = self.first[position], position
        for known in self.by_name.values():
            self._check_heads(known)

    def _check_heads(self, known: Ledgers) -> None:
        heads: set[AggregateKey] = set()
        for _, entry in sorted(known.entries.items()):
            if entry.is_open and entry.key not in heads:
                heads.add(entry.key)
                if entry.event.resolution != QUARANTINED:
                    raise Broken(f"position {entry.position} is {entry.event.resolution}, and nothing is before it")

    def _entry(self, known: Ledgers, position: int, entry: QuarantinedEntry | None) -> None:
        if entry is None:
            if position not in self.first:
                raise Broken(f"position {position} left the quarantine and was never handled")
            known.entries.pop(position, None)
            return
        resolution = entry.event.resolution
        self._count(resolution)
        if resolution == RETRIED and position not in self.first:
            raise Broken(f"position {position} is called retried and was never handled")
        if resolution == DROPPED and position not in self.first:
            self.skipped.add(position)
        known.entries[position] = entry

    def _moved(self, known: Ledgers, after: Cursor, sender: str) -> None:
        before = known.cursor
        for position, key in self.relevant.items():
            if not self._is_of(after, key):
                continue
            was_done, is_done = before.is_done(position), after.is_done(position)
            if was_done and not is_done and sender != OPERATOR:
                raise Broken(f"{after.name}: {sender} takes back that position {position} is done")
            if is_done and not was_done and position not in self.first and position not in known.entries:
                if sender != OPERATOR:
                    raise Broken(f"{after.name}: {sender} passes position {position} over, which was not handled")
                self.skipped.add(position)
        if after.position < before.position and sender != OPERATOR:
            raise Broken(f"{after.name}: {sender} puts it back from {before.position} to {after.position}")
        if after.position > before.position:
            self._count("cursor moved")
        if after.done:
            self._count("done beyond the cursor")

    def _is_of(self, cursor: Cursor, key: AggregateKey) -> bool:
        _, _, partition = cursor.name.partition("-")
        number, _, partitions = partition.partition("-of-")
        return not partition or partition_of(key, int(partitions)) == int(number) - 1

    def _head(self, known: Ledgers, position: int) -> QuarantinedEntry:
        key = known.entries[position].key
        return min(
            (entry for entry in known.entries.values() if entry.key == key and entry.is_open),
            key=lambda entry: entry.position,
        )

    def _count(self, occurrence: str) -> None:
        self.counts[occurrence] = self.counts.get(occurrence, 0) + 1
