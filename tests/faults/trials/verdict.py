"""The one check of every trial: what was said equals the log, and the read models equal the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eventjet.codec.headers import SAVE, RawRecord, header, save_of
from eventjet.codec.records import Decoder
from eventjet.domain.recorded import Recorded
from eventjet.errors import ApiRefused
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import ask_once
from eventjet.jetstream.reader import read_range
from eventjet.nats.endpoint import Endpoint
from eventjet.rebuild.log_audit import NOTES, Kind, LogAudit
from tests.faults.tally import Added, tally_app
from tests.faults.trials.commands import LOOKED, REFUSED, STORED, STRANGE, UNKNOWN, Said

TOLD_MAX = 8


@dataclass(slots=True)
class Figures:
    """What a trial counted; `+=` adds those of another log."""

    commands: int = 0
    acked: int = 0
    unknown: int = 0
    """Answers that were unknown at first; all but `unsettled` were settled later."""
    unsettled: int = 0
    refused: int = 0
    lost: int = 0
    twice: int = 0
    wrong: int = 0
    """Answers that the log contradicts, and errors that are none of eventjet's."""
    stale: int = 0
    """Decisions that recorded nothing, on a state older than one acknowledged before they began."""
    torn: int = 0
    """Saves that the server has kept a part of; `wrong` unless they were called unknown."""
    shared: int = 0
    """Saves in the log that shared their batch with others."""
    gaps: int = 0
    models: int = 0
    """Read models that do not equal the log, and say nothing of it."""
    told: list[str] = field(default_factory=list[str])

    def __iadd__(self, other: Figures) -> Figures:
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.told += other.told[: max(0, TOLD_MAX - len(self.told))]
        return self

    def tell(self, what: str) -> None:
        if len(self.told) < TOLD_MAX:
            self.told.append(what)

    @property
    def right(self) -> bool:
        return not any(getattr(self, name) for name in ("lost", "twice", "wrong", "stale", "torn", "gaps", "models"))


COUNTED = (
    "commands", "acked", "unknown", "unsettled", "refused", "lost", "twice", "wrong", "stale", "torn", "shared", "gaps",
    "models",
)  # fmt: skip


def log_of(endpoint: Endpoint, name: str) -> list[RawRecord]:
    """All that the server has, holes or not; nothing for a stream that is gone."""
    try:
        last = ask_once(endpoint, stream_info(name), timeout_s=20.0).last
    except ApiRefused:
        return []
    pages = read_range(endpoint, name, 1, last + 1, allow_holes=True) if last else iter(())
    return [record for page in pages for record in page]


def judge_log(said: Sequence[Said], records: Sequence[RawRecord], decode: Decoder) -> Figures:
    """Every answer against the log, and the log against itself."""
    figures = Figures(
        commands=len(said),
        acked=sum(one.answer == STORED for one in said),
        unknown=sum(one.was_unknown for one in said),
        unsettled=sum(one.answer == UNKNOWN for one in said),
        refused=sum(one.answer == REFUSED for one in said),
        shared=len({save_of(record[3]) for record in records if header(record[3], SAVE)}),
    )
    events = [one for record in records if (one := decode(record)) is not None]
    found: dict[int, list[Recorded[Any]]] = {}
    for event in events:
        found.setdefault(abs(int(event.data.amount * 100)), []).append(event)
    for one in said:
        _judge_answer(figures, one, found.get(one.number, []))
    for what in _gaps(records, events):
        figures.gaps += 1
        figures.tell(f"gap: {what}")
    _judge_order(figures, said)
    return figures


def _judge_answer(figures: Figures, said: Said, events: Sequence[Recorded[Any]]) -> None:
    shown = f"{said.kind} {said.number} on {', '.join(said.entities)}"
    positions = [event.position for event in events]
    whole = list(range(positions[0], positions[0] + said.events)) if positions else []
    if said.answer == STRANGE:
        figures.wrong += 1
        figures.tell(f"{shown} raised {said.error}")
    if len(positions) > said.events:
        figures.twice += 1
        figures.tell(f"{shown} is in the log at {positions}")
    elif positions and positions != whole:
        figures.torn += 1
        figures.wrong += said.answer != UNKNOWN
        figures.tell(f"{shown} is in the log in part, or apart: {positions}")
    if said.answer == STORED and not positions:
        figures.lost += 1
        figures.tell(f"{shown} was called stored at {said.positions} and is not in the log")
    elif said.answer == STORED and not set(said.positions) <= set(positions):
        figures.wrong += 1
        figures.tell(f"{shown} was called stored at {said.positions} and is at {positions}")
    elif said.answer in (REFUSED, LOOKED) and positions:
        figures.wrong += 1
        figures.tell(f"{shown} was called not stored ({said.error}) and is at {positions}")


def _judge_order(figures: Figures, said: Sequence[Said]) -> None:
    """What was answered before a command began, it must have seen."""
    by_entity: dict[str, list[Said]] = {}
    for one in said:
        if len(one.entities) == 1 and one.answer in (STORED, LOOKED) and not one.was_unknown:
            by_entity.setdefault(one.entities[0], []).append(one)
    for entity, answers in by_entity.items():
        ended = sorted((one for one in answers if one.answer == STORED), key=lambda one: one.ended)
        newest, passed = 0, 0
        for one in sorted(answers, key=lambda one: one.began):
            while passed < len(ended) and ended[passed].ended < one.began:
                newest = max(newest, ended[passed].version)
                passed += 1
            # What was told again what it had recorded before is as old as that.
            if one.version < newest:
                figures.stale += one.answer == LOOKED
                figures.wrong += one.answer == STORED
                figures.tell(f"{one.kind} {one.number} saw version {one.version} of {entity}, and {newest} was stored")


def _gaps(records: Sequence[RawRecord], events: Sequence[Recorded[Any]]) -> Iterator[str]:
    """What an audit finds, and numbers within events that do not follow one another."""
    if not records:
        return
    audit = LogAudit(tally_app(records[0][2].split(b".")[0].decode()), last=records[-1][0], examples=len(records))
    for record in records:
        audit.take(record)
    for found in audit.finish():
        if found.kind not in NOTES and found.kind is not Kind.TORN:  # which is counted already
            yield from (
                f"{found.kind} at {one.first} to {one.last} {one.subject}: {one.what}" for one in found.examples
            )
    numbers: Counter[str] = Counter()
    for event in events:
        if isinstance(event.data, Added):
            numbers[event.aggregate_id] += 1
            if event.data.number != numbers[event.aggregate_id]:
                told, expected = event.data.number, numbers[event.aggregate_id]
                yield f"{event.aggregate_id} at {event.position} has number {told}, not {expected}"
                numbers[event.aggregate_id] = told
