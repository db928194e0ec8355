"""The check of every trial: the answers equal the log, and the read models equal the log."""

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
from tests.faults.trials.commands import LOOKED, REFUSED, STORED, STRANGE, UNKNOWN, Attempt

PROBLEMS_MAX = 8


@dataclass(slots=True)
class Figures:
    """The counts of a trial; `+=` adds those of another log."""

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
    """Saves of which the server has kept a part; `wrong` unless they were called unknown."""
    shared: int = 0
    """Saves in the log that shared their batch with others."""
    gaps: int = 0
    models: int = 0
    """Read models that do not equal the log, and do not say so."""
    problems: list[str] = field(default_factory=list[str])

    def __iadd__(self, other: Figures) -> Figures:
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.problems += other.problems[: max(0, PROBLEMS_MAX - len(self.problems))]
        return self

    def add_problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    @property
    def right(self) -> bool:
        return not any(getattr(self, name) for name in ("lost", "twice", "wrong", "stale", "torn", "gaps", "models"))


COUNTED = (
    "commands", "acked", "unknown", "unsettled", "refused", "lost", "twice", "wrong", "stale", "torn", "shared", "gaps",
    "models",
)  # fmt: skip


def log_of(endpoint: Endpoint, name: str) -> list[RawRecord]:
    """Return all that the server has, with holes or without; nothing for a stream that is gone."""
    try:
        last = ask_once(endpoint, stream_info(name), timeout_s=20.0).last
    except ApiRefused:
        return []
    pages = read_range(endpoint, name, 1, last + 1, allow_holes=True) if last else iter(())
    return [record for page in pages for record in page]


def judge_log(attempts: Sequence[Attempt], records: Sequence[RawRecord], decode: Decoder) -> Figures:
    """Compare every answer with the log, and check the log itself."""
    figures = Figures(
        commands=len(attempts),
        acked=sum(attempt.answer == STORED for attempt in attempts),
        unknown=sum(attempt.had_unknown for attempt in attempts),
        unsettled=sum(attempt.answer == UNKNOWN for attempt in attempts),
        refused=sum(attempt.answer == REFUSED for attempt in attempts),
        shared=len({save_of(record[3]) for record in records if header(record[3], SAVE)}),
    )
    events = [attempt for record in records if (attempt := decode(record)) is not None]
    events_by_number: dict[int, list[Recorded[Any]]] = {}
    for event in events:
        events_by_number.setdefault(abs(int(event.data.amount * 100)), []).append(event)
    for attempt in attempts:
        _judge_answer(figures, attempt, events_by_number.get(attempt.number, []))
    for gap in _gaps(records, events):
        figures.gaps += 1
        figures.add_problem(f"gap: {gap}")
    _judge_order(figures, attempts)
    return figures


def _judge_answer(figures: Figures, attempt: Attempt, events: Sequence[Recorded[Any]]) -> None:
    description = f"{attempt.kind} {attempt.number} on {', '.join(attempt.entities)}"
    positions = [event.position for event in events]
    whole = list(range(positions[0], positions[0] + attempt.events)) if positions else []
    if attempt.answer == STRANGE:
        figures.wrong += 1
        figures.add_problem(f"{description} raised {attempt.error}")
    if len(positions) > attempt.events:
        figures.twice += 1
        figures.add_problem(f"{description} is in the log at {positions}")
    elif positions and positions != whole:
        figures.torn += 1
        figures.wrong += attempt.answer != UNKNOWN
        figures.add_problem(f"{description} is in the log in part, or apart: {positions}")
    if attempt.answer == STORED and not positions:
        figures.lost += 1
        figures.add_problem(f"{description} was called stored at {attempt.positions} and is not in the log")
    elif attempt.answer == STORED and not set(attempt.positions) <= set(positions):
        figures.wrong += 1
        figures.add_problem(f"{description} was called stored at {attempt.positions} and is at {positions}")
    elif attempt.answer in (REFUSED, LOOKED) and positions:
        figures.wrong += 1
        figures.add_problem(f"{description} was called not stored ({attempt.error}) and is at {positions}")


def _judge_order(figures: Figures, attempts: Sequence[Attempt]) -> None:
    """Check that a command has seen all that was answered before it began."""
    by_entity: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        if len(attempt.entities) == 1 and attempt.answer in (STORED, LOOKED) and not attempt.had_unknown:
            by_entity.setdefault(attempt.entities[0], []).append(attempt)
    for entity, answers in by_entity.items():
        ended = sorted((attempt for attempt in answers if attempt.answer == STORED), key=lambda attempt: attempt.ended)
        newest, passed = 0, 0
        for attempt in sorted(answers, key=lambda attempt: attempt.began):
            while passed < len(ended) and ended[passed].ended < attempt.began:
                newest = max(newest, ended[passed].version)
                passed += 1
            # A repeated command that gets its first answer again is as old as that answer.
            if attempt.version < newest:
                figures.stale += attempt.answer == LOOKED
                figures.wrong += attempt.answer == STORED
                figures.add_problem(
                    f"{attempt.kind} {attempt.number} saw version {attempt.version} of {entity}, "
                    f"and {newest} was stored"
                )


def _gaps(records: Sequence[RawRecord], events: Sequence[Recorded[Any]]) -> Iterator[str]:
    """Yield the findings of an audit, and numbers within events that do not follow one another."""
    if not records:
        return
    audit = LogAudit(tally_app(records[0][2].split(b".")[0].decode()), last=records[-1][0], examples=len(records))
    for record in records:
        audit.take(record)
    for finding in audit.finish():
        if finding.kind not in NOTES and finding.kind is not Kind.TORN:  # which is counted already
            yield from (
                f"{finding.kind} at {example.first} to {example.last} {example.subject}: {example.what}"
                for example in finding.examples
            )
    numbers: Counter[str] = Counter()
    for event in events:
        if isinstance(event.data, Added):
            numbers[event.aggregate_id] += 1
            if event.data.number != numbers[event.aggregate_id]:
                number, expected = event.data.number, numbers[event.aggregate_id]
                yield f"{event.aggregate_id} at {event.position} has number {number}, not {expected}"
                numbers[event.aggregate_id] = number
