"""Fold one aggregate's history, or raise when versions are not contiguous or a predecessor check fails."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar, cast

from eventjet.domain.personal import is_private
from eventjet.domain.state import own_copy
from eventjet.errors import DefinitionError, HistoryBroken, UnexpectedExit

S = TypeVar("S")

COMMANDS_MAX = 1_024
"""Command ids remembered with a folded state."""
MARKS_MAX = 1_000_000
"""Limit of marks of older command ids, of 8 bytes each; when it is exceeded, all marks are dropped."""
_PARTS = 256
_PART_BYTES = 170


class Commands:
    """The versions that each command of an aggregate recorded: of the newest 1,024, and a mark of each older command.

    A mark is a digest: a command id without a mark never recorded anything, and an id with a mark has to be looked up
    in the log. The object contains only facts of the log, so copies of one history may share it.
    """

    __slots__ = ("_forgotten", "_marked", "_marks", "_versions", "complete")

    def __init__(self, versions: Mapping[str, tuple[int, int]] | None = None, *, complete: bool = True) -> None:
        self._versions = dict(versions or {})
        self._forgotten = 0
        self._marks: dict[int, array[int]] | None = {} if complete else None
        """Marks of the commands that were dropped, in parts that are quick to search; None if some are unknown."""
        self._marked = 0
        self.complete = complete
        """Whether the object contains every command of the history so far."""

    def add(self, command_id: str, version: int) -> None:
        """Note that a command recorded the event `version`, unless newer commands have already displaced it."""
        if version <= self._forgotten:
            return
        first, last = self._versions.get(command_id, (version, version))
        self._versions[command_id] = (min(first, version), max(last, version))
        if len(self._versions) > COMMANDS_MAX:
            oldest = next(iter(self._versions))
            _, self._forgotten = self._versions.pop(oldest)
            self.complete = False
            self._mark_of(oldest)

    def find(self, command_id: str) -> tuple[int, int] | None:
        """Return the first and last version that a command recorded; None if the command is not remembered."""
        return self._versions.get(command_id)

    def may_have(self, command_id: str) -> bool:
        """Return whether the command may have recorded something; False is certain."""
        if command_id in self._versions or self._marks is None:
            return True
        if self.complete:
            return False
        mark = _mark(command_id)
        return mark in self._marks.get(mark % _PARTS, ())

    def as_mapping(self, until: int) -> dict[str, tuple[int, int]]:
        """Return the commands up to a version and their spans of versions, oldest first."""
        return {command_id: span for command_id, span in self._versions.items() if span[1] <= until}

    @property
    def marks_bytes(self) -> int:
        """Return about how many bytes of memory the marks take."""
        return 8 * self._marked + _PART_BYTES * len(self._marks or ())

    def _mark_of(self, command_id: str) -> None:
        if self._marks is None:
            return
        mark = _mark(command_id)
        self._marks.setdefault(mark % _PARTS, array("Q")).append(mark)
        self._marked += 1
        if self._marked > MARKS_MAX:
            self._marks, self._marked = None, 0


def _mark(command_id: str) -> int:
    return int.from_bytes(blake2b(command_id.encode("utf-8", "surrogatepass"), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class FoldedState(Generic[S]):
    """A folded state, and the version and position of its last event."""

    state: S
    version: int
    """Version of its last event, 0 for none."""
    position: int
    """Position of its last event, 0 for none."""
    event_id: str = ""
    """Id of its last event."""
    commands: Commands = field(default_factory=Commands, compare=False)


SKIPPED = -1
"""`Link.expected` of a record that has a skip marker. The record keeps its version if that is the next one."""


class Link(NamedTuple):
    """One event of a history, with what the predecessor check needs."""

    version: int
    position: int
    expected: int | None
    """The position the event was written after, if its header says so (the first of a save); `SKIPPED` if skipped."""
    command_id: str | None
    data: Any
    """The event; None if it is retired or skipped, so that the fold passes over it."""


def evolved(state: S, event: Any) -> S:
    """Return the state after an event; raises `DefinitionError` if `evolve` raises or returns another type."""
    name = type(state).__qualname__
    try:
        after: Any = cast("Any", state).evolve(event)
    except BaseException as raised:  # noqa: BLE001 - whatever it is, it is the application's
        error = UnexpectedExit.instead_of(raised)
        # The message of the exception may repeat a personal value.
        private = is_private(state.__class__) or is_private(event.__class__)
        reason = "" if private else next(iter(str(raised).splitlines()), "")
        fault = f"{name}.evolve raised {type(raised).__name__} for {type(event).__qualname__}: {reason}".rstrip(": .")
        remedy = (
            "Return replace(self, …), which is another state"
            if isinstance(raised, FrozenInstanceError)
            else "It takes every event in any state: return self where nothing changes"
        )
        raise DefinitionError([f"{fault}. {remedy}"]) from error
    if type(after) is not type(state):
        returned = "None" if after is None else f"a {type(after).__qualname__}"
        raise DefinitionError([f"{name}.evolve returned {returned} for {type(event).__qualname__}; return a {name}"])
    return cast("S", after)


def fold_history(folded: FoldedState[S], links: Iterable[Link], subject: str, last_id: str) -> FoldedState[S]:
    """Fold one aggregate's events onto a state; `last_id` is the id of the last event.

    Raises `HistoryBroken` when a version is not the next, or an event follows a different event than it expected, and
    `DefinitionError` as `evolved` does. The given state is copied first, so `evolve` cannot change it.
    """
    state, version, position = own_copy(folded.state), folded.version, folded.position
    for next_version, next_position, expected, command_id, data in links:
        if next_version != version + 1:
            if expected == SKIPPED:
                position = next_position
                continue
            raise HistoryBroken(subject, next_position, f"version {next_version} follows version {version}")
        if next_position <= position:
            raise HistoryBroken(subject, next_position, f"it comes after position {position}")
        if expected is not None and expected not in (position, SKIPPED):
            reason = f"it was written after position {expected}, but {position} came before it"
            raise HistoryBroken(subject, next_position, reason)
        if data is not None:
            state = evolved(state, data)
        version, position = next_version, next_position
        if command_id is not None:
            folded.commands.add(command_id, version)
    return FoldedState(state, version, position, last_id, folded.commands)
