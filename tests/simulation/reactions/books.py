"""What is checked of cursors and their quarantine at each write, as the server stores it."""

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
    """A promise was broken; the message says which, of what."""


@dataclass(slots=True)
class Ledgers:
    """Of one cursor: what it says, who wrote it, and what is parked."""

    cursor: Cursor
    writer: str = OPERATOR
    sent: dict[str, float] = field(default_factory=dict[str, float])
    """When each process sent the last write that was stored."""
    written_at: float = 0.0
    """When the last one was sent."""
    entries: dict[int, QuarantinedEntry] = field(default_factory=dict[int, QuarantinedEntry])


class Books:
    """What was handled, where the cursors stand, and whether the one follows from the other."""

    def __init__(self, prefix: str, lease_s: float) -> None:
        self.relevant: dict[int, AggregateKey] = {}
        """Positions that something follows, and whose they are."""
        self.first: dict[int, float] = {}
        """When each was handled first, and with success."""
        self.skipped: set[int] = set()
        """Passed over because somebody said so: by setting a cursor beyond them, or by dropping them."""
        self.by_name: dict[str, Ledgers] = {}
        self.counts: dict[str, int] = {}
        self._prefix = prefix
        self._lease_s = lease_s
        self._order = 0.0

    def written(self, stored: Sequence[Stored], sender: str, sent_at: float) -> None:
        """A batch that the server has stored; raises `Broken`."""
        changes: list[tuple[str, Cursor]] = []
        for one in stored:
            kind, name, *rest = one.subject.removeprefix(self._prefix).split(".")
            if kind == "c":
                changes.append((name, Cursor.decoded(one.body)))
            elif kind == "q":
                self._entry(self.by_name[name], int(rest[0]), QuarantinedEntry.decoded(one.body) if one.body else None)
        for name, cursor in changes:
            known = self.by_name.get(name)
            if known is None:
                self.by_name[name] = Ledgers(cursor)
                continue
            self._moved(known, cursor, sender)
            known.cursor, known.writer = cursor, sender
            known.sent[sender] = known.written_at = sent_at

    def begins(self, name: str, process: str, position: int, now: float) -> None:
        """A handler is called; raises `Broken` where it must not be."""
        known = self.by_name[name]
        entry = known.entries.get(position)
        is_open = entry is not None and entry.is_open
        waits = is_open and self._head(known, position).parked.resolution == QUARANTINED
        if not waits and (is_open or not known.cursor.is_done(position)):
            return
        what = "is tried while it is parked" if waits else "is tried again below the cursor"
        if known.writer == process:
            raise Broken(f"{name}: position {position} {what} by {process}, whose cursor it is")
        since = now - known.sent.get(process, -1e9)
        if since > self._lease_s + SLACK_S:
            raise Broken(f"{name}: position {position} {what} by {process}, {since:.3f} s after its last write")
        self._count("tried by one that was just fenced")

    def succeeded(self, position: int) -> None:
        self._order += 1
        if position in self.first:
            self._count("handled again")
        else:
            self.first[position] = self._order

    def check_end(self) -> None:
        """Raises `Broken` for what was lost, or handled out of order."""
        last: dict[AggregateKey, tuple[float, int]] = {}
        blocked: dict[AggregateKey, int] = {}
        entries = {position: one for known in self.by_name.values() for position, one in known.entries.items()}
        for position, key in sorted(self.relevant.items()):
            entry = entries.get(position)
            if position in self.skipped:
                continue
            if position not in self.first:
                if entry is None:
                    raise Broken(f"position {position} of {key} was never handled")
                if not entry.is_open:
                    raise Broken(f"position {position} of {key} is {entry.parked.resolution} and was never handled")
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
                if entry.parked.resolution != QUARANTINED:
                    raise Broken(f"position {entry.position} is {entry.parked.resolution}, and nothing is before it")

    def _entry(self, known: Ledgers, position: int, entry: QuarantinedEntry | None) -> None:
        if entry is None:
            if position not in self.first:
                raise Broken(f"position {position} left the quarantine and was never handled")
            known.entries.pop(position, None)
            return
        resolution = entry.parked.resolution
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
            was, now = before.is_done(position), after.is_done(position)
            if was and not now and sender != OPERATOR:
                raise Broken(f"{after.name}: {sender} takes back that position {position} is done")
            if now and not was and position not in self.first and position not in known.entries:
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
        return min((one for one in known.entries.values() if one.key == key and one.is_open), key=lambda e: e.position)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
