"""What an audit finds: each kind with what it costs and the way out, and how many there are. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What can be wrong with a log."""

    SETTING = "setting"
    GONE = "gone"
    ARCHIVED = "archived"
    END = "end"
    DIFFERS = "differs"
    TORN = "torn"
    CHAIN = "chain"
    FOREIGN = "foreign"
    UNDECODABLE = "undecodable"
    UNKNOWN = "unknown"
    VOID = "void"
    ID = "id"
    TIME = "time"


class Explanation(NamedTuple):
    """What people are told about a kind."""

    title: str
    cost: str
    way_out: str


EXPLAINED: Mapping[Kind, Explanation] = {
    Kind.SETTING: Explanation(
        title="The stream may lose events by its own settings",
        cost="The server drops events to keep such a limit, or lets somebody delete them, and tells nobody.",
        way_out="First of all `eventjet init --repair`, which sets them back as declared.",
    ),
    Kind.GONE: Explanation(
        title="Events are gone",
        cost="Workers stop and rebuilds refuse (LogIncomplete); an aggregate they belong to cannot be loaded, or has "
        "begun again at version 1. The live read models may be the last that know of them.",
        way_out="Only a copy has them: an archive (`eventjet audit --archive URL` looks into one), a mirror or a "
        "backup of the stream. Put that in the stream's place. If there is none, `eventjet init --repair "
        "--accept-loss` goes on without them.",
    ),
    Kind.ARCHIVED: Explanation(
        title="Events are gone from the log, and the archive has them",
        cost="Workers stop, and rebuilds from the log alone refuse (LogIncomplete); an aggregate they belong to cannot "
        "be loaded, or has begun again at version 1.",
        way_out="Stop writers and workers. `eventjet archive URL` seals what came since, if nothing of that is gone; "
        "then back the stream up, delete it, and `eventjet restore URL` publishes all of it again, at the same "
        "positions. Until then `eventjet rebuild --from-archive URL` makes true read models.",
    ),
    Kind.END: Explanation(
        title="The log has lost its end, and the archive has it",
        cost="The next save takes a position that another event had, and from then on log and archive tell two pasts. "
        "Read models that saw the end stop with LogRolledBack.",
        way_out="Stop what writes, at once. `eventjet restore URL` fills the log up to the archive's end, unless the "
        "two tell different pasts already.",
    ),
    Kind.DIFFERS: Explanation(
        title="Log and archive tell different pasts",
        cost="One of the two is not what was recorded, and rebuilds from the two give different rows.",
        way_out="Compare with a mirror, a backup, or what the business knows. If the log is right, seal it into a new "
        "folder (`eventjet archive OTHER_URL`); if the archive is, back the stream up, delete it, and "
        "`eventjet restore URL`.",
    ),
    Kind.TORN: Explanation(
        title="Saves are stored in part",
        cost="What was decided together is not all there. The save raised SaveTorn, and so does the "
        "same command with the same id.",
        way_out="The events that are there stay valid and count. `eventjet history AGGREGATE ID` shows them; record "
        "what is missing with a command of its own, or its opposite. Do not lower limits of the stream while "
        "something writes.",
    ),
    Kind.CHAIN: Explanation(
        title="Histories are broken",
        cost="`load` and `execute` of these aggregates raise HistoryBroken, so nothing can be decided on them, and a "
        "projection that takes such an event stops there, unless it quarantines it.",
        way_out="Where events are gone, too, that is the cause: bring them back. Otherwise another program wrote here: "
        "`eventjet history AGGREGATE ID` shows what, its right to publish has to go, and `eventjet skip POSITION "
        "--reason …` has everybody pass over the first one of each aggregate.",
    ),
    Kind.FOREIGN: Explanation(
        title="Events are on subjects that are not theirs",
        cost="The aggregates of these subjects cannot be loaded, and a projection that takes such events stops there, "
        "unless it quarantines them.",
        way_out="Another program published them: take its right to publish to these subjects away. "
        "`eventjet tail --from POSITION` shows what it wrote.",
    ),
    Kind.UNDECODABLE: Explanation(
        title="Events cannot be decoded",
        cost="Their aggregates cannot be loaded, and a projection stops there, unless it quarantines them.",
        way_out="`eventjet tail --from POSITION` shows one. If a newer version of the app wrote it, deploy that; "
        "otherwise `eventjet skip POSITION --reason …` has everybody pass over it.",
    ),
    Kind.UNKNOWN: Explanation(
        title="Events are of types or schemas that the app does not declare",
        cost="Their aggregates cannot be loaded, and projections stop there.",
        way_out="If a newer release recorded them, deploy that. If they have other names now, say so with `formerly` "
        "of their events; add the upcaster that is missing. Only what nobody needs goes into `retired_events`: it is "
        "passed over.",
    ),
    Kind.VOID: Explanation(
        title="Records are void",
        cost="Every reader passes over them, as somebody declared with `eventjet skip`.",
        way_out="None is needed; `eventjet tail --from POSITION` shows one.",
    ),
    Kind.ID: Explanation(
        title="Event ids are missing or used twice",
        cost="What goes by event ids (consumers that skip what they have seen, `resolve`) takes two events for one.",
        way_out="eventjet gives every event an id of its own: find what else publishes here, or what republished a "
        "backup, and take its right to publish away.",
    ),
    Kind.TIME: Explanation(
        title="Times run backwards",
        cost="`load(at=…)` and `tail --since` may be off by as much; order goes by position and is not touched.",
        way_out="Compare the clocks of the NATS servers.",
    ),
}
"""In the order in which they are told: what to do first comes first."""

MISSING = frozenset({Kind.GONE, Kind.ARCHIVED})
"""Kinds that are about positions of the log that it does not have."""
NOTES = frozenset({Kind.TIME, Kind.VOID})
"""Kinds that are told, and no reason to call a log unsound."""
_TEXT_MAX = 300
"""Characters of what others wrote that are shown."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, at one position or at a run of them."""

    first: int
    """Position; 0 for what is about the stream."""
    last: int
    subject: str
    """Empty where it is not known, or not one."""
    what: str


@dataclass(slots=True)
class Found:
    """All findings of a kind."""

    kind: Kind
    findings: int = 0
    positions: int = 0
    """That they are about; several may be about one."""
    examples: list[Finding] = field(default_factory=list[Finding])
    """The first ones."""


class Findings:
    """Counts everything and keeps the first `examples` of each kind."""

    def __init__(self, examples: int) -> None:
        self._found: dict[Kind, Found] = {}
        self._examples = examples

    def add(self, kind: Kind, first: int, last: int, subject: str, what: str) -> None:
        found = self._found.setdefault(kind, Found(kind))
        found.findings += 1
        found.positions += last - first + 1
        if len(found.examples) < self._examples:
            found.examples.append(Finding(first, last, subject[:_TEXT_MAX], what[:_TEXT_MAX]))

    def by_kind(self) -> tuple[Found, ...]:
        """Of the kinds that there are, in the order in which they are told."""
        return tuple(self._found[kind] for kind in EXPLAINED if kind in self._found)
